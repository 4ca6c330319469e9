"""What can be computed now is computed now: the arithmetic of shapes, and small constants such as timestep frequencies.

1. A node of `EVALUATE` whose inputs are all small constants becomes their value, computed with NumPy in the node's own
   type. Requires a result of at most `SMALL` elements.
2. `Shape` of a value whose asked dimensions are all numbers becomes these numbers.
3. `Gather`, `Slice` or `Squeeze` … of such numbers follow by rule 1.

Ensures that weights are neither read nor folded: they are not small constants.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from trtdiff.passes.base import SMALL, add_constant, replace, small
from trtdiff.types import Array

if TYPE_CHECKING:
    import onnx_ir as ir

Attributes = Mapping[str, Any]


def fold_constants(model: "ir.Model") -> int:
    """Give the number of nodes that became constants."""
    graph, folded = model.graph, 0
    for node in list(graph):
        if node.domain or len(node.outputs) != 1 or node.outputs[0].is_graph_output():
            continue
        array = _static_shape(node) if node.op_type == "Shape" else _evaluate(node)
        if array is None or array.size > SMALL:
            continue
        name = node.outputs[0].name or ""
        node.outputs[0].name = f"{name}.node"
        replace(node, add_constant(graph, array, name))
        folded += 1
    return folded


def _static_shape(node: "ir.Node") -> Array | None:
    value = node.inputs[0]
    if value is None or value.shape is None:
        return None
    attributes = _attributes(node)
    dims = list(value.shape)[attributes.get("start", 0) : attributes.get("end")]
    return np.array(dims, np.int64) if all(isinstance(dim, int) for dim in dims) else None


def _evaluate(node: "ir.Node") -> Array | None:
    compute = EVALUATE.get(node.op_type)
    if compute is None or (not node.inputs and node.op_type != "Constant"):
        return None
    arrays = [small(value) for value in node.inputs]
    given = [array for array in arrays if array is not None]
    if len(given) != len(arrays):
        return None
    try:
        return np.asarray(compute(given, _attributes(node)))
    except (ValueError, IndexError, TypeError, ZeroDivisionError):
        return None  # left for the runtime to judge


def _attributes(node: "ir.Node") -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


# --- operators: inputs and attributes → value, as the ONNX specification says ----------------------------------------


def _cast(inputs: list[Array], attributes: Attributes) -> Array:
    import onnx_ir as ir

    return inputs[0].astype(ir.DataType(attributes["to"]).numpy())


def _range(inputs: list[Array], _: Attributes) -> Array:
    start, limit, step = (array.item() for array in inputs)
    count = max(0, int(np.ceil((limit - start) / step)))
    if count > SMALL:
        raise ValueError(count)
    numbers: Array = start + np.arange(count, dtype=inputs[0].dtype) * np.asarray(step, inputs[0].dtype)
    return numbers.astype(inputs[0].dtype)


def _div(inputs: list[Array], _: Attributes) -> Array:
    a, b = inputs
    if np.issubdtype(a.dtype, np.integer):
        return np.trunc(np.divide(a, b)).astype(a.dtype) if np.any(a % b) else a // b
    return np.asarray(a / b)


def _reshape(inputs: list[Array], attributes: Attributes) -> Array:
    data, target = inputs
    shape = [int(n) for n in target]
    if not attributes.get("allowzero", 0):
        shape = [data.shape[i] if n == 0 else n for i, n in enumerate(shape)]
    return data.reshape(shape)


def _slice(inputs: list[Array], _: Attributes) -> Array:
    data: Array
    data, starts, ends = inputs[:3]
    axes = inputs[3] if len(inputs) > 3 else np.arange(len(starts))
    steps = inputs[4] if len(inputs) > 4 else np.ones(len(starts), np.int64)
    cut = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step <= 0:
            raise ValueError(step)
        cut[int(axis)] = slice(int(start), int(end), int(step))
    return data[tuple(cut)]


def _squeeze(inputs: list[Array], _: Attributes) -> Array:
    return np.squeeze(inputs[0], axis=tuple(int(axis) for axis in inputs[1]) if len(inputs) > 1 else None)


def _unsqueeze(inputs: list[Array], _: Attributes) -> Array:
    return np.expand_dims(inputs[0], tuple(int(axis) for axis in inputs[1]))


EVALUATE: Mapping[str, Callable[[list[Array], Attributes], Array]] = {
    "Add": lambda x, _: np.asarray(x[0] + x[1]),
    "Cast": _cast,
    "Concat": lambda x, a: np.concatenate(x, axis=a["axis"]),
    "Div": _div,
    "Equal": lambda x, _: np.asarray(x[0] == x[1]),
    "Exp": lambda x, _: np.exp(x[0]),
    "Gather": lambda x, a: np.take(x[0], x[1], axis=a.get("axis", 0)),
    "Mul": lambda x, _: np.asarray(x[0] * x[1]),
    "Neg": lambda x, _: np.asarray(-x[0]),
    "Pow": lambda x, _: np.asarray(x[0] ** x[1].astype(x[0].dtype)),
    "Range": _range,
    "Reciprocal": lambda x, _: np.reciprocal(x[0]),
    "Reshape": _reshape,
    "Slice": _slice,
    "Sqrt": lambda x, _: np.sqrt(x[0]),
    "Squeeze": _squeeze,
    "Sub": lambda x, _: np.asarray(x[0] - x[1]),
    "Unsqueeze": _unsqueeze,
    "Where": lambda x, _: np.where(x[0], x[1], x[2]),
}
"""Operators that are computed here; all keep the type of their first input but `Cast`, `Equal` and `Where`."""
