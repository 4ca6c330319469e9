"""A recipe of somebody's own, from a TOML file.

    based_on = "fp8"                      # a built-in recipe; all that is not named here is as it is there
    name = "fp8-careful"                  # default: the file's name

    [quantization]
    keep = ["mid_block.*", "*.to_out.0"]  # module paths that stay in the base type, besides the built-in's
    operators = ["conv", "linear"]

    [tolerance]                           # relative L2; levels of 255
    components = { denoiser = 0.05 }
    latents = 0.1

Without `based_on`, `base` ("fp16", "bf16", "fp32") and the quantization's `weights` and `activations` are to be said.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from trtdiff.errors import UsageError
from trtdiff.recipes import RECIPES
from trtdiff.recipes.base import PrecisionRecipe
from trtdiff.recipes.quantization import Quantization
from trtdiff.types import Tolerance

BASES = ("fp16", "bf16", "fp32")
_ASKED = "the recipe keeps it"


@dataclass(frozen=True)
class _File:
    """What may stand in the file."""

    based_on: str = ""
    base: str = ""
    name: str = ""
    summary: str = ""
    quantization: Mapping[str, Any] = field(default_factory=dict)
    tolerance: Mapping[str, Any] = field(default_factory=dict)


def own_recipe(path: Path) -> PrecisionRecipe:
    """Read a recipe. Raises UsageError, which names the field and, where one is misspelt, the nearest."""
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"cannot read {path.name}: {words}", where=str(path), hint="name a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path.name} is not TOML: {error}", where=str(path), hint="see the README for one") from None
    file = _read(raw, _File, str(path))
    start = _start(file, str(path))
    named = replace(
        start, name=file.name or path.stem, summary=file.summary or f"{start.summary}; as {path.name} has it",
        file=str(path), based_on=file.based_on,
    )  # fmt: skip
    return replace(named, quantization=_quantization(file, start.quantization, str(path)),
                   tolerance=_tolerance(file, start.tolerance, str(path)))  # fmt: skip


def _start(file: _File, where: str) -> PrecisionRecipe:
    if file.based_on and file.base:
        raise UsageError("both based_on and base are given", where=f"{where}: base", hint="leave one out")
    if file.based_on:
        if file.based_on not in RECIPES:
            raise UsageError(f"no precision is called {file.based_on!r}", where=f"{where}: based_on",
                             hint=f"known: {', '.join(RECIPES)}")  # fmt: skip
        return RECIPES[file.based_on]
    if file.base not in BASES:
        raise UsageError(f"{file.base!r} is no base type" if file.base else "the recipe starts from nothing",
                         where=f"{where}: base",
                         hint=f'write base = "fp16" ({", ".join(BASES)}), or based_on')  # fmt: skip
    return RECIPES[file.base]


def _quantization(file: _File, start: Quantization | None, where: str) -> Quantization | None:
    given = dict(file.quantization)
    if not given:
        return start
    if "keep" in given:
        asked = given["keep"]
        if not isinstance(asked, list | Mapping) or not all(isinstance(it, str) and it for it in asked):
            raise UsageError(f"{asked!r} is no list of module patterns", where=f"{where}: quantization.keep",
                             hint='write it as keep = ["mid_block.*"]')  # fmt: skip
        if isinstance(asked, list):
            asked = dict.fromkeys(asked, _ASKED)
        given["keep"] = {**(start.keep if start else {}), **asked}
    plain = {} if start is None else msgspec.to_builtins(start)
    made: Quantization = _read({**plain, **given}, Quantization, f"{where}: quantization")
    return made


def _tolerance(file: _File, start: Tolerance, where: str) -> Tolerance:
    given = dict(file.tolerance)
    if isinstance(given.get("components"), Mapping):
        given["components"] = {**given["components"], **start.components, **given["components"]}
    made: Tolerance = _read({**msgspec.to_builtins(start), **given}, Tolerance, f"{where}: tolerance")
    return made


def _read(raw: Mapping[str, Any], kind: Any, where: str) -> Any:
    """Convert plain values; a field that the kind has not is an error."""
    names = list(kind.__dataclass_fields__)
    if unknown := [name for name in raw if name not in names]:
        near = get_close_matches(unknown[0], names, n=1)
        raise UsageError(f"a recipe has no field {unknown[0]!r}", where=where,
                         hint=f"did you mean {near[0]}?" if near else f"it has {', '.join(names)}")  # fmt: skip
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"not a recipe: {error}", where=where, hint="correct the field that is named") from None
