"""`manifest.json`: how one entry of the store was made, and the key that follows from it.

A key is the sha256 of the *spec*: everything that determines the result and nothing else (no times, no paths). So two
specs with one key are the same build, and where keys differ, `differences` of the specs says why.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from trtdiff.digest import KEY_SCHEMA_VERSION, digest
from trtdiff.errors import ArtefactError
from trtdiff.files import FileFacts
from trtdiff.records import read_record
from trtdiff.types import TensorSpec

MANIFEST_SCHEMA = 1
MANIFEST_FILE = "manifest.json"
ABSENT = "(absent)"
"""Stands in a difference for what one side does not have."""


@dataclass(frozen=True)
class EngineSpec:
    """Everything that determines an engine."""

    component: str
    graph: str
    """sha256 of the exported graph."""
    weights: Mapping[str, str]
    """Weight file → sha256."""
    profile: Mapping[str, str]
    """Symbolic dimension of this component → min:opt:max."""
    recipe: Mapping[str, Any]
    """What the precision recipe does to this component."""
    islands: Mapping[str, str]
    """Patterns of modules that stay in float32 → why: the family's, and those that were asked for."""
    ranges: str
    """Key of the range scan that decides what else stays in float32; empty: there was none."""
    calibration: str
    """Of the calibration that scales, and what stays in float32, come from: its key, or the digest of its cache."""
    passes: tuple[str, ...]
    """Everything that was done to the graph, in order: the recipe's passes, the backend's, the sampler prologue."""
    options: Mapping[str, Any]
    """Builder options of the backend."""
    backend: str
    backend_version: str
    device: str
    """What the engine is compiled for; `cpu` where it does not depend on the kind of CPU."""
    device_details: Mapping[str, str]
    trtdiff: str
    trtdiff_code: str
    """sha256 of trtdiff's own passes and backend: an engine made by other code is another engine."""
    libraries: Mapping[str, str]
    """Versions of the libraries that the graph passes through."""
    key_schema: int = KEY_SCHEMA_VERSION


@dataclass(frozen=True)
class SamplersSpec:
    """Everything that determines a file of sampler tables."""

    schedulers: tuple[str, ...]
    required: tuple[str, ...]
    """Those that must be possible; the others are left out where they are not."""
    config: Mapping[str, Any]
    """The checkpoint's scheduler config."""
    pipeline: str
    family: str
    image_tokens: int
    """Of the native size, for which tables are compiled; 0 where the family's schedules know no size."""
    sizes: tuple[int, ...]
    """Image tokens of sizes for which those that are derived are proved."""
    libraries: Mapping[str, str]
    """Versions of the libraries whose schedulers, and whose arithmetic, the tables are made of."""
    trtdiff: str
    trtdiff_code: str
    key_schema: int = KEY_SCHEMA_VERSION


@dataclass(frozen=True)
class RangesSpec:
    """Everything that determines a range scan; how many threads it runs on does not, beyond the last digit."""

    graphs: Mapping[str, str]
    """Component → sha256 of the exported graph."""
    weights: Mapping[str, Mapping[str, str]]
    """Component → weight file → sha256."""
    family: str
    facts: Mapping[str, Any]
    """What the family's runtime side knows of the checkpoint."""
    scheduler: Mapping[str, Any]
    """The checkpoint's scheduler config."""
    tokenizers: Mapping[str, str]
    """Tokenizer → sha256 of its file."""
    settings: Mapping[str, Any]
    """Of the scan: prompts, steps, size and the rest."""
    libraries: Mapping[str, str]
    """Versions of the libraries that scan."""
    trtdiff: str
    trtdiff_code: str
    key_schema: int = KEY_SCHEMA_VERSION


Spec = EngineSpec | SamplersSpec | RangesSpec


@dataclass(frozen=True)
class Manifest:
    """What stands beside an artefact. `files` are relative to the manifest's folder."""

    schema: int
    key: str
    spec: Mapping[str, Any]
    files: Mapping[str, FileFacts]
    inputs: tuple[TensorSpec, ...] = ()
    """Bindings of an engine."""
    outputs: tuple[TensorSpec, ...] = ()
    realised: Mapping[str, Any] = field(default_factory=dict)
    """What the compiler said it made."""
    seconds: float = 0.0
    """How long the worker took."""
    peak_memory: int = 0
    """Largest resident size of the worker, in bytes."""


@dataclass(frozen=True)
class Made:
    """What the making of an artefact told, besides its files; fields as in Manifest."""

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    realised: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    peak_memory: int = 0


def spec_json(spec: Spec | Mapping[str, Any]) -> dict[str, Any]:
    """Give a spec as the plain values that its JSON reads back as."""
    plain: dict[str, Any] = as_json(spec)
    return plain


def as_json(value: Any) -> Any:
    """Give a value as its JSON reads back: dataclasses are mappings, tuples are lists."""
    return msgspec.json.decode(msgspec.json.encode(value))


def key_of(spec: Spec | Mapping[str, Any]) -> str:
    """Name what a spec makes: 32 hexadecimal digits (128 bits) of its sha256."""
    return digest(spec_json(spec))[:32]


def read_manifest(path: Path) -> Manifest:
    """Read a manifest whose key is indeed that of its spec. Raises ArtefactError."""
    manifest = read_record(path, Manifest, schema=MANIFEST_SCHEMA)
    if key_of(manifest.spec) != manifest.key:
        raise ArtefactError("the key does not follow from the spec: the manifest was edited", where=str(path),
                            hint="build again with --force")  # fmt: skip
    return manifest


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (field path, old value, new value) wherever two JSON-like values differ; an absent one reads `(absent)`."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys((*old, *new)):
            yield from differences(
                old.get(name, ABSENT), new.get(name, ABSENT), f"{path}.{name}" if path else str(name)
            )
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{path}[{place}]")
    elif type(old) is not type(new) or old != new:
        yield path, old, new
