"""Let the layers of a canonical graph read 8 bits, by `QuantizeLinear` and `DequantizeLinear` as TensorRT takes them.

Where they stand, by the rules of NVIDIA's "Explicit Quantization" [1] and of what TensorRT for RTX 1.7.1 makes of it:

1. Every input of a layer that multiplies goes through a pair; outputs do not, so that nothing is rounded twice. One
   pair serves all layers that read a value.
2. Quantization is symmetric: zero point 0, of the type that is stored. An activation has one scale for the whole
   tensor, a weight one an output channel, on axis 0 as PyTorch stores it; a `Transpose` may follow. A bias keeps the
   base type.
3. Weights are stored quantized, with a `DequantizeLinear` alone (`weights_in_8_bits`).
4. Scales are float32, and stay so where `half_precision` narrows all else (see `half_precision.SCALED` for why).
5. The sum of a convolution and another branch ("residual add"): where everything that reads the sum is quantized, the
   other operand goes through a pair too, so that the convolution may write 8 bits. Elsewhere, as in front of a norm, it
   would cost precision and gain nothing, and does not.
6. Attention in float8 is written as NVIDIA's fusions want it: query (scaled) and key and value through pairs, and the
   softmax's output through one of the fixed scale 1/448, since nothing in it exceeds 1. Without that last pair the
   second product stays in half precision, and around the operator `Attention` pairs are of no effect: both seen in the
   layers of TensorRT for RTX. The kernel exists for head sizes that are multiples of 16 [2]. Attention in int8 has no
   fused kernel, and scores would be held whole: it is not quantized.
7. Smoothing (Xiao et al. 2023, "SmoothQuant", eq. 4) divides what goes into linear layers by a factor a channel, one
   vector for all layers that read the value, and multiplies their weights by it. It is a `Mul` of its own in front of
   the pair, which compilers fuse with it, and so needs nothing of what comes before. The clip of what was smoothed is
   its largest magnitude, which follows from the channels', whatever the recipe's method: its rounding was not measured.

A layer stays as it is where the recipe does not name its operator or keeps its module, where it is too small (`least`),
where it is in a float32 island, where its attention has a mask, or scores that float16 may not hold, and where scales
were imported, of which it has none. Those have no channels either, and nothing is smoothed.

[1] https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/quantized-types-explicit-quantization.html
[2] https://github.com/NVIDIA/Model-Optimizer, examples/diffusers: quantizers of attention are off for other sizes
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from trtdiff.calibrate.cache import Statistics
from trtdiff.calibrate.clips import clip_of
from trtdiff.errors import ArtefactError
from trtdiff.export.graph import MODULE
from trtdiff.passes.base import add_constant
from trtdiff.passes.eight_bits import FORMATS, Format
from trtdiff.passes.half_types import KEEP, LIMITS
from trtdiff.passes.layer_inputs import measured
from trtdiff.passes.layers import Layer, layers
from trtdiff.passes.smoothing import factors_of, smoothed_clip
from trtdiff.passes.tape import Tape
from trtdiff.passes.weights_in_8_bits import WeightIn8Bits, scale_of
from trtdiff.recipes.quantization import Quantization
from trtdiff.types import Array

if TYPE_CHECKING:
    import onnx_ir as ir

SOFTMAX_CLIP = 1.0
HEAD_MULTIPLE = 16
"""Head sizes of attention whose products TensorRT computes in float8."""
_MASK = 3


@dataclass
class Quantized:
    """What was done to a graph."""

    layers: dict[str, str] = field(default_factory=dict)
    """Layer → what it reads: `float8`, or `int8 weights` where only those are quantized."""
    kept: dict[str, str] = field(default_factory=dict)
    """Layer that stays in the base type → why."""


def quantize(
    model: "ir.Model", *, how: Quantization, base: str, statistics: Mapping[str, Statistics] | None = None
) -> Quantized:
    """Quantize a graph in place.

    `base`: type that the graph will compute in. `statistics`: value → what a calibration saw of it; needed where
    activations are quantized. Requires the canonical graph in float32, its islands marked. Ensures the same inputs and
    outputs, every value that is not stored in 8 bits in float32. Raises ArtefactError for a value that was not
    calibrated, or not as the method needs it.
    """
    work = _Work(model.graph, how, base, statistics or {})
    found = list(layers(model.graph))
    chosen = [layer for layer in found if not work.why_not(layer)]
    work.smooth(chosen)
    for layer in chosen:
        if layer.operator == "attention":
            work.attention(layer)
        else:
            work.layer(layer)
    work.residual_adds(chosen)
    words = f"{how.activations}" if how.activations else f"{how.weights} weights"
    return Quantized(
        {layer.name: words for layer in chosen},
        {layer.name: why for layer in found if (why := work.why_not(layer))},
    )


class _Work:
    """One graph on its way to 8 bits."""

    def __init__(self, graph: "ir.Graph", how: Quantization, base: str, statistics: Mapping[str, Statistics]) -> None:
        self._graph, self._how, self._base, self._statistics = graph, how, base, statistics
        self._weights = FORMATS[how.weights]
        self._activations = FORMATS[how.activations] if how.activations else None
        self._imported = bool(statistics) and all(seen.imported for seen in self._statistics.values())
        self._pairs: dict[ir.Value, ir.Value] = {}
        """A value → the same, rounded to 8 bits."""
        self._factors: Mapping[str, Array] = {}
        """What goes into linear layers → what its channels are divided by."""
        self._divided: dict[str, ir.Value] = {}
        self._read: dict[tuple[ir.Value, int], ir.Value] = {}
        """Weight and what smooths it → the same, read back from 8 bits."""
        self._whys: dict[ir.Node, str] = {}

    # --- which layers

    def why_not(self, layer: Layer) -> str:
        """Say why a layer stays in the base type; empty where it is quantized."""
        if layer.node not in self._whys:
            self._whys[layer.node] = self._why_not(layer)
        return self._whys[layer.node]

    def _why_not(self, layer: Layer) -> str:
        how = self._how
        if layer.operator not in how.operators:
            return f"the recipe quantizes no {layer.operator}"
        if KEEP in layer.node.metadata_props:
            return f"it stays in float32: {layer.node.metadata_props[KEEP]}"
        if asked := [why for pattern, why in how.keep.items() if fnmatchcase(layer.module, pattern)]:
            return asked[0]
        read = [str(measured(layer, place).name) for place in layer.activations] if self._imported else []
        if absent := [name for name in read if name not in self._statistics]:
            return f"no scale of {absent[0]} was imported"
        if layer.operator == "attention" and (unfit := self._unfit_attention(layer)):
            return unfit
        small = f"sums of {layer.inner} terms, {layer.outer} outputs: smaller than {how.least}"
        return small if min(layer.inner, layer.outer) < how.least else ""

    def _unfit_attention(self, layer: Layer) -> str:
        node = layer.node
        if self._activations is None or self._activations.name != "float8":
            return "attention in int8 has no fused kernel"
        if not layer.inner or layer.inner % HEAD_MULTIPLE:
            return f"its head size, {layer.inner or 'unknown'}, is no multiple of {HEAD_MULTIPLE}"
        number = {name: node.attributes[name].value for name in node.attributes}
        if any(value is not None for value in node.inputs[_MASK:]) or number.get("is_causal") or number.get("softcap"):
            return "it has a mask or a cap"
        heads = [None if value is None or value.shape is None else value.shape[1] for value in node.inputs[:_MASK]]
        if not isinstance(heads[0], int) or any(count != heads[0] for count in heads):
            return "several heads of queries share a key"
        query, key = (self._seen(measured(layer, place)).largest for place in (0, 1))
        largest = layer.inner * query * key * self._scale(layer)
        if self._base == "float16" and largest > LIMITS["float16"].largest:
            return f"its scores may reach {largest:.2g}, float16 ends at {LIMITS['float16'].largest:.5g}"
        return ""

    # --- convolutions and linear layers

    def layer(self, layer: Layer) -> None:
        """Let a layer read 8 bits."""
        node, weight = layer.node, layer.weight
        assert weight is not None, "attention alone has none"  # noqa: S101 - `layers` gives every other one
        value = node.inputs[0]
        assert value is not None, "required"  # noqa: S101 - the operators' definition
        factors = self._factors.get(str(value.name)) if layer.operator == "linear" else None
        self._put_weight(node, self._stored(weight, factors, node))
        if self._activations is not None:
            node.replace_input_with(0, self._pair(value, smoothed=layer.operator == "linear"))

    def _stored(self, weight: "ir.Value", factors: Array | None, node: "ir.Node") -> "ir.Value":
        """Give a weight as its 8 bits are read back; once, where several layers have it."""
        key = (weight, id(factors) if factors is not None else 0)
        if key not in self._read:
            name = f"{weight.name}.{self._weights.name}"
            again = sum(1 for other, _ in self._read if other is weight)
            wide = WeightIn8Bits(weight, self._weights, factors).dequantized(f"{name}_{again}" if again else name)
            made = wide.producer()
            assert made is not None, "made by a node"  # noqa: S101 - just written
            made.metadata_props.update(node.metadata_props)
            made.name = wide.name = f"{node.name}/weight/DequantizeLinear"
            self._graph.insert_before(node, made)
            self._read[key] = wide
        return self._read[key]

    def _put_weight(self, node: "ir.Node", wide: "ir.Value") -> None:
        """Let a layer read another weight, through a `Transpose` of its own where it had one."""
        import onnx_ir as ir

        before = node.inputs[1]
        turn = None if before is None else before.producer()
        if before is not None and turn is not None and turn.op_type == "Transpose":
            turned = ir.node("Transpose", [wide], dict(turn.attributes), name=f"{node.name}/weight/Transpose")
            turned.metadata_props.update(node.metadata_props)
            wide = turned.outputs[0]
            wide.name, wide.shape, wide.type = str(turned.name), before.shape, before.type
            self._graph.insert_before(node, turned)
        node.replace_input_with(1, wide)
        self._forget(before)

    def _forget(self, value: "ir.Value | None") -> None:
        """Remove a weight that nobody reads any more, with what led to it."""
        from trtdiff.passes.derived import forget_if_unused

        if value is None or value.uses() or value.is_graph_output():
            return
        node = value.producer()
        if node is None:
            forget_if_unused(value)
            return
        inputs = list(node.inputs)
        self._graph.remove(node, safe=True)
        for before in inputs:
            self._forget(before)

    # --- activations

    def _pair(self, value: "ir.Value", *, smoothed: bool) -> "ir.Value":
        """Give a value as its 8 bits are read back."""
        factors = self._factors.get(str(value.name)) if smoothed else None
        if factors is None:
            return self._rounded(value, self._clip(value))
        tape = Tape()
        name = f"{value.name}/smoothed"
        if name not in self._divided:
            inverse = add_constant(self._graph, (1 / factors).astype(np.float32), f"{name}.factors")
            self._divided[name] = tape.op("Mul", value, inverse)
            self._divided[name].shape = value.shape
            self._place(tape, value, name)
        return self._rounded(self._divided[name], smoothed_clip(self._seen(value), factors))

    def _rounded(self, value: "ir.Value", clip: float) -> "ir.Value":
        """Put a pair right behind a value; once."""
        if value not in self._pairs:
            tape = Tape()
            made = _pair(tape, value, clip, self._eight())
            self._place(tape, value, f"{value.name}/{self._eight().name}")
            self._pairs[value] = made
        return self._pairs[value]

    def _place(self, tape: Tape, value: "ir.Value", name: str) -> None:
        """Put nodes behind where a value is made, with its module, but no mark: 8 bits are read in the base type."""
        producer = value.producer()
        tape.put_at(self._graph, value)
        module = {} if producer is None else {MODULE: producer.metadata_props.get(MODULE, "")}
        tape.name_all(name, module)

    def _eight(self) -> Format:
        assert self._activations is not None, "only where activations are quantized"  # noqa: S101
        return self._activations

    def _clip(self, value: "ir.Value") -> float:
        return clip_of(self._seen(value), self._eight().name, self._how.method, self._how.percentile)

    def _seen(self, value: "ir.Value") -> Statistics:
        name = str(value.name)
        if name not in self._statistics:
            raise ArtefactError(f"the calibration has nothing of {name}", where=f"graph {self._graph.name}",
                                hint="calibrate this export again: trtdiff calibrate")  # fmt: skip
        return self._statistics[name]

    # --- smoothing

    def smooth(self, chosen: list[Layer]) -> None:
        """Choose factors for everything that goes into the chosen linear layers, and into no others."""
        alpha = self._how.smooth
        if alpha is None or self._activations is None or self._imported:
            return
        self._factors = factors_of(chosen, self._statistics, alpha)

    # --- attention

    def attention(self, layer: Layer) -> None:
        """Write an attention as products of float8."""
        tape, node, kind = Tape(), layer.node, self._eight()
        query, key, value = (node.inputs[place] for place in layer.activations)
        clips = [self._clip(measured(layer, place)) for place in layer.activations]
        scale = self._scale(layer)
        assert query is not None, "required"  # noqa: S101 - the operator's definition
        assert key is not None, "required"  # noqa: S101
        assert value is not None, "required"  # noqa: S101
        scaled = tape.op("Mul", query, tape.constant(np.array(scale, np.float32)))
        turned = tape.op("Transpose", key, perm=[0, 1, 3, 2])
        sides = [
            _pair(tape, side, clip, kind)
            for side, clip in ((scaled, clips[0] * scale), (turned, clips[1]), (value, clips[2]))
        ]
        weights = tape.op("Softmax", tape.op("MatMul", sides[0], sides[1]), axis=-1)
        weights = _pair(tape, weights, SOFTMAX_CLIP, kind)
        tape.put_instead_of(node, tape.op("MatMul", weights, sides[2]))

    def _scale(self, layer: Layer) -> float:
        attributes = layer.node.attributes
        given = attributes["scale"].as_float() if "scale" in attributes else 0.0
        return given or layer.inner**-0.5

    # --- residual adds

    def residual_adds(self, chosen: list[Layer]) -> None:
        """Round the other operand of sums that only quantized layers read."""
        if self._activations is None or self._activations.name != "int8":
            return
        for layer in chosen:
            (out,) = layer.node.outputs
            for add in out.consumers() if layer.operator == "conv" else ():
                if add.op_type == "Add" and self._only_quantized(add):
                    place = 1 if add.inputs[0] is out else 0
                    other = add.inputs[place]
                    if other is not None and other is not out and str(other.name) in self._statistics:
                        add.replace_input_with(place, self._rounded(other, self._seen(other).largest))

    def _only_quantized(self, node: "ir.Node") -> bool:
        (sum_,) = node.outputs
        readers = [use.node for use in sum_.uses()]
        return bool(readers) and not sum_.is_graph_output() and all(it.op_type == "QuantizeLinear" for it in readers)


def _pair(tape: Tape, value: "ir.Value", clip: float, kind: Format) -> "ir.Value":
    """Add Q and DQ of one scale."""
    scale = tape.constant(np.array(scale_of(clip, kind), np.float32))
    zero = tape.constant(np.zeros((), kind.numpy))
    return tape.op("DequantizeLinear", tape.op("QuantizeLinear", value, scale, zero), scale, zero)
