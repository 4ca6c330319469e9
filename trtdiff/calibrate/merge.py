"""Two calibrations of one model become one: maxima of maxima, sums of sums.

Where one saw a larger magnitude, its clips and edges are those of the whole; `error_at` says what the other loses at
them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

from trtdiff.calibrate.cache import NOISE, Cache, Component, Noise, Statistics, require_same, sealed
from trtdiff.calibrate.measurements import finished
from trtdiff.errors import ArtefactError
from trtdiff.passes.eight_bits import GRID, OCTAVE


def merge(one: Cache, other: Cache) -> tuple[Cache, tuple[str, ...]]:
    """Put two finished calibrations together; give the whole, sealed, and remarks on what could not be kept.

    Raises ArtefactError where they are not of one model, graph, prompt set, data and bands (naming the field that
    differs), where one is not finished, or where both saw the same picture.
    """
    hint = "calibrate both with the same options, but for --seed"
    require_same(asdict(one.model), asdict(other.model), "of another model", hint=hint, ignored=("export",))
    require_same(asdict(one.data), asdict(other.data), "of other data", hint=hint)
    for cache in (one, other):
        if not cache.complete:
            raise ArtefactError("a calibration that is not finished cannot be merged", where="calibration cache: runs",
                                hint="finish it first: trtdiff calibrate --resume")  # fmt: skip
    seen = {picture for run in one.runs for picture in run.pictures}
    for run in other.runs:
        for picture in run.pictures:
            if picture in seen:
                raise ArtefactError(
                    f"both calibrations saw prompt {picture.prompt!r} with seed {picture.seed}: it would count twice",
                    where="calibration cache: runs.pictures", hint="calibrate one of them with another --seed",
                )  # fmt: skip
    remarks = dict.fromkeys(_lost(one, other))
    noise = one.method == other.method
    if not noise:
        remarks["the noise of layers was left out: it was measured with clips chosen in two ways"] = None
    components = {
        name: finished(_component(one.components[name], other.components[name], noise=noise))
        for name in one.components
        if name in other.components
    }
    kept = {key for key in _passes(one) & _passes(other) if noise or not key.startswith(NOISE)}
    runs = tuple(
        replace(run, done={key: run.done[key] for key in run.done if key in kept},
                wanted={key: run.wanted[key] for key in run.wanted if key in kept})
        for run in (*one.runs, *other.runs)
    )  # fmt: skip
    merged = replace(one, digest="", method=one.method if noise else "", runs=runs, components=components,
                     versions={**one.versions, **other.versions})  # fmt: skip
    return sealed(merged), tuple(remarks)


def _passes(cache: Cache) -> set[str]:
    """Give the passes that every run of a cache has gone through."""
    return set.intersection(*({key for key, counts in run.done.items() if counts} for run in cache.runs))


def _lost(one: Cache, other: Cache) -> Iterator[str]:
    """Say what only one of them has."""
    for key in sorted(_passes(one) ^ _passes(other)):
        yield f"only one of them has the pass {key!r}, which was left out; add it to the other with --resume"


def _component(one: Component, other: Component, *, noise: bool) -> Component:
    values = {
        name: merged_statistics(seen, other.values[name]) if name in other.values else seen
        for name, seen in one.values.items()
    }
    noises: dict[str, Mapping[str, Noise]] = {
        kind: {
            layer: Noise(mine.signal + other.noise[kind][layer].signal, mine.noise + other.noise[kind][layer].noise)
            for layer, mine in of.items()
            if layer in other.noise[kind]
        }
        for kind, of in one.noise.items()
        if noise and kind in other.noise
    }
    return replace(one, rows=one.rows + other.rows, values=values, noise=noises)


def merged_statistics(one: Statistics, other: Statistics) -> Statistics:
    """Put together what two calibrations saw of one value."""
    small, large = sorted((one, other), key=lambda seen: seen.largest)
    return Statistics(
        amax=tuple(map(max, one.amax, other.amax)),
        squares=tuple(a + b for a, b in zip(one.squares, other.squares, strict=True)),
        elements=tuple(a + b for a, b in zip(one.elements, other.elements, strict=True)),
        channels=tuple(map(max, one.channels, other.channels)),
        errors={
            kind: {index: error + error_at(small, kind, index) for index, error in errors.items()}
            for kind, errors in large.errors.items()
            if kind in small.errors or not small.largest
        },
        # beyond an edge that is higher than those of a run lies nothing of it
        beyond={index: count + small.beyond.get(index, 0) for index, count in large.beyond.items()}
        if small.beyond or not small.largest
        else {},
    )


def error_at(seen: Statistics, kind: str, index: int) -> float:
    """Give what rounding loses at a clip of the grid that was tried, or at one higher than all that were.

    A higher one clips nothing, and was not measured. int8's steps grow with it, and their error with the square, up to
    where all becomes 0. Numbers of E4M3 fall as they do at a clip that is a power of two lower (but for the smallest).
    """
    errors = seen.errors.get(kind, {})
    if not seen.largest or index in errors:
        return errors.get(index, 0.0)
    last = max(errors)
    if kind == "int8":
        return min(errors[last] * float(GRID ** (2 * (index - last))), sum(seen.squares))
    return errors[last - (last - index) % OCTAVE]
