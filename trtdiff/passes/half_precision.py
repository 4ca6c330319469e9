"""Compute in float16 or bfloat16, but for the nodes that are marked to stay in float32.

Every node is either in half precision or in an island, which `mark_islands` wrote down. Where a value crosses, one
`Cast` is written for all its readers on that side, so islands that touch are one island, and no value goes down and up
again. The graph's own inputs and outputs keep their types: whoever binds it need not know.

A weight that the checkpoint stores in the wanted type is read as it lies there; any other is converted when it is
written, one tensor at a time. Islands read weights in float32.
"""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import numpy as np

from trtdiff.errors import BuildError
from trtdiff.passes.casts import Casts
from trtdiff.passes.derived import derived_weight, forget_if_unused
from trtdiff.passes.half_types import KEEP, LIMITS, Half
from trtdiff.passes.mark_islands import stored_weight
from trtdiff.passes.schemas import describe, signature
from trtdiff.types import Array

if TYPE_CHECKING:
    import onnx_ir as ir


def half_precision(model: "ir.Model", *, dtype: Half = "float16") -> None:
    """Turn a float32 graph into a strongly typed one of `dtype`; nodes with the metadata `keep` stay in float32.

    Requires a graph in which every value of a float type is float32, weights through one `Cast`. Ensures the same
    inputs and outputs, and that every node has inputs of one type where its operator wants them equal. Raises
    BuildError for a weight or constant beyond the type's range.
    """
    _Typing(model, dtype).run()


class _Typing:
    """One graph on its way to two types."""

    def __init__(self, model: "ir.Model", dtype: Half) -> None:
        import onnx_ir as ir

        self._graph = model.graph
        self._dtype = dtype
        self._half = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}[dtype]
        self._full = ir.DataType.FLOAT
        self._opsets = model.opset_imports
        self._outputs = set(self._graph.outputs)
        self._casts = Casts(self._graph)
        self._narrow: dict[ir.Value, ir.Value] = {}
        """A float32 value → the same in half precision."""

    def run(self) -> None:
        weights = [value for value in self._graph.initializers.values() if value.const_value is not None]
        nodes = list(self._graph)
        for node in nodes:
            if stored_weight(node):
                continue
            if KEEP in node.metadata_props:
                self._feed(node, range(len(node.inputs)), wide=True)
            else:
                self._halve(node)
        self._restore_outputs()
        self._clean(nodes, weights)

    # --- one node

    def _halve(self, node: "ir.Node") -> None:
        import onnx_ir as ir

        allowed = list(self._allowed(node))
        places = [place for place, fits in enumerate(allowed[: len(node.inputs)]) if fits]
        outputs = [value for value, fits in zip(node.outputs, allowed[len(node.inputs) :], strict=True) if fits]
        outputs = [value for value in outputs if value.dtype == self._full]
        floats = [value for value in node.inputs if value is not None and value.dtype in {self._full, self._half}]
        if not outputs and not floats:
            return
        if node.op_type == "Cast":
            if outputs:  # from integers, or a widening of what is half now
                node.attributes["to"] = ir.AttrInt64("to", int(self._half))
        elif node.op_type in {"Constant", "ConstantOfShape"}:
            if "value" in node.attributes and outputs:
                tensor = node.attributes["value"].as_tensor()
                node.attributes["value"] = ir.AttrTensor("value", self._rounded(tensor.numpy(), str(node.name)))
            elif outputs:
                return  # value_float: its readers narrow it
        else:
            if node.op_type in SCALED:
                places = [place for place in places if place != _SCALE]
                if outputs and node.op_type == "DequantizeLinear":
                    node.attributes["output_dtype"] = ir.AttrInt64("output_dtype", int(self._half))
            self._feed(node, places, wide=False)
            self._feed(node, [place for place in range(len(node.inputs)) if place not in places], wide=True)
        for value in outputs:
            value.dtype = self._half

    def _allowed(self, node: "ir.Node") -> Iterator[bool]:
        """Whether each input, then each output, may be half as the operator's definition has it."""
        found = signature(node, self._opsets)
        if found is None:
            raise BuildError(
                f"operator {node.domain or 'ai.onnx'}::{node.op_type} is not defined", where=describe(node)
            )
        yield from (self._half in found.input(place).allowed for place in range(len(node.inputs)))
        yield from (self._half in found.output(place).allowed for place in range(len(node.outputs)))

    def _feed(self, node: "ir.Node", places: Collection[int], *, wide: bool) -> None:
        """Let a node read these inputs in float32, or in half precision."""
        for place in places:
            value = node.inputs[place]
            if value is None or value.dtype not in {self._full, self._half}:
                continue
            if wide and value.dtype == self._half and not value.is_initializer():
                node.replace_input_with(place, self._casts.cast(value, self._full))
            elif not wide and value.dtype == self._full:
                node.replace_input_with(place, self._narrowed(value))

    # --- one value

    def _narrowed(self, value: "ir.Value") -> "ir.Value":
        if value not in self._narrow:
            producer = value.producer()
            if value.is_initializer():
                self._narrow[value] = self._converted(value, value)
            elif producer is not None and stored_weight(producer) and producer.inputs[0] is not None:
                self._narrow[value] = self._converted(producer.inputs[0], value)
            else:
                self._narrow[value] = self._casts.cast(value, self._half)
        return self._narrow[value]

    def _converted(self, stored: "ir.Value", value: "ir.Value") -> "ir.Value":
        """Give a weight in half precision: itself, where it is stored so."""
        import onnx_ir as ir

        tensor = stored.const_value
        if tensor is None or tensor.dtype == self._half:
            return stored
        name = f"{stored.name}.{self._dtype}"
        if tensor.nbytes <= SMALL_BYTES:
            constant = self._rounded(tensor.numpy(), str(value.name))
            made = ir.Value(name=name, shape=ir.Shape(constant.shape), type=ir.TensorType(self._half))
            made.const_value = constant
            self._graph.register_initializer(made)
            return made
        where = str(stored.name)
        return derived_weight(
            stored, name, lambda array: self._fitting(array, where), dtype=self._half, shape=tensor.shape.numpy()
        )

    def _rounded(self, array: Array, where: str) -> "ir.Tensor[Array]":
        import onnx_ir as ir

        return ir.Tensor(self._fitting(array, where), dtype=self._half)

    def _fitting(self, array: Array, where: str) -> Array:
        """Round to half precision; a number beyond its range is an error, an infinity (a mask) is not.

        Float32's own end is not either: in a mask it stands for the lowest number there is, and becomes the type's.
        """
        single = array.astype(np.float32)
        ends = np.abs(single) == np.finfo(np.float32).max
        single = np.where(ends, np.copysign(np.float32(LIMITS[self._dtype].largest), single), single)
        finite = np.abs(single[np.isfinite(single)])
        largest = float(finite.max(initial=0))
        end = LIMITS[self._dtype].largest
        if largest > end:
            raise BuildError(
                f"a weight reaches {largest:.3g}, {self._dtype} ends at {end:.3g}",
                where=f"weight {where}", hint="build with --precision bf16 or fp32, or keep its module in float32"
            )  # fmt: skip
        rounded: Array = single.astype(self._half.numpy())
        return rounded

    # --- the ends

    def _restore_outputs(self) -> None:
        """Give outputs of the graph the type they had, under the name they had."""
        for place, value in enumerate(self._graph.outputs):
            if value.dtype == self._half:
                name = str(value.name)
                made = self._casts.cast(value, self._full)
                value.name, made.name = self._casts.unused(f"{name}/{self._dtype}"), name
                self._graph.outputs[place] = made

    def _clean(self, nodes: "list[ir.Node]", weights: "list[ir.Value]") -> None:
        """Remove what nobody reads any more: widenings of weights, and weights that were converted."""
        for node in nodes:
            if stored_weight(node) and not node.outputs[0].uses() and node.outputs[0] not in self._outputs:
                self._graph.remove(node, safe=True)
        for value in weights:
            forget_if_unused(value)


SCALED = ("QuantizeLinear", "DequantizeLinear")
"""Operators whose scale stays in float32, while what they read or write is half.

From opset 23 on a scale's type is its own, and `output_dtype` says what is written. Were scales float16, TensorRT for
RTX 1.7.1 would multiply both of a linear layer in float16 (a subnormal number, often), and write the sum of products
of 8 bits, before it is scaled, in float16 too, which ends at 65,504: seen in its layers and in the constants of a plan.
"""
_SCALE = 1
"""Place of the scale among their inputs."""
SMALL_BYTES = 1024
"""Up to this size a constant is converted at once, and stays in the graph file."""
