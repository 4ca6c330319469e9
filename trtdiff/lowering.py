"""What happens in the worker: one component lowered and compiled, or the schedulers compiled into tables.

These functions take and return JSON-like values, since `trtdiff.worker` carries them between processes.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trtdiff.backends import backend as backend_named
from trtdiff.backends.options import BuilderOptions
from trtdiff.backends.tensorrt_layers import EIGHT_BITS
from trtdiff.errors import ArtefactError, BuildError, MissingDependency, TrtdiffError, UsageError
from trtdiff.families import family as family_named
from trtdiff.lowered import read_graph, write_graph
from trtdiff.passes.half_types import Half
from trtdiff.types import DimRange, ShapeProfile

if TYPE_CHECKING:
    import onnx_ir as ir

    from trtdiff.calibrate.cache import Cache, Component
    from trtdiff.calibrate.ranges import ValueRange

Progress = Callable[[int, int], None]

HALVES: tuple[Half, ...] = ("float16", "bfloat16")
"""Types of arithmetic for which parts of a graph may have to stay in float32."""
NOISIEST = 10
"""How many of the layers that lose most an engine's manifest names."""
_SHOWN = 3
"""How many layers an error describes."""
PROLOGUES: dict[str, str] = {
    "denoiser": "trtdiff.passes.sampler_prologue:denoiser_prologue",
    "vae_decoder": "trtdiff.passes.sampler_prologue:decoder_prologue",
}
"""Component → the pass that puts the sampler into it, after the recipe's passes."""


def build_engine(
    *,
    graph: str,
    passes: Sequence[str],
    backend: str,
    device: str,
    computes_in: str,
    profile: Mapping[str, str],
    options: Mapping[str, Any],
    out: str,
    progress: Progress,
    islands: Mapping[str, str] = MappingProxyType({}),
    ranges: str = "",
    quantization: Mapping[str, Any] | None = None,
    calibration: str = "",
    calibration_digest: str = "",
) -> dict[str, Any]:
    """Lower an exported graph with `passes` and compile it into `out`/engine; its bindings, and what was realised.

    A half precision's float32 islands are `islands` (module pattern → reason), what the file `ranges` shows, and what
    `mark_islands` keeps in any case; the result has them as `realised["islands"]`. `quantization` is a recipe's, as
    plain values; scales come from the cache `calibration`, which has ranges too, and whose digest must be
    `calibration_digest` where one is given. The result says in `realised["quantization"]` what was done.
    """
    model = read_graph(Path(graph))
    component = Path(graph).stem
    cache = _cache(calibration, calibration_digest)
    seen = _calibrated_ranges(cache, component) if cache and not ranges else _ranges(ranges, component)
    kept: dict[str, Any] = _mark_islands(model, Path(graph), computes_in, islands, seen)
    if quantization is not None:
        kept |= _quantize(model, graph, computes_in, quantization, cache)
    for name in passes:
        _apply(name, model, graph)
    scratch, engine = Path(out, "lowered"), Path(out, "engine")
    scratch.mkdir()
    engine.mkdir()
    compiler = backend_named(backend, device)
    written = write_graph(model, scratch, keep=compiler.keeps_graph, progress=progress)
    sizes = ShapeProfile({name: DimRange.parse(span) for name, span in profile.items()})
    realised = compiler.build(written, sizes, BuilderOptions.of(options), engine, progress)
    _require_precision(realised, "float32" if "*" in islands else computes_in, graph)
    for leftover in scratch.iterdir():
        leftover.unlink()
    scratch.rmdir()
    inputs, outputs = ([_spec(value) for value in values] for values in (model.graph.inputs, model.graph.outputs))
    return {"inputs": inputs, "outputs": outputs, "realised": {**realised, **kept}}


def compile_samplers(
    *,
    config: Mapping[str, Any],
    names: Sequence[str],
    optional: Sequence[str],
    family: str,
    pipeline: str,
    image_tokens: int,
    sizes: Sequence[int],
    out: str,
    progress: Progress,
) -> dict[str, Any]:
    """Compile schedulers into `out`/samplers.safetensors; the names that are in it, and those refused with reasons.

    Tables are made as the family's pipeline calls its scheduler, for pictures of `image_tokens`; what is derived for
    others is proved for those of `sizes`.
    """
    from trtdiff.bundle import SAMPLERS_FILE

    try:
        from trtdiff.export import schedulers
    except ImportError as error:
        raise MissingDependency(
            f"compiling schedulers needs {error.name}", hint="pip install 'trtdiff[compile]'"
        ) from None
    asked = list(dict.fromkeys([*names, *optional]))

    def tick(name: str, done: int, total: int) -> None:
        progress(asked.index(name) * total + done, len(asked) * total)

    kind = family_named(family)
    made = schedulers.compile_samplers(
        config, names, path=Path(out, SAMPLERS_FILE), call=kind.schedule_call(pipeline, image_tokens),
        choices=kind.schedulers(), optional=optional, image_tokens=sizes, progress=tick,
    )  # fmt: skip
    refused = dict(made.refused)
    return {"realised": {"samplers": [name for name in asked if name not in refused], "refused": refused}}


def named(place: str) -> Any:
    """Import `module:function`."""
    module, _, function = place.partition(":")
    return getattr(import_module(module), function)


def _cache(path: str, digest: str) -> "Cache | None":
    """Read a calibration cache; none where there is no path."""
    if not path:
        return None
    from trtdiff.calibrate.cache import read_cache

    cache = read_cache(Path(path))
    if digest and cache.digest != digest:
        raise ArtefactError("the calibration was replaced while the build went on", where=path, hint="build again")
    return cache


def _calibrated_ranges(cache: "Cache", component: str) -> "Mapping[str, ValueRange]":
    from trtdiff.calibrate.cache import statistics_of
    from trtdiff.calibrate.ranges import ValueRange

    if component not in cache.components:
        return {}
    found = statistics_of(cache, component).items()
    return {name: ValueRange(seen.largest, seen.rms) for name, seen in found if sum(seen.elements)}


def _ranges(path: str, component: str) -> "Mapping[str, ValueRange]":
    if not path:
        return {}
    from trtdiff.calibrate.ranges import read_ranges

    measured = read_ranges(Path(path)).components
    if component not in measured:
        raise BuildError(f"no ranges of {component} were scanned, only of {', '.join(measured)}", where=path,
                         hint="scan this export again")  # fmt: skip
    return measured[component]


def _mark_islands(
    model: "ir.Model",
    graph: Path,
    computes_in: str,
    islands: Mapping[str, str],
    seen: "Mapping[str, ValueRange]",
) -> dict[str, Any]:
    """Mark what stays in float32 where the graph goes to 16 bits; `{"islands": …}`, or nothing in other precisions."""
    if computes_in not in HALVES:
        if islands:
            raise UsageError(f"{computes_in} has no float32 islands", where=str(graph),
                             hint="leave them out, or build in fp16 or bf16")  # fmt: skip
        return {}
    from trtdiff.passes.mark_islands import mark_islands

    half: Half = "float16" if computes_in == "float16" else "bfloat16"
    return {"islands": mark_islands(model, dtype=half, patterns=islands, ranges=seen)}


def _quantize(
    model: "ir.Model", graph: str, computes_in: str, quantization: Mapping[str, Any], cache: "Cache | None"
) -> dict[str, Any]:
    """Put 8 bits into a graph; what reads them, what does not and why, and which layers lose most."""
    import msgspec

    from trtdiff.passes.check_graph import check_graph
    from trtdiff.passes.quantize import quantize
    from trtdiff.recipes.quantization import Quantization

    component = Path(graph).stem
    how = msgspec.convert(dict(quantization), Quantization)
    seen = cache.components[component] if cache else None
    found = quantize(model, how=how, base=computes_in, statistics=seen.values if seen else {})
    check_graph(model)
    if not found.layers:
        why = ", ".join(f"{count}: {why}" for why, count in Counter(found.kept.values()).most_common(_SHOWN))
        raise BuildError(f"none of its {len(found.kept)} layers is quantized ({why})", where=graph,
                         hint="keep fewer modules in the recipe, or ask for its base precision")  # fmt: skip
    told: dict[str, Any] = {"layers": dict(Counter(found.layers.values())), "kept": found.kept}
    if seen is not None and how.activations is not None and how.activations in seen.noise:
        told["noisiest"] = noisiest(seen, how.activations, found.layers)
    return {"quantization": told}


def _apply(name: str, model: "ir.Model", graph: str) -> None:
    """Run one pass and check the graph that it leaves; whatever is raised says which pass and which graph.

    Only the prologues may change names or types of the graph's inputs and outputs.
    """
    from trtdiff.passes.check_graph import check_graph

    place, *options = name.split()
    word = place.partition(":")[2]
    before = _ends(model)
    try:
        named(place)(model, **dict(option.split("=", 1) for option in options))
    except (TrtdiffError, MemoryError, OSError):
        raise
    except Exception as error:
        raise BuildError(
            f"the pass {word} failed: {type(error).__name__}: {error}", where=graph,
            hint="please report it with the graph; an export of this version should never do that"
        ) from error  # fmt: skip
    try:
        check_graph(model)
    except BuildError as error:
        raise BuildError(f"after the pass {word}, {error.message}", where=f"{graph}; {error.where}",
                         hint=error.hint) from None  # fmt: skip
    if place not in PROLOGUES.values() and (after := _ends(model)) != before:
        raise BuildError(
            f"the pass {word} changed inputs or outputs: {', '.join(sorted(before ^ after))}", where=graph,
            hint="this is a fault of the pass; please report it with the graph"
        )  # fmt: skip


def noisiest(seen: "Component", kind: str, chosen: Collection[str]) -> list[dict[str, Any]]:
    """Give the quantized layers whose rounding costs most, worst first: module, decibels, share of multiply-adds."""
    whole = sum(facts.macs for facts in seen.layers.values()) or 1
    worst = sorted((one.decibels, name) for name, one in seen.noise[kind].items() if name in chosen)
    return [
        {"module": seen.layers[name].module, "decibels": round(decibels, 1), "share": seen.layers[name].macs / whole}
        for decibels, name in worst[:NOISIEST]
    ]


def _ends(model: "ir.Model") -> set[str]:
    """Give inputs and outputs with their places, names and types, in words."""
    from trtdiff.passes.schemas import type_word

    sides = {"input": model.graph.inputs, "output": model.graph.outputs}
    return {
        f"{side} {place} {value.name} ({type_word(value.dtype)})"
        for side, values in sides.items()
        for place, value in enumerate(values)
    }


def _require_precision(realised: Mapping[str, Any], wanted: str, graph: str) -> None:
    """Refuse an engine that computes in another type than its graph, as far as its layers tell.

    Where the compiler named the nodes of its layers, no layer may be `widened` (see `backends/tensorrt_precision.py`)
    or `not_quantized` (`backends/tensorrt_quantized.py`). Where it did not, most of what multiplies must be of the
    type that was asked for, or of 8 bits where the graph has those.
    """
    if widened := realised.get("widened"):
        raise BuildError(
            f"the engine computes in float32 what its graph has in {wanted}", where=_shown(widened),
            hint="please report the layers; until then keep these modules in float32 with --keep, or build with "
            "another version of the compiler"
        )  # fmt: skip
    if wider := realised.get("not_quantized"):
        types = ", ".join(sorted({item["reads"] for item in wider}))
        share = sum(item["share"] for item in wider)
        raise BuildError(
            f"the engine computes in {types} what its graph has in 8 bits ({share:.1%} of its multiply-adds)",
            where=_shown(wider),
            hint="leave out GPUs that have no kernel for it (sm75 has none for convolutions in int8), or let the "
            "recipe keep these modules or operators in half precision"
        )  # fmt: skip
    arithmetic = realised.get("arithmetic")
    if "precision" not in realised or not arithmetic:
        return
    fitting = {wanted, *(EIGHT_BITS if "quantized" in realised else ())}
    if sum(arithmetic.get(word, 0) for word in fitting) * 2 > sum(arithmetic.values()):
        return
    found = ", ".join(f"{count} in {dtype}" for dtype, count in arithmetic.items())
    raise BuildError(f"the engine was to compute in {wanted}; of its convolutions and products {found}", where=graph,
                     hint="keep fewer modules in float32 (--keep, what the range scan found), or use bf16")  # fmt: skip


def _shown(layers: Sequence[Mapping[str, Any]]) -> str:
    """Describe the first few layers."""
    words = (f"layer {item['layer']}; nodes {', '.join(item['nodes'])}; modules {', '.join(item['modules'])}"
             for item in layers[:_SHOWN])  # fmt: skip
    more = [f"and {len(layers) - _SHOWN} more"] if len(layers) > _SHOWN else []
    return "\n         ".join([*words, *more])


def _spec(value: "ir.Value") -> dict[str, Any]:
    dims = [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape or ()]
    dtype = "" if value.dtype is None else str(value.dtype.numpy())
    return {"name": value.name, "dtype": dtype, "dims": dims}
