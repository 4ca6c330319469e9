"""Show on a CPU what a graph in half precision computes: every value rounded as it would be stored.

ONNX Runtime has next to no kernels for float16 on a CPU: it computes typed graphs in float32 and narrows where it must,
so an overflow between two nodes never shows; for bfloat16 it has none at all. Here every half value becomes float32
with `Cast(half) → Cast(float32)` behind the node that makes it. Run such a graph with graph optimizations off: they
would take the pairs out. Inside a node sums are float32, as they are in the kernels of GPUs.
"""

from typing import TYPE_CHECKING

from trtdiff.errors import BuildError
from trtdiff.passes.casts import Casts
from trtdiff.passes.schemas import type_word

if TYPE_CHECKING:
    import onnx_ir as ir


def round_values(model: "ir.Model") -> None:
    """Turn a graph that `half_precision` made into one in float32 that rounds every value to its type.

    Requires inputs and outputs of other types than half ones, as `half_precision` leaves them; raises BuildError where
    one is half. Ensures that no node but `Cast` and constants reads or writes a half value, and the same inputs and
    outputs.
    """
    import onnx_ir as ir

    graph = model.graph
    halves = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    for end in (*graph.inputs, *graph.outputs):
        if end.dtype in halves:
            raise BuildError(
                f"{end.name} is {type_word(end.dtype)} outside of the graph", where=f"graph {graph.name}",
                hint="run half_precision first: it leaves inputs and outputs in float32"
            )  # fmt: skip
    casts = Casts(graph)
    for node in list(graph):
        for place, value in enumerate(node.inputs):
            if value is not None and value.is_initializer() and value.dtype in halves and node.op_type != "Cast":
                node.replace_input_with(place, casts.cast(value, ir.DataType.FLOAT))
        for value in node.outputs:
            if value.dtype in halves:
                _round(casts, node, value)


def _round(casts: Casts, node: "ir.Node", value: "ir.Value") -> None:
    """Let the readers of a half value read its float32 form, rounded."""
    import onnx_ir as ir

    half = value.dtype
    assert half is not None, "the caller looked at it"  # noqa: S101 - an invariant, not a check of input
    readers = [(use.node, use.idx) for use in value.uses()]
    narrow = value
    if node.op_type not in {"Cast", "Constant", "ConstantOfShape"}:  # those write a half value as it is
        value.dtype = ir.DataType.FLOAT
        if "output_dtype" in node.attributes:
            node.attributes["output_dtype"] = ir.AttrInt64("output_dtype", int(ir.DataType.FLOAT))
        narrow = casts.cast(value, half)
    wide = casts.cast(narrow, ir.DataType.FLOAT)
    for reader, place in readers:
        reader.replace_input_with(place, wide)
