"""What rounding the operands of one layer to 8 bits does to its result, for every layer at once, in its own graph.

Each layer stands in the graph a second time, on operands that were rounded; its inputs are the exact ones, so that the
noise of one layer is not that of those before it. Weights are rounded while the graph runs, and only when the layer's
turn comes: their scale, and what smooths them, is multiplied by a 1 that is made from the layer's input. Otherwise a
runtime would compute them all when it opens the graph, and hold every weight twice.

Numbers of weights are divided by their scales and rounded with scale 1: a `QuantizeLinear` with a scale for each of the
last axis works element by element, and one to float8 has no vectors (see `rounding_errors`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trtdiff.passes.base import shared_number
from trtdiff.passes.eight_bits import FORMATS, EightBits
from trtdiff.passes.layer_inputs import measured, rearranged
from trtdiff.passes.layers import Layer
from trtdiff.passes.observe import readable
from trtdiff.passes.rounding_errors import float8_magnitude, read_back
from trtdiff.passes.tape import Tape
from trtdiff.types import Array

if TYPE_CHECKING:
    import onnx_ir as ir

NOISE = "layer_noise"
"""Name of the output: float32 [layers, 1 + formats], the signal first."""
_TINY = 2.0**-126
"""Scale of a channel whose weights are all 0."""


@dataclass(frozen=True)
class Rounded:
    """How the inputs of a layer are rounded."""

    format: EightBits
    clips: tuple[float, ...]
    """One an input that is an activation; 0: it is always 0."""
    factors: Array | None = None
    """What smoothing divides the channels of a linear layer's input by, and multiplies its weight by: [in] float32."""


def add_layer_noise(graph: "ir.Graph", asked: Sequence[tuple[Layer, Sequence[Rounded]]]) -> None:
    """Add the output `layer_noise`, a row a layer: sum of squares of its result, and of the difference by format.

    Requires the canonical graph, at least one layer, and as many formats for each. Keeps what `cpu_forms` looks for.
    """
    import onnx_ir as ir

    rows = []
    for layer, formats in asked:
        tape = Tape()
        exact = readable(layer.node.outputs[0])
        sums = [tape.op("ReduceSumSquare", exact, keepdims=0)]
        for how in formats:
            repeat = _attention if layer.operator == "attention" else _product
            noisy = repeat(tape, graph, layer, how)
            sums.append(tape.op("ReduceSumSquare", tape.op("Sub", noisy, exact), keepdims=0))
        rows.append(tape.stacked(sums, ir.DataType.FLOAT))
        tape.put_at(graph, exact)
    tape = Tape()
    shape = ir.Shape([len(rows), 1 + len(asked[0][1])])
    output = ir.Value(name=NOISE, shape=shape, type=ir.TensorType(ir.DataType.FLOAT))
    tape.stacked(rows, ir.DataType.FLOAT, output)
    tape.put_last(graph)
    graph.outputs.append(output)


def _product(tape: Tape, graph: "ir.Graph", layer: Layer, how: Rounded) -> "ir.Value":
    """Repeat a convolution or a linear layer on rounded operands."""
    value, weight, *rest = layer.node.inputs
    assert value is not None, "an input of a layer"  # noqa: S101 - `layers` gives no other
    assert weight is not None, "a weight of a layer"  # noqa: S101 - `layers` gives no other
    axis = 1 if layer.node.op_type == "MatMul" else 0
    stored = layer.weight.const_value if layer.weight is not None else None
    assert stored is not None, "a weight of a layer"  # noqa: S101 - as above
    others = tape.ints(*(place for place in range(len(stored.shape)) if place != axis))
    if how.factors is not None:
        value = tape.op("Mul", value, tape.constant(1 / how.factors))
        late = tape.op("Mul", tape.constant(np.expand_dims(how.factors, axis)), _one(tape, graph, value))
        weight = tape.op("Mul", weight, late)
    largest = tape.op("ReduceMax", weight, others, keepdims=1)
    least = tape.op("ReduceMin", weight, others, keepdims=1)
    magnitude = tape.op("Max", largest, tape.op("Neg", least))
    scale = tape.op("Div", magnitude, shared_number(graph, FORMATS[how.format].largest))
    scale = tape.op("Mul", tape.op("Max", scale, shared_number(graph, _TINY)), _one(tape, graph, value))
    if how.format == "int8":
        kept = tape.op("Mul", read_back(tape, graph, tape.op("Div", weight, scale), 1.0), scale)
    else:
        kept = _float8(tape, graph, weight, scale)
    return tape.like(layer.node, [_rounded(tape, graph, value, how.clips[0], how.format), kept, *rest])


def _attention(tape: Tape, graph: "ir.Graph", layer: Layer, how: Rounded) -> "ir.Value":
    """Repeat an attention on rounded query, key and value, with all that splits heads and turns them."""
    operands: list[ir.Value | None] = list(layer.node.inputs)
    for place, clip in zip(layer.activations, how.clips, strict=True):
        value = operands[place]
        assert value is not None, "an input of a layer"  # noqa: S101 - `layers` gives no other
        number = _rounded(tape, graph, measured(layer, place), clip, how.format)
        for node in rearranged(value):
            number = tape.like(node, [number, *node.inputs[1:]])
            number.shape, number.type = node.outputs[0].shape, node.outputs[0].type
        operands[place] = number
    result = tape.like(layer.node, operands)
    output = layer.node.outputs[0]
    result.shape, result.type = output.shape, output.type
    turned = readable(output).producer()
    return result if turned is None or turned is layer.node else tape.like(turned, [result])


def _rounded(tape: Tape, graph: "ir.Graph", value: "ir.Value", clip: float, name: EightBits) -> "ir.Value":
    """Round an activation, and read it back."""
    scale = float(np.float32((clip or 1.0) / FORMATS[name].largest))
    if name == "int8":
        return read_back(tape, graph, value, scale)
    return _float8(tape, graph, value, shared_number(graph, scale))


def _float8(tape: Tape, graph: "ir.Graph", value: "ir.Value", scale: "ir.Value") -> "ir.Value":
    """Round to float8 and read back, by its magnitude and what a 1 of that stands for, with its sign.

    `Sign` and `Where` have no vectors. The last node must not multiply by a constant: ONNX Runtime would put that into
    the product behind it, as a new node that it runs last of all, with all that it needs kept until then. For a UNet of
    220 M weights at 32 by 32 latents, 565 MB were alive at once, and 134 are now, five times its largest weight.
    """
    magnitude = tape.op("Abs", tape.op("Div", value, scale))
    unit = tape.op("Div", value, tape.op("Clip", magnitude, shared_number(graph, _TINY)))
    return tape.op("Mul", float8_magnitude(tape, graph, magnitude), unit)


def _one(tape: Tape, graph: "ir.Graph", value: "ir.Value") -> "ir.Value":
    """Give a 1 that cannot be known before the value is."""
    one = shared_number(graph, 1.0)
    return tape.op("Clip", tape.in_float32(tape.op("Size", value)), one, one)
