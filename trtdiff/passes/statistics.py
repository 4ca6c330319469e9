"""Statistics of values, computed by nodes of the graph that has them: one more output of a few kilobytes.

Of every value the largest and the smallest element, the sum of squares, and how many elements there are. Together they
miss nothing: the maximum and minimum of ONNX Runtime skip a NaN but show an infinity, and a sum of squares shows a NaN,
since nothing in it can cancel. A sum that overflows (elements beyond 1e16) is infinite, and no NaN.

Three reductions read a tensor and write nothing of its size. 1.3 million elements on one core of an AMD EPYC with ONNX
Runtime 1.32: maximum 0.19 ms, minimum 0.32, sum of squares 0.23; `Abs` and then a maximum take 1.46 ms, `Mul` and a
mean 1.26.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trtdiff.export.graph import MODULE
from trtdiff.passes.tape import Tape
from trtdiff.types import Array

if TYPE_CHECKING:
    import onnx_ir as ir

STATISTICS = "statistics"
"""Name of the output: float32 [4, values], with the rows of `KINDS` and the element counts."""
KINDS = ("ReduceMax", "ReduceMin", "ReduceSumSquare")


@dataclass(frozen=True)
class Place:
    """Where a value comes from."""

    value: str
    node: str
    """Name of the node that makes it; empty for an input of the graph."""
    module: str
    """Path of the PyTorch module; empty where the graph does not say."""

    def __str__(self) -> str:
        named = f"node {self.node}" if self.node else f"input {self.value}"
        return f"{self.module} ({named})" if self.module else named


def place_of(value: "ir.Value") -> Place:
    """Say where a value of a graph comes from."""
    node = value.producer()
    if node is None:
        return Place(str(value.name), "", "")
    return Place(str(value.name), str(node.name), node.metadata_props.get(MODULE, ""))


def add_statistics(graph: "ir.Graph", values: Sequence["ir.Value"]) -> None:
    """Add the output `statistics`, whose column i belongs to `values[i]`.

    Requires float32 values, at least one. Ensures the same nodes as before with the same inputs and outputs.
    """
    import onnx_ir as ir

    tape, full = Tape(), ir.DataType.FLOAT
    rows = [tape.stacked([tape.op(kind, value, keepdims=0) for value in values], full) for kind in KINDS]
    counts = tape.stacked([tape.op("Size", value) for value in values], ir.DataType.INT64)
    rows.append(tape.op("Cast", counts, to=int(full)))
    output = ir.Value(name=STATISTICS, shape=ir.Shape([len(KINDS) + 1, len(values)]), type=ir.TensorType(full))
    tape.stacked(rows, full, output)
    tape.put_last(graph)
    graph.outputs.append(output)


def amax(statistics: Array) -> Array:  # [4, n] → [n] float64
    """Largest magnitude of every value; NaN where it holds a NaN, infinite where it holds an infinity."""
    largest = np.maximum(np.abs(statistics[0]), np.abs(statistics[1])).astype(np.float64)
    return np.where(np.isnan(statistics[2]), np.nan, largest)
