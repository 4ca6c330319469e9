"""Whether a calibration cache is one that a recipe can be built from."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from trtdiff.calibrate.cache import ERROR, Cache, LayerFacts, read_cache, require_same_model
from trtdiff.calibrate.clips import clip_of
from trtdiff.calibrate.settings import passes_of
from trtdiff.errors import ArtefactError
from trtdiff.export.manifest import ExportManifest
from trtdiff.recipes.base import PrecisionRecipe
from trtdiff.recipes.quantization import Quantization

_RESUME = "go on with it: the same trtdiff calibrate, with --resume"


def read_fitting_cache(path: Path, export: ExportManifest, chosen: PrecisionRecipe) -> Cache:
    """Read a cache that a recipe can be built from. Raises ArtefactError."""
    cache = read_cache(path)
    require_same_model(cache, export)
    if missing := next(_missing(cache, chosen), ""):
        raise ArtefactError(f"the calibration is not complete: {missing}", where=str(path), hint=_RESUME)
    quantized = [part.name for part in export.components if chosen.quantizes(part.name)]
    if bare := [name for name in quantized if name not in cache.components or not cache.components[name].values]:
        raise ArtefactError(f"the calibration has nothing of {', '.join(bare)}", where=str(path),
                            hint="calibrate the whole export: trtdiff calibrate")  # fmt: skip
    _check_clips(cache, chosen, str(path))
    return cache


def uncovered(cache: Cache, chosen: PrecisionRecipe) -> Iterator[str]:
    """Say which layers an imported cache has no scales of, and what else it cannot give."""
    how = chosen.quantization
    if not cache.imported or how is None:
        return
    for name in how.components:
        wanted = list(_wanted(cache, name, how))
        seen = cache.components[name].values if name in cache.components else {}
        bare = [layer for layer in wanted if not all(value in seen for value in layer.inputs)]
        if bare:
            yield (
                f"{cache.imported} has no scales for {len(bare)} of the {len(wanted)} layers of {name} that "
                f"{chosen.name} quantizes; they stay in {chosen.computes_in}: {', '.join(it.module for it in bare[:3])}"
                f"{' …' if len(bare) > 3 else ''}"
            )
    if how.smooth is not None:
        yield f"{cache.imported} says nothing of channels: linear layers are not smoothed"


def _missing(cache: Cache, chosen: PrecisionRecipe) -> Iterator[str]:
    """Give the passes that the recipe needs and that some run has begun and not finished."""
    how = chosen.quantization
    if how is None or how.activations is None or cache.imported:
        return
    for kind in passes_of(how.method, noise=False):
        key = f"{kind} {how.activations}" if kind == ERROR else kind
        for run in cache.runs:
            wanted = run.wanted.get(key, {})
            if key in run.wanted and run.done.get(key) != wanted:
                seen, whole = run.done.get(key, {}).get("denoiser", 0), wanted.get("denoiser", 0)
                yield f"{key!r} has seen {seen} of {whole} samples of the denoiser" if seen < whole else f"{key!r}"


def _wanted(cache: Cache, name: str, how: Quantization) -> Iterator[LayerFacts]:
    """Give the layers that a recipe quantizes, as far as a cache can tell."""
    for layer in cache.components[name].layers.values() if name in cache.components else ():
        if layer.operator in how.operators and not any(fnmatchcase(layer.module, pattern) for pattern in how.keep):
            yield layer


def _check_clips(cache: Cache, chosen: PrecisionRecipe, where: str) -> None:
    """Refuse a cache that did not measure what the recipe's method needs, before anything is built."""
    how = chosen.quantization
    if how is None or how.activations is None:
        return
    for name in how.components:
        for layer in _wanted(cache, name, how):
            if how.smooth is not None and layer.operator == "linear":  # its clip follows from its channels
                continue
            seen = cache.components[name].values
            for value in [seen[value] for value in layer.inputs if value in seen]:
                try:
                    clip_of(value, how.activations, how.method, how.percentile)
                except ArtefactError as error:
                    raise ArtefactError(f"{error.message} of {layer.module or name}", where=where,
                                        hint=error.hint) from None  # fmt: skip
