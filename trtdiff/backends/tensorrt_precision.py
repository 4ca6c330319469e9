"""Whether an engine computes in the types of its graph, as far as its layers tell.

A compiler may fuse a cast to half precision into what comes before it, and the other way round; what it must not do is
compute in float32 what the graph has in half precision. So a layer is *widened* where it is a convolution, a product
or attention, what it reads is float32, all convolutions, products and attentions that it computes are of half
precision in the graph, and none of its nodes is a cast from float32, which a layer may do as it reads. No layer of the
graphs of diffusers that TensorRT for RTX 1.7.1 built, all in half precision but for their islands, was.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trtdiff.backends.tensorrt_failures import Graph
from trtdiff.backends.tensorrt_layers import Layer

OPERATORS = ("Attention", "Conv", "ConvTranspose", "Gemm", "MatMul")
"""Convolutions, products and attention in ONNX."""
HALVES = {"float16", "bfloat16"}
_WIDE = "float32"


def compared(layers: Sequence[Layer], graph: Graph) -> dict[str, Any]:
    """Compare layers with the graph that was compiled.

    `widened` lists layers that compute in float32 what the graph has in half precision: layer, nodes, modules.
    `precision` says why nothing was verified, where no layer was listed or none could be compared.
    """
    computing = [layer for layer in layers if layer.computes and layer.reads]
    types = _types(graph, OPERATORS)
    casts = {name for name, found in _types(graph, ["Cast"]).items() if _WIDE in found}
    known = [(layer, set().union(*(types.get(node, set()) for node in layer.nodes))) for layer in computing]
    widened = [
        {"layer": layer.name, "nodes": list(layer.nodes), "modules": list(layer.modules)}
        for layer, found in known
        if layer.reads == _WIDE and found and found <= HALVES and casts.isdisjoint(layer.nodes)
    ]
    if widened:
        return {"widened": widened}
    if not layers:
        return {"precision": "not verified: the compiler listed no layers"}
    if not computing:
        return {"precision": "not verified: no layer that multiplies was listed"}
    if not any(found for _, found in known):
        return {"precision": "not verified: no layer that multiplies names its nodes in the graph"}
    return {}


def _types(graph: Graph, operators: Iterable[str]) -> Mapping[str, set[str]]:
    """Give the types of the first inputs of all nodes of these operators, by name; several nodes may share one."""
    found: dict[str, set[str]] = {}
    for node in graph.nodes:
        if node.op_type in operators and node.input:
            found.setdefault(node.name, set()).add(graph.types.get(node.input[0], "").partition("[")[0])
    return found
