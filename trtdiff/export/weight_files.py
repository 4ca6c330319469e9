"""Which of a component folder's files hold its weights, and the index over all of them.

    <stem>[.<variant>].safetensors                     one file
    <stem>.safetensors.index[.<variant>].json          names the shards; older libraries wrote the variant elsewhere
    the same with .bin

`<stem>` is `diffusion_pytorch_model` for diffusers, `model` or `pytorch_model` for transformers.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtdiff.errors import CheckpointError
from trtdiff.export.pickle_index import read_pickle_index
from trtdiff.export.safetensors_index import TensorRef, read_index
from trtdiff.types import names

_STEM = r"(?P<stem>diffusion_pytorch_model|model|pytorch_model)"
_VARIANT = r"(?P<variant>[A-Za-z0-9_]+)"
_FORMAT = r"(?P<format>safetensors|bin)"
_SINGLE = re.compile(rf"{_STEM}(?:\.{_VARIANT})?\.{_FORMAT}")
_INDEX = tuple(
    re.compile(pattern)
    for pattern in (
        rf"{_STEM}\.{_FORMAT}\.index(?:\.{_VARIANT})?\.json",
        rf"{_STEM}\.{_FORMAT}\.{_VARIANT}\.index\.json",
        rf"{_STEM}\.{_VARIANT}\.{_FORMAT}\.index\.json",
    )
)
_PREFERRED = ("", "fp16", "bf16")


@dataclass(frozen=True)
class WeightFile:
    """The file that a component's weights are read from: the weights, or the index of their shards."""

    name: str
    variant: str
    """`fp16`, `bf16`, `non_ema` …; empty where the name has none."""
    format: str
    """`safetensors` or `bin`."""
    stem: str
    index: bool


def weight_files(listing: Iterable[str]) -> list[WeightFile]:
    """Give every way to read weights from files of these names, whatever the variant."""
    found = []
    for name in sorted(listing):
        single = _SINGLE.fullmatch(name)
        match = single or next(filter(None, (pattern.fullmatch(name) for pattern in _INDEX)), None)
        if match is not None:
            variant = match["variant"] or ""
            found.append(WeightFile(name, variant, match["format"], match["stem"], single is None))
    return found


def choose(listing: Iterable[str], *, variant: str | None, library: str) -> WeightFile | None:
    """Choose the file to read; None where there are no weights.

    The variant that is asked for, else the one without a name, else fp16, bf16, then by name. Safetensors before
    pickles, the library's own file name before the other's, one file before shards.
    """
    own = {"diffusers": ("diffusion_pytorch_model",)}.get(library, ("model", "pytorch_model"))

    def rank(file: WeightFile) -> tuple[object, ...]:
        known = _PREFERRED.index(file.variant) if file.variant in _PREFERRED else len(_PREFERRED)
        asked = file.variant != variant if variant is not None else False
        return (asked, known, file.variant, file.format != "safetensors", file.stem not in own, file.index, file.name)

    return min(weight_files(listing), key=rank, default=None)


def shard_names(index: Path, weight_map: Mapping[str, Any]) -> list[str]:
    """Give the files that an index names, each once. Raises CheckpointError for a name that leads elsewhere."""
    shards = sorted({str(shard) for shard in weight_map.values()})
    for shard in shards:
        plain = re.fullmatch(r"[^/\\\0]+\.(safetensors|bin)", shard)
        if plain is None or shard.startswith("."):
            raise CheckpointError(
                f"{index.name} names the shard {shard!r}, which is not a weight file beside it",
                where=f"{index}: weight_map",
                hint="download the index again from a source you trust",
            )
    return shards


def read_weight_map(index: Path) -> dict[str, str]:
    """Read an index of shards: tensor name → file. Raises CheckpointError for one that is damaged."""
    hint = "download it again; the copy is incomplete or damaged"
    try:
        read = json.loads(index.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {index.name}: {error.strerror}", where=str(index), hint=hint) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index.name} is not valid JSON: {error}", where=str(index), hint=hint) from None
    found = read.get("weight_map") if isinstance(read, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(shard, str) for shard in found.values()):
        raise CheckpointError(f"{index.name} has no weight_map from tensor names to files", where=str(index), hint=hint)
    return found


def files_of(folder: Path, chosen: WeightFile) -> list[Path]:
    """Give the files that hold the weights, shards in order. Raises CheckpointError for a shard that is missing."""
    if not chosen.index:
        return [folder / chosen.name]
    index = folder / chosen.name
    shards = [folder / name for name in shard_names(index, read_weight_map(index))]
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise CheckpointError(
            f"{len(missing)} of {len(shards)} weight files are missing: {names(missing, 3)}",
            where=str(folder),
            hint=f"download what {index.name} names",
        )
    return shards


def read_tensors(folder: Path, chosen: WeightFile) -> dict[str, TensorRef]:
    """Index a component's weights by tensor name, over all of their files."""
    reader = read_index if chosen.format == "safetensors" else read_pickle_index
    by_file = {file.name: reader(file) for file in files_of(folder, chosen)}
    if not chosen.index:
        return next(iter(by_file.values()))
    refs = {}
    for name, shard in read_weight_map(folder / chosen.name).items():
        if name not in by_file[shard]:
            raise CheckpointError(
                f"{chosen.name} says that {shard} holds {name}, it does not",
                where=str(folder / shard),
                hint="get the index and its files from the same place",
            )
        refs[name] = by_file[shard][name]
    return refs
