"""Weights computed from other weights when they are written, so that one tensor at a time is in memory."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trtdiff.types import Array

if TYPE_CHECKING:
    import onnx_ir as ir


def derived_weight(
    source: "ir.Value", name: str, compute: Callable[[Array], Array], *, dtype: "ir.DataType", shape: Sequence[int]
) -> "ir.Value":
    """Register an initializer beside `source` with elements `compute(elements of source)`, read when written."""
    import onnx_ir as ir

    tensor, graph = source.const_value, source.graph
    if tensor is None or not isinstance(graph, ir.Graph):
        raise ValueError(f"{source.name} is no initializer")

    def read() -> ir.TensorProtocol:
        array = compute(np.asarray(tensor.numpy()))
        if isinstance(tensor, ir.ExternalTensor):
            array = array.copy() if np.shares_memory(array, tensor.numpy()) else array
            tensor.release()  # lets go of the mapped file
        return ir.Tensor(array, name=name, dtype=dtype)

    value = ir.Value(
        name=name,
        shape=ir.Shape(shape),
        type=ir.TensorType(dtype),
        const_value=ir.LazyTensor(read, dtype=dtype, shape=ir.Shape(shape), name=name),
    )
    graph.register_initializer(value)
    return value


def forget_if_unused(value: "ir.Value") -> None:
    """Remove an initializer that nothing reads any more."""
    import onnx_ir as ir

    if isinstance(value.graph, ir.Graph) and not value.uses() and not value.is_graph_output():
        del value.graph.initializers[str(value.name)]
