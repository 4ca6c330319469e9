"""Let a canonical graph tell how large its values get.

Observed are the float inputs of the graph and what its nodes compute. Weights are not, nor what is made of weights
alone; nor what nodes only move (`movers`), since those are the numbers of their inputs. A mask of `Attention` is not
either: it says minus infinity and means it.

Runs before anything else, on the exported graph, so that the values have their exported names.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtdiff.passes.movers import moves
from trtdiff.passes.statistics import Place, add_statistics, place_of

if TYPE_CHECKING:
    import onnx_ir as ir

_MASK = 3
"""Place of the mask among the inputs of `Attention`."""


def observe(model: "ir.Model", more: "Sequence[ir.Value]" = ()) -> tuple[Place, ...]:
    """Add the output `statistics`, one column a place that is returned, in the order of the nodes; none for none.

    Values of `more` that only move numbers are observed besides, in the last columns.

    Requires a graph that computes in float32. Ensures that `cpu_forms` still finds the attentions that it found: their
    outputs are read behind the `Transpose` that follows.
    """
    graph = model.graph
    observed = [value for value in graph.inputs if _is_float(value)]
    fixed = set(graph.initializers.values())
    masks = mask_values(graph)
    for node in graph:
        given = [value for value in node.inputs if value is not None]
        if node.op_type == "Constant" or (given and all(value in fixed for value in given)):
            fixed.update(node.outputs)
        elif not moves(node):
            observed += [value for value in node.outputs if _is_float(value) and value not in masks and _is_used(value)]
    seen = set(observed)
    observed += [value for value in dict.fromkeys(more) if value not in seen]
    if observed:
        add_statistics(graph, [readable(value) for value in observed])
    return tuple(map(place_of, observed))


def mask_values(graph: "ir.Graph") -> "set[ir.Value]":
    """Values that lead to nothing but masks of `Attention`."""
    masks: set[ir.Value] = set()
    ends = set(graph.outputs)
    for node in reversed(graph):
        for value in node.outputs:
            uses = value.uses()
            if uses and value not in ends and all(_masks(use.node, use.idx, masks) for use in uses):
                masks.add(value)
    return masks


def _masks(node: "ir.Node", place: int, masks: "set[ir.Value]") -> bool:
    if node.op_type == "Attention":
        return place == _MASK
    return any(value in masks for value in node.outputs)


def readable(value: "ir.Value") -> "ir.Value":
    """Give where a value can be read: of an attention, behind the transpose that gives its heads back."""
    node = value.producer()
    if node is None or node.op_type != "Attention":
        return value
    turned = [use.node.outputs[0] for use in value.uses() if use.node.op_type == "Transpose"]
    return turned[0] if turned else value


def _is_float(value: "ir.Value") -> bool:
    import onnx_ir as ir

    return value.dtype == ir.DataType.FLOAT


def _is_used(value: "ir.Value") -> bool:
    return bool(value.uses()) or value.is_graph_output()
