"""The calibration cache: how large every tensor of a checkpoint's networks gets, over the whole denoising schedule.

A JSON file that people can read, one line a tensor. It is a running reduction: whatever is measured is a maximum or a
sum, so that a calibration can be interrupted and go on, and what two of them saw of one model can be put together
(`merge`). Its `digest` is the sha256 of all else in it, so that a number that was edited is noticed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf, log10
from pathlib import Path
from typing import Any

import msgspec

from trtdiff.digest import canonical, digest
from trtdiff.errors import ArtefactError
from trtdiff.export.manifest import ExportManifest
from trtdiff.manifest import as_json, differences
from trtdiff.records import whole_file

CACHE_SCHEMA = 1
DIGITS = 7
"""Significant digits of what is written down: as many as the float32 numbers have that are summed."""
RANGE, ERROR, COUNT, NOISE = "range", "error", "count", "noise"
"""Passes over the samples: largest magnitudes and squares; errors of rounding; counts beyond edges; noise of layers."""


IMPORTED = "imported"
"""In place of a library, in a cache made from scales that something else chose: the file."""


@dataclass(frozen=True)
class Statistics:
    """One value of a graph, over everything that was seen of it. Tuples have an entry a timestep band."""

    amax: tuple[float, ...]
    """Largest magnitude; 0 in a band that was not seen."""
    squares: tuple[float, ...]
    """Sum of squares."""
    elements: tuple[int, ...]
    """How many elements were seen."""
    channels: tuple[float, ...] = ()
    """Largest magnitude of every channel (the last dimension), over all bands; of what goes into linear layers."""
    errors: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Type of 8 bits → index of a clip on the grid → sum of squared errors where values are rounded to it."""
    beyond: Mapping[int, int] = field(default_factory=dict)
    """Index of an edge on the grid → how many elements have a larger magnitude."""

    @property
    def largest(self) -> float:
        """Largest magnitude over all bands."""
        return max(self.amax, default=0.0)

    @property
    def imported(self) -> bool:
        """Whether nothing was seen of it: it is a clip that something else chose."""
        return not any(self.elements)

    @property
    def rms(self) -> float:
        """Root of the mean square over all bands; 0 where nothing was seen."""
        elements = sum(self.elements)
        return min((sum(self.squares) / elements) ** 0.5, self.largest) if elements else 0.0


@dataclass(frozen=True)
class Noise:
    """What rounding to 8 bits does to the output of one layer, all its inputs exact."""

    signal: float
    """Sum of squares of the exact output."""
    noise: float
    """Sum of squares of the difference."""

    @property
    def decibels(self) -> float:
        """Signal-to-quantization-noise ratio; infinite where nothing was lost."""
        return inf if self.noise <= 0 else -inf if self.signal <= 0 else 10 * log10(self.signal / self.noise)


@dataclass(frozen=True)
class LayerFacts:
    """One layer of a graph, as `passes.layers` finds it."""

    module: str
    """Path of the PyTorch module."""
    operator: str
    macs: int
    """Multiply-adds of one row (one picture, one guidance branch) at the size that was calibrated."""
    inputs: tuple[str, ...]
    """Names of the values whose statistics are those of its inputs."""


@dataclass(frozen=True)
class Component:
    """What was seen of one graph."""

    rows: int = 0
    """Rows that were executed: pictures times guidance branches times steps."""
    values: Mapping[str, Statistics] = field(default_factory=dict)
    layers: Mapping[str, LayerFacts] = field(default_factory=dict)
    noise: Mapping[str, Mapping[str, Noise]] = field(default_factory=dict)
    """Type of 8 bits → layer → its noise."""


@dataclass(frozen=True)
class Model:
    """What was calibrated."""

    export: str
    family: str
    checkpoint: str
    """Its digest."""
    graphs: Mapping[str, str]
    """Component → sha256 of the exported graph."""
    weights: Mapping[str, Mapping[str, str]]
    """Component → weight file → sha256."""


@dataclass(frozen=True)
class Data:
    """What it was calibrated on, but for seeds."""

    prompts: str
    """sha256 of the list of prompts."""
    prompt_count: int
    negative: str
    steps: int
    guidance: float
    height: int
    width: int
    scheduler: str
    """sha256 of the scheduler's config."""
    bands: tuple[tuple[int, int], ...]
    """Timestep bands of the denoiser, from (inclusively) and to (exclusively); every other component has one band."""


@dataclass(frozen=True)
class Picture:
    """One picture whose steps were samples."""

    seed: int
    prompt: str


@dataclass(frozen=True)
class Run:
    """One calibration, or one of several that were merged."""

    samples: int
    """Of the denoiser: one is a picture at a step, both guidance branches."""
    bands: tuple[int, ...]
    """Samples by timestep band."""
    pictures: tuple[Picture, ...]
    done: Mapping[str, Mapping[str, int]]
    """Pass → component → how many samples (texts, pictures) it has seen."""
    wanted: Mapping[str, Mapping[str, int]]
    """The same, when it is complete."""

    @property
    def complete(self) -> bool:
        """Whether everything that was asked for is there."""
        return self.done == self.wanted


@dataclass(frozen=True)
class Cache:
    """A calibration cache; see this module."""

    schema: int
    digest: str
    model: Model
    data: Data
    method: str
    """How the clips were chosen that the noise of layers was measured with; empty where it was not."""
    runs: tuple[Run, ...]
    components: Mapping[str, Component]
    versions: Mapping[str, str]
    """Of the libraries that computed it."""

    @property
    def complete(self) -> bool:
        """Whether all runs are done."""
        return bool(self.runs) and all(run.complete for run in self.runs)

    @property
    def imported(self) -> str:
        """Name of the file whose scales it was made from; empty for a calibration."""
        return self.versions.get(IMPORTED, "")


def statistics_of(cache: Cache, component: str) -> Mapping[str, Statistics]:
    """Give value → statistics of a component. Raises ArtefactError where the cache has none."""
    found = cache.components.get(component)
    if found is None or not found.values:
        raise ArtefactError(f"the calibration has nothing of {component}", where="calibration cache",
                            hint="go on with: trtdiff calibrate --resume")  # fmt: skip
    return found.values


# --- the file --------------------------------------------------------------------------------------------------------


def content_digest(content: Mapping[str, Any]) -> str:
    """Give the sha256 of all that a cache holds, but for the digest itself."""
    return digest({name: value for name, value in content.items() if name != "digest"})


def sealed(cache: Cache) -> Cache:
    """Give the cache with the digest that belongs to it."""
    return replace(cache, digest=content_digest(as_json(cache)))


def write_cache(path: Path, cache: Cache) -> Cache:
    """Write a cache whole or not at all, sealed; gives what was written. Raises StorageError."""
    cache = sealed(cache)
    with whole_file(path) as temporary:
        temporary.write_bytes(b"".join(_lines(as_json(cache), 0)) + b"\n")
    return cache


def read_cache(path: Path) -> Cache:
    """Read a cache. Raises ArtefactError for one that is damaged, edited, or of another version."""
    again = "calibrate again, with --force"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ArtefactError(f"cannot read {path.name}: {error.strerror}", where=str(path),
                            hint="make it with: trtdiff calibrate") from None  # fmt: skip
    try:
        loose = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtefactError(f"{path.name} is truncated or damaged: {error}", where=str(path), hint=again) from None
    schema = loose.get("schema") if isinstance(loose, dict) else None
    if not isinstance(schema, int) or "runs" not in loose:
        raise ArtefactError(f"{path.name} is no calibration cache", where=str(path), hint=again)
    if schema != CACHE_SCHEMA:
        newer = schema > CACHE_SCHEMA
        raise ArtefactError(f"{path.name} is a cache of {'a newer' if newer else 'an older'} schema, {schema}; "
                            f"this version reads {CACHE_SCHEMA}", where=f"{path}: schema",
                            hint="upgrade trtdiff" if newer else again)  # fmt: skip
    try:
        found = content_digest(loose)
    except ValueError as error:
        raise ArtefactError(f"{path.name} is damaged: {error}", where=str(path), hint=again) from None
    if found != loose.get("digest"):
        raise ArtefactError(f"{path.name} was changed after it was written", where=f"{path}: digest",
                            hint=f"bring the original back, or {again}")  # fmt: skip
    try:
        return msgspec.json.decode(raw, type=Cache)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ArtefactError(f"{path.name} is not what this version writes: {error}", where=str(path),
                            hint=again) from None  # fmt: skip


_OPEN = 4
"""Depth up to which objects are written a line an entry: a tensor, or a layer, is a line."""


def _lines(value: Any, depth: int) -> Iterator[bytes]:
    """Write JSON that people can read, and that `diff` can compare tensor by tensor."""
    if isinstance(value, dict) and value and depth < _OPEN:
        yield b"{"
        for number, (name, item) in enumerate(value.items()):
            yield (b",\n" if number else b"\n") + b"  " * (depth + 1) + canonical(name) + b": "
            yield from _lines(item, depth + 1)
        yield b"\n" + b"  " * depth + b"}"
    else:
        yield canonical(value)


# --- of what -------------------------------------------------------------------------------------------------------


def model_of(export: ExportManifest) -> Model:
    """Say what an export is, as caches name it."""
    return Model(
        export=export.name,
        family=export.family,
        checkpoint=export.checkpoint.digest,
        graphs={component.name: component.graph_sha256 for component in export.components},
        weights={component.name: component.weights for component in export.components},
    )


def require_same_model(cache: Cache, export: ExportManifest) -> None:
    """Raise ArtefactError, naming the field that differs, where a cache is not of this export."""
    require_same(asdict(cache.model), asdict(model_of(export)), "of another model", ignored=("export",),
                 hint="calibrate this export: trtdiff calibrate EXPORT")  # fmt: skip


def require_same(old: Any, new: Any, what: str, *, hint: str, ignored: tuple[str, ...] = ()) -> None:
    """Raise ArtefactError for the first field in which two JSON-like values differ."""
    for field_, before, now in differences(as_json(old), as_json(new)):
        if field_.split(".")[0] not in ignored:
            raise ArtefactError(f"the calibration is {what}: {field_} is {_short(before)} there, {_short(now)} here",
                                where=f"calibration cache: {field_}", hint=hint)  # fmt: skip


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"


def rounded(number: float) -> float:
    """Give a number with the digits that are written down."""
    return float(f"{number:.{DIGITS}g}")
