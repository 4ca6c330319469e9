"""Arithmetic with a neutral constant is removed: diffusers divides by an output scale of 1, adds a shift of 0.

1. `Mul` by 1, `Div` by 1, `Sub` of 0 give back their input.
2. `Add` of 0 likewise (it turns -0 into +0, which differ only to 1 / x).
3. `Pow` to 1.

Requires a constant of one element whose rank is at most the other input's, so that shape and type stay as they are.
"""

from typing import TYPE_CHECKING

from trtdiff.passes.base import replace, small

if TYPE_CHECKING:
    import onnx_ir as ir

NEUTRAL = {"Mul": 1, "Div": 1, "Add": 0, "Sub": 0, "Pow": 1}
_COMMUTES = {"Mul", "Add"}


def drop_neutral(model: "ir.Model") -> int:
    """Give the number of nodes that are gone."""
    dropped = 0
    for node in list(model.graph):
        if node.domain or node.op_type not in NEUTRAL or node.outputs[0].is_graph_output():
            continue
        kept = _other_input(node)
        if kept is not None:
            replace(node, kept)
            dropped += 1
    return dropped


def _other_input(node: "ir.Node") -> "ir.Value | None":
    """Give the input that the node gives back, or None."""
    first, second = node.inputs
    pairs = [(first, second), (second, first)] if node.op_type in _COMMUTES else [(first, second)]
    for value, constant in pairs:
        array = small(constant)
        if array is None or array.size != 1 or array.item() != NEUTRAL[node.op_type]:
            continue
        if value is not None and value.shape is not None and array.ndim <= len(value.shape):
            return value
    return None
