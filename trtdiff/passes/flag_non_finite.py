"""Let an engine's graph tell which of its values is not finite, and where it comes from.

The graph is one that was lowered for ONNX Runtime, in float32; where it shows half precision (`round_values`), a half
value is looked at in its float32 form, which is what the next node reads.
"""

from typing import TYPE_CHECKING

from trtdiff.passes.movers import moves
from trtdiff.passes.observe import mask_values
from trtdiff.passes.statistics import Place, add_statistics, place_of

if TYPE_CHECKING:
    import onnx_ir as ir


def flag_non_finite(model: "ir.Model") -> tuple[Place, ...]:
    """Add the output `statistics`, one column a place that is returned, in the order in which values are computed.

    Requires topologically sorted nodes. A value rounded by a pair of `Cast` has the place of the node that computed it.
    """
    import onnx_ir as ir

    graph = model.graph
    values = [value for value in graph.inputs if value.dtype == ir.DataType.FLOAT]
    masks = mask_values(graph)
    for node in graph:
        if node.op_type != "Constant" and not moves(node):
            values += [value for value in node.outputs if value.dtype == ir.DataType.FLOAT and value not in masks]
    add_statistics(graph, values)
    return tuple(_origin(value) for value in values)


def _origin(value: "ir.Value") -> Place:
    """Give the place of a value, or, behind the casts that round it, of what was rounded."""
    place, node = place_of(value), value.producer()
    while node is not None and node.op_type == "Cast" and (before := node.inputs[0]) is not None:
        node = before.producer()
        if before.is_graph_input() or (node is not None and place_of(before).module):
            place = place_of(before)
    return place
