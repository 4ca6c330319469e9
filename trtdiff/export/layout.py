"""A diffusers checkpoint's folders and JSON files, read with errors that name the file and the field."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtdiff.errors import CheckpointError

NOT_COMPILED = frozenset({"feature_extractor", "image_encoder", "safety_checker"})
"""Components that take no part in making a picture; they may be absent, and their weights are never read."""

INFINITE = ("-Infinity", "Infinity")

DAMAGED = "download it again; the copy is incomplete or damaged"
"""What to do about a file that is not what it should be."""


class Configs(dict[str, Mapping[str, Any]]):
    """Component folder → its config; asking for one that the checkpoint lacks is a CheckpointError, not a KeyError."""

    def __missing__(self, folder: str) -> Mapping[str, Any]:
        raise CheckpointError(
            f"the checkpoint has no {folder}",
            where=f"model_index.json names {', '.join(self)}",
            hint="give a complete checkpoint; save one with diffusers' save_pretrained",
        )


def components_of(index: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Give component folder → library, of those that the pipeline has and that take part in making a picture."""
    found = {}
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2:
            continue
        library, cls = value
        if library is None or cls is None:
            continue
        if not (isinstance(library, str) and isinstance(cls, str) and re.fullmatch(r"\w+", name)):
            raise CheckpointError(
                f"model_index.json describes {name!r} as {value!r}",
                where=str(path / "model_index.json"),
                hint="a component is written as [library, class]",
            )
        if name not in NOT_COMPILED:
            found[name] = library
    if not found:
        raise CheckpointError(
            "model_index.json names no components", where=str(path / "model_index.json"), hint=DAMAGED
        )
    return found


def options_of(index: Mapping[str, Any]) -> dict[str, Any]:
    """Give what the pipeline itself was configured with: `force_zeros_for_empty_prompt` and the like."""
    return {
        name: value
        for name, value in index.items()
        if not name.startswith("_") and (value is None or isinstance(value, bool | int | float | str))
    }


def left_out(index: Mapping[str, Any]) -> tuple[str, ...]:
    """Name what the pipeline has and trtdiff does not compile, of what changes pictures."""
    return tuple(name for name in ("safety_checker",) if (index.get(name) or [None])[0] is not None)


def read_config(folder: Path) -> dict[str, Any]:
    """Read a component's config.

    A tokenizer's is its tokenizer_config.json, and over it the special_tokens_map.json of checkpoints that are older
    than `added_tokens_decoder`, as transformers reads them: Stable Diffusion 2 names its padding `!` only there.
    """
    if not folder.is_dir():
        raise CheckpointError(f"component folder {folder.name} is missing", where=str(folder), hint=DAMAGED)
    kind = next((kind for kind in ("tokenizer", "scheduler") if folder.name.startswith(kind)), None)
    path = folder / (f"{kind}_config.json" if kind else "config.json")
    config, special = read_json(path, infinite=kind == "scheduler"), folder / "special_tokens_map.json"
    legacy = special.is_file() and "added_tokens_decoder" not in config
    return {**config, **read_json(special)} if legacy else config


def read_json(path: Path, *, infinite: bool = False) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError for a file that is missing, damaged or holds something else.

    `infinite` lets `-Infinity` and `Infinity` stand, which diffusers writes into schedulers' configs (a DPM solver's
    `lambda_min_clipped`), as these words: no JSON has such numbers.
    """

    def constant(word: str) -> Any:
        if infinite and word in INFINITE:
            return word
        raise ValueError(f"{word} is not JSON")

    try:
        read = json.loads(path.read_bytes(), parse_constant=constant)
    except OSError as error:
        raise CheckpointError(f"cannot read {path.name}: {error.strerror}", where=str(path), hint=DAMAGED) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is damaged: {error}", where=str(path), hint=DAMAGED) from None
    if not isinstance(read, dict):
        raise CheckpointError(f"{path.name} is not a JSON object", where=str(path), hint=DAMAGED)
    return read


def listing(folder: Path) -> list[str]:
    """Names in a folder, sorted; none where it is not there."""
    return sorted(item.name for item in folder.iterdir() if not _is_pipe(item)) if folder.is_dir() else []


def _is_pipe(path: Path) -> bool:
    """Whether reading it would wait for a writer."""
    return path.is_fifo() or path.is_socket()
