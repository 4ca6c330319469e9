"""What rounding a value to 8 bits loses, for several clips at once, computed by nodes of the graph that has it.

Of every value, type and clip the sum of squared differences between the value and what is read back. Forms, for 1.3
million elements on one core of an AMD EPYC with ONNX Runtime 1.32:

    int8     QuantizeLinear, DequantizeLinear, Sub, ReduceSumSquare     0.67 ms    (as arithmetic 1.08)
    float8   arithmetic                                                 2.1 ms     (as the int8 form 12.1: no vectors)

float8 as arithmetic: with t = |x| / scale, a number A that is t · 2^20, and no less than 2^14, has a last place worth
just what the last of the three bits of t's mantissa is worth, or the least step of float8, 2^-9, below 2^-6. So
(t + A) - A is t rounded to float8, ties to even, as `EightBits` says it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trtdiff.passes.eight_bits import FORMATS, GRID, EightBits
from trtdiff.passes.tape import Tape

if TYPE_CHECKING:
    import onnx_ir as ir

ERRORS = "rounding_errors"
"""Name of the output: float32, one number a candidate."""


@dataclass(frozen=True)
class Candidate:
    """A clip that is tried: `GRID ** index`."""

    format: EightBits
    index: int
    clips: bool
    """Whether any number of the value is beyond it."""

    @property
    def scale(self) -> float:
        """What a stored 1 stands for, as float32 has it."""
        return float(np.float32(GRID**self.index / FORMATS[self.format].largest))


def add_rounding_errors(graph: "ir.Graph", tried: "Iterable[tuple[ir.Value, Sequence[Candidate]]]") -> None:
    """Add the output `rounding_errors`, in the order given. Requires float32 values, and at least one candidate."""
    import onnx_ir as ir

    errors: list[ir.Value] = []
    for value, candidates in tried:
        tape = Tape()
        magnitude = tape.op("Abs", value) if any(one.format == "float8" for one in candidates) else value
        for candidate in candidates:
            if candidate.format == "int8":
                error = tape.op("Sub", value, round_trip(tape, value, tape.number(candidate.scale), "int8"))
                squares, unit = tape.op("ReduceSumSquare", error, keepdims=0), 1.0
            else:
                squares, unit = _float8(tape, magnitude, candidate), candidate.scale**2
            errors.append(tape.op("Mul", squares, tape.number(unit)) if unit != 1 else squares)
        tape.put_at(graph, value)
    tape = Tape()
    output = ir.Value(name=ERRORS, shape=ir.Shape([len(errors)]), type=ir.TensorType(ir.DataType.FLOAT))
    tape.stacked(errors, ir.DataType.FLOAT, output)
    tape.put_last(graph)
    graph.outputs.append(output)


def round_trip(
    tape: Tape, value: "ir.Value", scale: "ir.Value", name: EightBits, *, axis: int | None = None, size: int = 0
) -> "ir.Value":
    """Quantize a value and read it back; with `axis`, which has `size` slices, `scale` holds one number a slice."""
    import ml_dtypes

    where: dict[str, Any] = {} if axis is None else {"axis": axis}
    zeros = np.zeros(() if axis is None else size, np.int8 if name == "int8" else ml_dtypes.float8_e4m3fn)
    zero = tape.constant(zeros)
    stored = tape.op("QuantizeLinear", value, scale, zero, **where)
    return tape.op("DequantizeLinear", stored, scale, zero, **where)


def _float8(tape: Tape, magnitude: "ir.Value", candidate: Candidate) -> "ir.Value":
    """Sum the squared errors in units of the squared scale."""
    number = tape.op("Mul", magnitude, tape.number(1 / candidate.scale))
    large = tape.op("Mul", number, tape.number(2**20))
    large = tape.op("Clip", large, tape.number(2**14))
    rounded = tape.op("Sub", tape.op("Add", large, number), large)
    if candidate.clips:
        rounded = tape.op("Min", rounded, tape.number(FORMATS["float8"].largest))
    return tape.op("ReduceSumSquare", tape.op("Sub", number, rounded), keepdims=0)
