"""How many multiply-adds each node of an ONNX file takes at one size of its symbolic dimensions.

Shapes are worked out node by node, in order, with ONNX's own inference. What it needs besides are the values of small
constants: axes, and the shapes that a graph computes (the target of a `Reshape`), which are executed as they come. A
node whose shapes do not follow is left out, so that nobody takes a part for the whole.
"""

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from trtdiff.types import dim_value

if TYPE_CHECKING:
    import onnx

PRODUCTS = ("Attention", "Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators that multiply matrices: convolutions, products and attention."""
_SMALL = 64
"""Elements up to which a value is worked out: shapes, axes, scales of a resize."""
_AS_ITS_INPUT = frozenset({"GroupNormalization"})
"""Operators that ONNX defines by others, whose shapes its inference does not find: their output is as their input."""


def multiply_adds(model: "onnx.ModelProto", sizes: Mapping[str, int]) -> dict[str, int]:
    """Count by node name; nodes of one name together. Nodes that do not multiply, and unknown ones, are left out.

    `sizes` has one size for every symbolic dimension of the inputs; `model` may be without its weights.
    """
    found: dict[str, int] = {}
    shapes = _Shapes(model, sizes)
    for node in model.graph.node:
        shapes.follow(node)
        if node.op_type in PRODUCTS and not node.domain:
            count = _count(node, [shapes.of(name) for name in node.input], shapes.of(node.output[0]))
            if count is not None:
                found[node.name] = found.get(node.name, 0) + count
    return found


def _count(node: "onnx.NodeProto", inputs: list[tuple[int, ...]], output: tuple[int, ...]) -> int | None:
    """Count one node's from its shapes; None where one is not known."""
    first, second = inputs[:2]
    needed = [first, second, output, *(inputs[2:3] if node.op_type == "Attention" else ())]
    if not all(shape and all(shape) for shape in needed):
        return None
    if node.op_type == "Conv":  # weights [out, in of one group, …]
        return prod(output) * prod(second[1:])
    if node.op_type == "ConvTranspose":  # weights [in, out of one group, …]
        return prod(first) * prod(second[1:])
    if node.op_type == "Attention":  # [B, heads, tokens, size]; keys and values may have fewer heads
        if not len(first) == len(second) == len(inputs[2]) == 4:
            return None
        return prod(first[:3]) * second[2] * (first[3] + inputs[2][3])
    turned = node.op_type == "Gemm" and any(item.name == "transA" and item.i for item in node.attribute)
    return prod(output) * (first[0] if turned else first[-1])


class _Shapes:
    """Shapes and small values of the tensors met so far."""

    def __init__(self, model: "onnx.ModelProto", sizes: Mapping[str, int]) -> None:
        from onnx import helper

        self._opsets, self._ir_version = list(model.opset_import), model.ir_version
        self._versions = {item.domain: item.version for item in model.opset_import}
        self._types: dict[str, onnx.TypeProto] = {}
        self._values: dict[str, onnx.TensorProto] = {}
        for weight in model.graph.initializer:
            self._types[weight.name] = helper.make_tensor_type_proto(weight.data_type, weight.dims)
            if prod(weight.dims) <= _SMALL and not weight.external_data:
                self._values[weight.name] = weight
        for value in model.graph.input:
            tensor = value.type.tensor_type
            dims = [
                dim_value(dim.dim_param or dim.dim_value, sizes, where=f"input {value.name}")
                for dim in tensor.shape.dim
            ]
            self._types[value.name] = helper.make_tensor_type_proto(tensor.elem_type, dims)

    def of(self, name: str) -> tuple[int, ...]:
        """Give a shape; a dimension that is not known is 0, and of an unknown tensor there are none."""
        found = self._types.get(name)
        return () if found is None else tuple(dim.dim_value for dim in found.tensor_type.shape.dim)

    def follow(self, node: "onnx.NodeProto") -> None:
        """Work out what a node makes, as far as it follows from what it reads."""
        if node.op_type in _AS_ITS_INPUT and node.input[0] in self._types:
            self._types[node.output[0]] = self._types[node.input[0]]
            return
        read = [name for name in node.input if name]
        if not all(name in self._types for name in read):
            return
        try:
            self._types |= {name: made for name, made in self._inferred(node, read).items() if _is_known(made)}
            self._compute(node, read)
        except Exception:  # noqa: BLE001 - inference refuses in classes of its own; what is not known is left out
            return

    def _inferred(self, node: "onnx.NodeProto", read: list[str]) -> Mapping[str, Any]:
        from onnx import defs, shape_inference

        schema = defs.get_schema(node.op_type, self._versions[node.domain], node.domain)
        types = {name: self._types[name] for name in read}
        values = {name: self._values[name] for name in read if name in self._values}
        made: Mapping[str, Any] = shape_inference.infer_node_outputs(
            schema, node, types, values, opset_imports=self._opsets, ir_version=self._ir_version
        )
        return made

    def _compute(self, node: "onnx.NodeProto", read: list[str]) -> None:
        """Execute a node that makes a small value out of small values, or out of a shape."""
        import numpy as np
        from onnx import numpy_helper
        from onnx.reference import ReferenceEvaluator

        shape = self.of(node.output[0])
        if len(node.output) != 1 or node.output[0] not in self._types or prod(shape) > _SMALL:
            return
        if node.op_type == "Shape":
            ends = {str(item.name): item.i for item in node.attribute}
            dims = self.of(node.input[0])[ends.get("start") : ends.get("end")]
            self._values[node.output[0]] = numpy_helper.from_array(np.array(dims, np.int64))
        elif all(name in self._values for name in read):
            feeds = {name: numpy_helper.to_array(self._values[name]) for name in read}
            (made,) = ReferenceEvaluator(node).run(None, feeds)
            self._values[node.output[0]] = numpy_helper.from_array(np.asarray(made))


def _is_known(made: "onnx.TypeProto") -> bool:
    """Whether every dimension is a number."""
    tensor = made.tensor_type
    return tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)
