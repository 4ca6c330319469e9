"""How many elements of a value are larger than each of several edges, counted by nodes of the graph that has it."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from trtdiff.passes.eight_bits import GRID
from trtdiff.passes.tape import Tape

if TYPE_CHECKING:
    import onnx_ir as ir

COUNTS = "counts_beyond"
"""Name of the output: int64, one number an edge."""


def add_counts(graph: "ir.Graph", edges: "Iterable[tuple[ir.Value, Sequence[int]]]") -> None:
    """Add the output `counts_beyond` for edges `GRID ** index`, in the order given.

    Requires float32 values, and at least one edge. An element that equals an edge is not beyond it.
    """
    import onnx_ir as ir

    counts: list[ir.Value] = []
    for value, indexes in edges:
        tape = Tape()
        magnitude = tape.op("Abs", value)
        for index in indexes:
            beyond = tape.op("Greater", magnitude, tape.number(GRID**index))
            numbers = tape.op("Cast", beyond, to=int(ir.DataType.INT32))
            counts.append(tape.op("ReduceSum", numbers, keepdims=0))
        tape.put_at(graph, value)
    tape = Tape()
    row = tape.stacked(counts, ir.DataType.INT32)
    output = ir.Value(name=COUNTS, shape=ir.Shape([len(counts)]), type=ir.TensorType(ir.DataType.INT64))
    tape.op("Cast", row, output=output, to=int(ir.DataType.INT64))
    tape.put_last(graph)
    graph.outputs.append(output)
