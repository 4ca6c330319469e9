"""How much of an engine computes in 8 bits, as its own layers tell it, beside what its graph asks for.

A graph *quantizes* a convolution, product or attention where all that it multiplies is dequantized from 8 bits: data
and weights, or both factors of a product of data. A compiler may read those bits as they are, or dequantize first and
multiply in a wider type; both are what the graph says as numbers, and only the first is fast. So the measure is what
the layers read: the *share* is that of all multiply-adds, at the tuned shapes, whose layer reads int8 or float8.

What TensorRT for RTX 1.7.1 does: it multiplies in 8 bits all that a graph quantizes, of every size, with three
exceptions. Where sm75 is among the GPUs, convolutions are in half precision. The operator `Attention` reads half
precision, whatever its inputs come from: products with a `Softmax` between them, quantized before and after, are read
in float8. And where only weights are quantized, they are stored in 8 bits and multiplied in half precision, which is
what such a graph means: it counts as nothing here, and is no fault.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trtdiff.backends.multiply_adds import PRODUCTS, multiply_adds
from trtdiff.backends.tensorrt_failures import Graph
from trtdiff.backends.tensorrt_layers import EIGHT_BITS, Layer

_FACTORS = {"Attention": (0, 1, 2)}
"""Operator → places of what it multiplies; of all others 0 and 1."""
_MOVERS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""What may stand between the dequantization and the node that reads it."""
_STORED = frozenset({"int8", "float8e4m3fn"})
"""Types of 8 bits that multiply, as ONNX names them."""
_WIDER = ("float4", "int4", "float8", "int8", "bfloat16", "float16", "float32")
"""Narrow types first: a node in several layers counts as computed in the last of theirs."""


def quantized(layers: Sequence[Layer], graph: Graph, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Sum up what computes in 8 bits; nothing for a graph that dequantizes nothing.

    `quantized` has the multiply-adds at these sizes that are `int8` and `float8`, of how many in `total`, and their
    `share`. `not_quantized` lists layers that read another type though the graph quantizes their nodes: layer, nodes,
    modules, what it reads, and its share. `uncounted` says what could not be counted, where that is anything.
    """
    if not any(node.op_type == "DequantizeLinear" for node in graph.nodes):
        return {}
    counts = multiply_adds(graph.model, sizes)
    products = {node.name for node in graph.nodes if node.op_type in PRODUCTS}
    read = _read(layers, products)
    total = sum(counts.values())
    eight = {word: sum(counts.get(node, 0) for node, found in read.items() if found == word) for word in EIGHT_BITS}
    result: dict[str, Any] = {"quantized": {**eight, "total": total, "share": _share(sum(eight.values()), total)}}
    asked = _asked(graph)
    wrong = [_entry(layer, asked, counts, total) for layer in layers if _is_wrong(layer, asked)]
    if wrong:
        result["not_quantized"] = wrong
    unknown, unseen = len(products - counts.keys()), len(asked - read.keys())
    reasons = {f"the shapes of {unknown} nodes are not known": unknown,
               f"no layer names {unseen} nodes that the graph quantizes": unseen}  # fmt: skip
    if any(reasons.values()):
        result["uncounted"] = "; ".join(reason for reason, count in reasons.items() if count)
    return result


def _read(layers: Iterable[Layer], products: set[str]) -> dict[str, str]:
    """Give the type in which each node is multiplied; the widest, where several layers share it."""
    read: dict[str, str] = {}
    for layer in layers:
        if layer.computes and layer.reads:
            for node in products.intersection(layer.nodes):
                read[node] = max(read.get(node, layer.reads), layer.reads, key=_WIDER.index)
    return read


def _is_wrong(layer: Layer, asked: set[str]) -> bool:
    return bool(layer.computes and layer.reads and layer.reads not in EIGHT_BITS and asked.intersection(layer.nodes))


def _entry(layer: Layer, asked: set[str], counts: Mapping[str, int], total: int) -> dict[str, Any]:
    nodes = [node for node in layer.nodes if node in asked]
    count = sum(counts.get(node, 0) for node in nodes)
    return {
        "layer": layer.name,
        "nodes": nodes,
        "modules": list(layer.modules),
        "reads": layer.reads,
        "share": _share(count, total),
    }


def _share(count: int, total: int) -> float:
    """Give a share, rounded down: 1 is all."""
    return count * 10_000 // total / 10_000 if total else 0.0


def _asked(graph: Graph) -> set[str]:
    """Give the names of the nodes that the graph quantizes."""
    makers = {output: node for node in graph.nodes for output in node.output}

    def dequantized(name: str) -> bool:
        node = makers.get(name)
        while node is not None and node.op_type in _MOVERS:
            node = makers.get(node.input[0])
        if node is None or node.op_type != "DequantizeLinear":
            return False
        return graph.types.get(node.input[0], "").partition("[")[0] in _STORED

    return {
        node.name
        for node in graph.nodes
        if node.op_type in PRODUCTS
        and all(dequantized(node.input[place]) for place in _FACTORS.get(node.op_type, (0, 1)))
    }
