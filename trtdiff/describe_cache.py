"""A calibration cache in words: what it covers, which tensors are large or risky, how they change over the schedule.

coverage        samples by timestep band, prompts and seeds, passes that are done
largest         tensors by largest magnitude
riskiest        inputs of layers by largest magnitude over root mean square: what a clip at the largest wastes
schedule        a bar a timestep band, in the order in which pictures are made: from noise, on the left
sensitivity     layers by their signal-to-quantization-noise ratio, with their share of the multiply-adds
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdiff.calibrate.cache import COUNT, ERROR, NOISE, RANGE, Cache, Component, Statistics, read_cache
from trtdiff.describe import Description, Table
from trtdiff.errors import ArtefactError, MissingDependency, UsageError
from trtdiff.records import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 10
_BARS = "▁▂▃▄▅▆▇█"
_RISK = "amax / rms"


@dataclass(frozen=True)
class LayerNoise:
    """How sensitive one layer is to one type of 8 bits."""

    component: str
    layer: str
    module: str
    operator: str
    format: str
    decibels: float
    share: float
    """Of the component's multiply-adds."""

    @property
    def where(self) -> str:
        """PyTorch module, or the node where the graph does not say."""
        return f"{self.component}: {self.module or self.layer}"


def layer_noises(cache: Cache) -> Iterator[LayerNoise]:
    """Give every layer whose noise was measured, once a type."""
    for name, component in cache.components.items():
        whole = sum(facts.macs for facts in component.layers.values()) or 1
        for kind, layers in component.noise.items():
            for layer, noise in layers.items():
                facts = component.layers[layer]
                yield LayerNoise(name, layer, facts.module, facts.operator, kind, noise.decibels, facts.macs / whole)


def worst_layers(cache: Cache, count: int = SHOWN) -> list[LayerNoise]:
    """Give the layers that lose most, by type."""
    found: list[LayerNoise] = []
    every = sorted(layer_noises(cache), key=lambda layer: layer.decibels)
    for kind in dict.fromkeys(layer.format for layer in every):
        found += [layer for layer in every if layer.format == kind][:count]
    return found


def is_cache(path: Path) -> bool:
    """Recognise a calibration cache by how it begins."""
    if not path.is_file() or path.suffix.lower() != ".json":
        return False
    with path.open("rb") as file:
        begin = file.read(4096)
    return all(word in begin for word in (b'"schema"', b'"digest"', b'"model"', b'"graphs"'))


def describe_cache(path: Path) -> Description:
    """Describe a cache. Raises ArtefactError."""
    cache = read_cache(path)
    data, model = cache.data, cache.model
    facts: dict[str, Any] = {
        "export": f"{model.export} ({model.family}, checkpoint {model.checkpoint[:12]})",
        "digest": cache.digest,
        "state": "complete" if cache.complete else "not finished: --resume, with the same options, goes on",
        "samples": _samples(cache),
        "prompts": f"{data.prompt_count} (sha256 {data.prompts[:12]}); {len(_prompts(cache))} of them were used",
        "negative prompt": data.negative,
        "loop": f"{data.steps} steps, guidance {data.guidance:g}, {data.width}x{data.height}, "
        f"scheduler config {data.scheduler[:12]}",
        "noise measured with": f"clips by {cache.method}" if cache.method else None,
        "made with": ", ".join(f"{name} {version}" for name, version in cache.versions.items()),
    }
    tables = (
        Table("coverage", ("timesteps", "samples"), tuple(_coverage(cache))),
        Table("passes", ("pass", *cache.components), tuple(_passes(cache))),
        Table(f"pictures (the first {SHOWN})", ("seed", "prompt"), tuple(_pictures(cache))),
        *(table for name, component in cache.components.items() for table in _tensors(name, component, data.bands)),
    )
    return Description("calibration cache", str(path), facts, tables)


def describe_sensitivity(path: Path) -> Description:
    """Describe what rounding does to every layer of a cache. Raises ArtefactError where it was not measured."""
    cache = _measured(path)
    every = sorted(layer_noises(cache), key=lambda layer: layer.decibels)
    rows = tuple(
        (layer.component, layer.module or layer.layer, layer.operator, layer.format, _decibels(layer.decibels),
         f"{layer.share:.2%}")
        for layer in every
    )  # fmt: skip
    facts = {
        f"worst in {kind}": [
            f"{layer.where} ({layer.operator}): {_decibels(layer.decibels)}, {layer.share:.2%} of the multiply-adds"
            for layer in worst_layers(cache)
            if layer.format == kind
        ]
        for kind in dict.fromkeys(layer.format for layer in every)
    }
    columns = ("component", "module", "operator", "type", "SQNR", "multiply-adds")
    return Description("sensitivity of layers", str(path), facts, (Table("layers, the worst first", columns, rows),))


def _measured(path: Path) -> Cache:
    cache = read_cache(path)
    if not any(component.noise for component in cache.components.values()):
        if cache.imported:
            raise ArtefactError(f"its scales were imported from {cache.imported}, nothing was measured",
                                where=str(path), hint="calibrate into another file, and inspect that")  # fmt: skip
        raise ArtefactError("the noise of layers was not measured", where=str(path),
                            hint="add it: the same trtdiff calibrate, with --resume --sensitivity")  # fmt: skip
    return cache


# --- tables ----------------------------------------------------------------------------------------------------------


def _samples(cache: Cache) -> str:
    whole = sum(run.samples for run in cache.runs)
    seen = sum(run.done.get(RANGE, {}).get("denoiser", 0) for run in cache.runs)
    many = str(whole) if seen == whole else f"{seen} of {whole}"
    return f"{many} of the denoiser" + (f", of {len(cache.runs)} calibrations" if len(cache.runs) > 1 else "")


def _prompts(cache: Cache) -> list[str]:
    return list(dict.fromkeys(picture.prompt for run in cache.runs for picture in run.pictures))


def _coverage(cache: Cache) -> Iterator[tuple[str, str]]:
    """Give samples by band, from the noise on: how many were seen, by the elements of the denoiser's first value."""
    denoiser = cache.components.get("denoiser", Component())
    first = next(iter(denoiser.values.values()), None)
    for band, (start, end) in reversed(list(enumerate(cache.data.bands))):
        wanted = sum(run.bands[band] for run in cache.runs if run.bands)
        seen = 0
        if first is not None and any(first.elements):
            share = first.elements[band] / sum(first.elements)
            seen = round(share * sum(run.done.get(RANGE, {}).get("denoiser", 0) for run in cache.runs))
        yield f"{end - 1} … {start}", str(wanted) if seen == wanted else f"{seen} of {wanted}"


def _passes(cache: Cache) -> Iterator[tuple[str, ...]]:
    order = (RANGE, ERROR, COUNT, NOISE)
    keys = {key for run in cache.runs for key in run.wanted}
    for key in sorted(keys, key=lambda key: (order.index(key.split()[0]), key)):
        row = []
        for name in cache.components:
            done = sum(run.done.get(key, {}).get(name, 0) for run in cache.runs)
            wanted = sum(run.wanted.get(key, {}).get(name, 0) for run in cache.runs)
            row.append(str(done) if done == wanted else f"{done} of {wanted}")
        yield key, *row


def _pictures(cache: Cache) -> Iterator[tuple[str, str]]:
    for picture in [picture for run in cache.runs for picture in run.pictures][:SHOWN]:
        prompt = picture.prompt
        yield str(picture.seed), prompt if len(prompt) <= 100 else f"{prompt[:99]}…"


def _tensors(name: str, component: Component, bands: tuple[tuple[int, int], ...]) -> Iterator[Table]:
    if not component.values:
        return
    large = sorted(component.values.items(), key=lambda item: -item[1].largest)[:SHOWN]
    scheduled = len(large[0][1].amax) == len(bands) > 1
    columns = ("tensor", "amax", "rms", _RISK, *(("schedule",) if scheduled else ()))
    yield Table(f"{name}: largest tensors", columns, tuple(_row(*item, scheduled=scheduled) for item in large))
    inputs = dict.fromkeys(given for facts in component.layers.values() for given in facts.inputs)
    risky = sorted(((value, component.values[value]) for value in inputs), key=lambda item: -risk(item[1]))[:SHOWN]
    if risky:
        rows = tuple(_row(*item, scheduled=scheduled) for item in risky)
        yield Table(f"{name}: riskiest inputs of layers", columns, rows)


def _row(name: str, seen: Statistics, *, scheduled: bool) -> tuple[str, ...]:
    schedule = (sparkline(tuple(reversed(seen.amax))),) if scheduled else ()
    return name, f"{seen.largest:.4g}", f"{seen.rms:.4g}", f"{risk(seen):.3g}", *schedule


def risk(seen: Statistics) -> float:
    """Give the largest magnitude in root mean squares; 0 where nothing is known."""
    return seen.largest / seen.rms if seen.rms > 0 else 0.0


def sparkline(numbers: tuple[float, ...]) -> str:
    """Draw a bar a number, the largest full; a space where there is nothing."""
    top = max(numbers, default=0.0)
    if top <= 0:
        return " " * len(numbers)
    return "".join(_BARS[min(int(number / top * len(_BARS)), len(_BARS) - 1)] if number else " " for number in numbers)


def _decibels(number: float) -> str:
    return f"{number:.1f} dB" if isfinite(number) else "exact" if number > 0 else "no signal"


# --- plots -----------------------------------------------------------------------------------------------------------


def plot_cache(path: Path, file: Path, *, sensitivity: bool) -> None:
    """Draw the largest magnitudes over the schedule, or the sensitivity of layers. Raises MissingDependency."""
    cache = _measured(path) if sensitivity else read_cache(path)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency("plots need matplotlib", where="--plot", hint="pip install 'trtdiff[plots]'") from None
    figure = Figure(figsize=(11, 6), layout="constrained")
    (_draw_sensitivity if sensitivity else _draw_schedule)(cache, figure.subplots())
    kind = file.suffix.lstrip(".").lower() or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise UsageError(
            f"a plot cannot be a {file.suffix} file", where=f"--plot {file}", hint="name a .png, .svg or .pdf"
        )
    with whole_file(file) as temporary:
        figure.savefig(temporary, format=kind, dpi=120)


def _draw_schedule(cache: Cache, axes: "Axes") -> None:
    name = "denoiser" if "denoiser" in cache.components else next(iter(cache.components))
    component = cache.components[name]
    inputs = dict.fromkeys(given for facts in component.layers.values() for given in facts.inputs) or component.values
    shown = sorted(inputs, key=lambda value: -component.values[value].largest)[:SHOWN]
    middles = [(start + end) / 2 for start, end in cache.data.bands]
    for value in shown:
        amax = component.values[value].amax
        if len(amax) == len(middles):
            axes.plot(middles, amax, marker="o", markersize=3, linewidth=1, label=value)
    axes.set(xlabel="timestep (pictures are made from left to right)", ylabel="largest magnitude", yscale="log",
             title=f"{cache.model.export}, {name}: the largest inputs of layers")  # fmt: skip
    axes.invert_xaxis()
    axes.legend(fontsize=7)


def _draw_sensitivity(cache: Cache, axes: "Axes") -> None:
    every = [layer for layer in layer_noises(cache) if isfinite(layer.decibels)]
    named: list[str] = []
    for kind in dict.fromkeys(layer.format for layer in every):
        mine = [layer for layer in every if layer.format == kind]
        sizes = [8 + 4000 * layer.share for layer in mine]
        axes.scatter(range(len(mine)), [layer.decibels for layer in mine], s=sizes, alpha=0.6, label=kind)
        worst = sorted(enumerate(mine), key=lambda item: item[1].decibels)[:SHOWN]
        for rank, (place, layer) in enumerate(worst, start=1):
            axes.annotate(str(rank), (place, layer.decibels), xytext=(0, -7), textcoords="offset points",
                          fontsize=6, ha="center", va="top")  # fmt: skip
        named += [f"the worst in {kind}", *(f"{rank:2}  {layer.decibels:5.1f} dB  {layer.where}"
                                            for rank, (_, layer) in enumerate(worst, start=1)), ""]  # fmt: skip
    axes.set(xlabel="layer, in the order of the graphs (area: share of the multiply-adds)",
             ylabel="signal-to-quantization-noise ratio, dB",
             title=f"{cache.model.export}: what rounding to 8 bits does to each layer")  # fmt: skip
    axes.annotate("\n".join(named), (1, 1), xytext=(8, 0), xycoords="axes fraction", textcoords="offset points",
                  fontsize=6, family="monospace", va="top", annotation_clip=False)  # fmt: skip
    axes.legend()
