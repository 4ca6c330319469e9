"""What rounding a value to 8 bits loses, for several clips at once, computed by nodes of the graph that has it.

Of every value, type and clip the sum of squared differences between the value and what is read back, in units of the
squared scale. Forms, for 1.3 million elements on one core of an AMD EPYC with ONNX Runtime 1.32:

    int8     QuantizeLinear, DequantizeLinear, Sub, ReduceSumSquare     0.67 ms    (as arithmetic 1.08)
    float8   arithmetic                                                 2.1 ms     (as the int8 form 12.1: no vectors)

float8 as arithmetic: with t = |x| / scale, a number A that is t · 2^20, and no less than 2^14, has a last place worth
just what the last of the three bits of t's mantissa is worth, or the least step of float8, 2^-9, below 2^-6. So
(t + A) - A is t rounded to float8, ties to even, as `EightBits` says it.

A number beyond the clip becomes -128 at the lower end of int8, as `QuantizeLinear` gives it wherever a quantized graph
is run, though no scale is chosen for it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trtdiff.passes.base import shared_number
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
        return float(np.float32(max(GRID**self.index / FORMATS[self.format].largest, 2.0**-126)))

    @property
    def unit(self) -> float:
        """What the output is to be multiplied by."""
        return 1.0 if self.format == "int8" else self.scale**2


def add_rounding_errors(graph: "ir.Graph", tried: "Iterable[tuple[ir.Value, Sequence[Candidate]]]") -> None:
    """Add the output `rounding_errors`, in the order given, each in its candidate's unit.

    Requires float32 values, and at least one candidate.
    """
    import onnx_ir as ir

    errors: list[ir.Value] = []
    for value, candidates in tried:
        tape = Tape()
        magnitude = tape.op("Abs", value) if any(one.format == "float8" for one in candidates) else value
        for one in candidates:
            if one.format == "int8":
                error = tape.op("Sub", value, read_back(tape, graph, value, one.scale))
            else:
                number = tape.op("Mul", magnitude, shared_number(graph, 1 / one.scale))
                error = tape.op("Sub", number, float8_magnitude(tape, graph, number, clips=one.clips))
            errors.append(tape.op("ReduceSumSquare", error, keepdims=0))
        tape.put_at(graph, value)
    tape = Tape()
    output = ir.Value(name=ERRORS, shape=ir.Shape([len(errors)]), type=ir.TensorType(ir.DataType.FLOAT))
    tape.stacked(errors, ir.DataType.FLOAT, output)
    tape.put_last(graph)
    graph.outputs.append(output)


def round_trip(
    tape: Tape, value: "ir.Value", scale: "ir.Value", name: EightBits, zero: "ir.Value | None" = None
) -> "ir.Value":
    """Quantize a value and read it back; `zero` is the zero point where there is one to share."""
    if zero is None:
        zero = tape.constant(np.zeros((), FORMATS[name].numpy))
    return tape.op("DequantizeLinear", tape.op("QuantizeLinear", value, scale, zero), scale, zero)


def read_back(tape: Tape, graph: "ir.Graph", value: "ir.Value", scale: float) -> "ir.Value":
    """Round a value to int8 with this scale, and read it back; constants are shared within the graph."""
    return round_trip(tape, value, shared_number(graph, scale), "int8", shared_number(graph, 0, np.int8))


def float8_magnitude(tape: Tape, graph: "ir.Graph", number: "ir.Value", *, clips: bool = True) -> "ir.Value":
    """Round magnitudes that were divided by their scale to float8; with `clips`, to its largest at most."""
    large = tape.op("Clip", tape.op("Mul", number, shared_number(graph, 2.0**20)), shared_number(graph, 2.0**14))
    rounded = tape.op("Sub", tape.op("Add", large, number), large)
    if not clips:
        return rounded
    return tape.op("Clip", rounded, shared_number(graph, 0.0), shared_number(graph, FORMATS["float8"].largest))
