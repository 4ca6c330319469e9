"""A cache made from scales that something else chose: nothing is known but a clip a tensor."""

from collections.abc import Mapping
from pathlib import Path

import trtdiff
from trtdiff.calibrate.cache import (
    CACHE_SCHEMA,
    IMPORTED,
    Cache,
    Component,
    Data,
    LayerFacts,
    Run,
    Statistics,
    model_of,
    sealed,
)
from trtdiff.calibrate.samples import bands_of
from trtdiff.digest import digest
from trtdiff.errors import ArtefactError, UsageError
from trtdiff.export.manifest import ExportManifest
from trtdiff.lowered import read_graph
from trtdiff.passes.layer_inputs import measured
from trtdiff.passes.layers import layers


def imported_cache(
    export: ExportManifest, folder: Path, component: str, clips: Mapping[str, float], *, source: str
) -> tuple[Cache, list[str]]:
    """Make a cache of tensor → clip; give it, and the tensors that the component's graph does not have.

    Its largest magnitudes are the clips, in a single band; no elements were seen. `source` is named in it. Raises
    ArtefactError where the graph has none of the tensors.
    """
    graphs = {part.name: part.graph for part in export.components}
    if component not in graphs:
        raise UsageError(
            f"there is no component {component!r}", where="--component", hint=f"known: {', '.join(graphs)}"
        )
    graph = read_graph(folder / graphs[component]).graph
    facts = {
        layer.name: LayerFacts(layer.module, layer.operator, 0,
                               tuple(str(measured(layer, place).name) for place in layer.activations))
        for layer in layers(graph)
    }  # fmt: skip
    known = {str(value.name) for value in graph.inputs} | {str(out.name) for node in graph for out in node.outputs}
    unknown = [name for name in clips if name not in known]
    if len(unknown) == len(clips):
        raise ArtefactError(f"none of its {len(clips)} tensors is in the graph of the {component}", where=source,
                            hint="tensors are to have the names of the exported ONNX graph")  # fmt: skip
    values = {name: Statistics((clip,), (0.0,), (0,)) for name, clip in clips.items() if name in known}
    data = Data(
        prompts=digest([]), prompt_count=0, negative="", steps=0, guidance=0.0, height=0, width=0,
        scheduler=digest(export.scheduler), bands=bands_of(export.scheduler, 1),
    )  # fmt: skip
    run = Run(0, (0,), (), {}, {})
    components = {component: Component(values=values, layers=facts)}
    versions = {"trtdiff": trtdiff.__version__, IMPORTED: source}
    return sealed(Cache(CACHE_SCHEMA, "", model_of(export), data, "", (run,), components, versions)), unknown
