"""The file of a bundle's sampler tables: every scheduler, step count and image-to-image start, opened in a millisecond.

A safetensors file. Its metadata says which samplers there are; each has seven tensors, read when first asked for:

    <name>/rows       [R, columns] float32  coefficients of x_1, x_2, … on the columns that are ever used; a row that
                                            several starts share stands here once
    <name>/first      [tables, 2] float32   coefficients of x_0 on the clean latent and on the first noise
    <name>/timesteps  [T] float32           what the model is given, one a call (its embedding rounds to float32 anyway)
    <name>/scales     [T] float32           latent to model input
    <name>/draws      [T] uint8             1 where a noise is drawn
    <name>/known      [T, 2] float32        x_i where a mask keeps the picture, i = 1 … calls - 1: coefficients of the
                                            clean latent and of the first noise; [0, 2] if the scheduler adds no noise
    <name>/index      [tables, 7] int32     steps, start (-1: text to image), calls, first timestep,
                                            first own row, own rows, first shared row

Coefficients are float32, which is what the denoiser is given. After x_0, a table's rows are its own, then as many
shared ones as make `calls + 1`.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from trtdiff.errors import ArtefactError, UsageError
from trtdiff.flow import depends_on_size, flow_table
from trtdiff.latent_log import ENTRY
from trtdiff.sampler import SamplerTable
from trtdiff.types import Array

FORMAT = "trtdiff-samplers"
SCHEMA = 2
TENSORS = {
    "rows": np.float32,
    "first": np.float32,
    "timesteps": np.float32,
    "scales": np.float32,
    "draws": np.uint8,
    "known": np.float32,
    "index": np.int32,
}
TEXT = -1
"""Stands for "no start" in the index."""


@dataclass(frozen=True)
class SamplerInfo:
    """What the file says of one sampler without reading its tables."""

    name: str
    class_name: str
    config: Mapping[str, Any]
    """The diffusers config and the schedule call that the digest covers."""
    digest: str
    window: int
    columns: tuple[int, ...]
    """Which of the 3 m columns are stored; the others are zero."""
    residual: float
    affinity: float
    """Largest relative difference from diffusers' own loop, measured when compiled."""
    refused: Mapping[str, str]
    """Step counts that the scheduler refuses, each with its reason."""
    order: int
    """Timesteps a step, as diffusers has it: a start skips start · order of them."""
    no_image: str
    """Why there are no tables for image to image, where there are none."""
    no_mask: str
    """Why tables have no rows for a mask that keeps the picture, where they have none."""
    no_other_size: str
    """Why tables hold for the number of image tokens in `config` only, where they do and a schedule depends on it."""


@dataclass
class SamplerBook:
    """The sampler tables of a bundle. `SamplerBook.open(path)`, then `table(name, steps, start)`."""

    path: Path
    samplers: Mapping[str, SamplerInfo]
    made_by: Mapping[str, str]
    """Versions of the libraries whose schedulers these are."""
    _pages: dict[str, dict[str, Array]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a file; only its header is read. ArtefactError when it is no whole sampler file of this schema."""
        path = Path(path)
        file = _safe_open(path)
        try:
            about = json.loads((file.metadata() or {})["about"])
            kind = (about["format"], about["schema"])
            if kind != (FORMAT, SCHEMA):
                raise _damaged(path, f"it is {kind}, not {(FORMAT, SCHEMA)}")
            samplers = {
                entry["name"]: SamplerInfo(**{**entry, "columns": tuple(entry["columns"])})
                for entry in about["samplers"]
            }
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(path, f"its metadata cannot be read: {error!r}") from error
        if set(file.keys()) != {f"{name}/{tensor}" for name in samplers for tensor in TENSORS} or not samplers:
            raise _damaged(path, "its tensors are not those that its metadata lists")
        return cls(path, samplers, about["made_by"])

    @property
    def names(self) -> tuple[str, ...]:
        """Samplers in the file; the first is the one to use when none is asked for."""
        return tuple(self.samplers)

    def steps(self, name: str) -> tuple[int, ...]:
        """Step counts that this sampler has tables for."""
        index = self._page(name)["index"]
        return tuple(np.unique(index[:, 0]).tolist())

    def table(self, name: str, steps: int, start: int | None = None, image_tokens: int | None = None) -> SamplerTable:
        """Give one table.

        `start` None is text to image. A number is image to image from that start, as `start_of_strength` gives it; 0 is
        not None: strength 1 starts from the clean latent with the noise of the first timestep added.
        `image_tokens` is the size of the picture in tokens of the transformer, None the one compiled for: some
        schedules depend on it, and such a table is derived where it is not stored.
        """
        page, info = self._page(name), self.samplers[name]
        try:
            table = read_table(info, page, steps, start)
        except (UsageError, IndexError, ValueError) as error:
            raise _damaged(self.path, f"sampler {name}, {steps} steps, start {start}: {error}") from error
        if table is None:
            raise self._missing(name, steps, start)
        if image_tokens is None or not depends_on_size(info.config):
            return table
        if image_tokens == (compiled := info.config["call"]["image_tokens"]):
            return table
        if info.no_other_size:
            raise UsageError(
                f"sampler {name} was compiled for {compiled} image tokens, not {image_tokens} ({info.no_other_size})",
                hint="choose another sampler, or the native size",
            )
        return flow_table(name, info.config, steps, start, image_tokens)

    def masked_table(
        self, name: str, steps: int, start: int | None = None, image_tokens: int | None = None
    ) -> SamplerTable:
        """Give one table whose `known` is there, or say why this sampler cannot keep a part of a picture.

        `start` None is what the inpainting pipelines of Stable Diffusion make of strength 1: pure noise.
        """
        table = self.table(name, steps, start, image_tokens)
        if table.known is None:
            because = self.samplers[name].no_mask
            raise UsageError(f"sampler {name} cannot keep a part of a picture ({because})", hint="choose another one")
        return table

    def _page(self, name: str) -> dict[str, Array]:
        if name not in self.samplers:
            raise UsageError(f"no sampler is called {name!r}", where=str(self.path), hint=near(name, self.names))
        if name not in self._pages:
            file = _safe_open(self.path)
            page = {tensor: file.get_tensor(f"{name}/{tensor}") for tensor in TENSORS}
            shapes = {tensor: values.shape for tensor, values in page.items()}
            times = page["timesteps"].shape
            if (
                any(page[tensor].dtype != dtype for tensor, dtype in TENSORS.items())
                or len(times) != 1
                or shapes["rows"][1:] != (len(self.samplers[name].columns),)
                or shapes["index"][1:] != (7,)
                or shapes["first"] != (len(page["index"]), 2)
                or not shapes["timesteps"] == shapes["scales"] == shapes["draws"] == times
                or shapes["known"] != (0 if self.samplers[name].no_mask else times[0], 2)
            ):
                raise _damaged(self.path, f"the tensors of sampler {name} have shapes {shapes}")
            self._pages[name] = page
        return self._pages[name]

    def _missing(self, name: str, steps: int, start: int | None) -> UsageError:
        known = self.steps(name)
        refused = self.samplers[name].refused.get(str(steps))
        if steps in known and self.samplers[name].no_image:
            return UsageError(f"sampler {name} cannot start from an image ({self.samplers[name].no_image})")
        if steps in known:
            return UsageError(f"{steps} steps cannot start at step {start}", hint=f"starts are 0 … {steps - 1}")
        because = f": the scheduler itself refuses ({refused})" if refused else ""
        return UsageError(f"sampler {name} has no table for {steps} steps{because}", hint=f"compiled: {ranges(known)}")


def read_table(info: SamplerInfo, page: Mapping[str, Array], steps: int, start: int | None) -> SamplerTable | None:
    """Put one table together from a sampler's tensors; None when there is none for these steps and this start."""
    index = page["index"]
    found = np.flatnonzero((index[:, 0] == steps) & (index[:, 1] == (TEXT if start is None else start)))
    if not len(found) or start == TEXT:
        return None
    _, _, calls, time, own, owned, shared = index[found[0]].tolist()
    rest = calls - owned
    reach = {"rows": max(own + owned, shared + rest), "timesteps": time + calls}
    if min(calls, time, own, owned, shared, rest) < 0 or any(len(page[name]) < end for name, end in reach.items()):
        raise ValueError("the index points outside the rows")
    coefficients = np.zeros((calls + 1, ENTRY * info.window))
    coefficients[0, [-ENTRY, -1]] = page["first"][found[0]]
    coefficients[1 : owned + 1, info.columns] = page["rows"][own : own + owned]
    coefficients[owned + 1 :, info.columns] = page["rows"][shared : shared + rest]
    now = slice(time, time + calls)
    known = None
    if not info.no_mask:
        known = np.array([page["first"][found[0]], *page["known"][now][1:], [1, 0]], np.float64)
    return SamplerTable(
        name=info.name,
        digest=info.digest,
        steps=steps,
        start=start,
        coefficients=coefficients,
        scales=page["scales"][now].astype(np.float64),
        timesteps=page["timesteps"][now].astype(np.float32),
        draws=page["draws"][now].astype(np.bool_),
        residual=info.residual,
        order=info.order,
        known=known,
    )


def near(name: str, known: Iterable[str]) -> str:
    """Say which known name was probably meant, and which there are."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(known)}"


def ranges(numbers: Iterable[int]) -> str:
    """Write sorted whole numbers as ranges: `1 … 4, 6, 8 … 100`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low} … {high}" for low, high in spans)


def _safe_open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, what: str) -> ArtefactError:
    return ArtefactError(f"not a usable sampler file: {what}", where=str(path), hint="compile the bundle again")
