"""Where the numbers that a layer reads are measured, and where they may be rounded.

A convolution or linear layer is measured at the very value that it reads. Query, key and value of an attention are
measured where they are made, before they are split into heads and turned: the numbers are the same, and the forms that
runtimes fuse (`cpu_forms`) stay whole.
"""

from typing import TYPE_CHECKING

from trtdiff.passes.layers import Layer

if TYPE_CHECKING:
    import onnx_ir as ir

REARRANGES = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators whose output is made of all elements of the first input, each once."""


def measured(layer: Layer, place: int) -> "ir.Value":
    """Give the value whose statistics are those of an input of a layer (`place` is one of `layer.activations`)."""
    value = layer.node.inputs[place]
    assert value is not None, "an input of a layer"  # noqa: S101 - `layers` gives no other
    return origin(value) if layer.operator == "attention" else value


def origin(value: "ir.Value") -> "ir.Value":
    """Go back over what only rearranges, to the value that holds the same numbers first."""
    while (before := _before(value)) is not None:
        value = before
    return value


def rearranged(value: "ir.Value") -> "list[ir.Node]":
    """Give the nodes between the origin of a value and it, in the order in which they run."""
    found: list[ir.Node] = []
    while (before := _before(value)) is not None:
        node = value.producer()
        assert node is not None, "what rearranges is a node"  # noqa: S101 - `_before` has seen it
        found.insert(0, node)
        value = before
    return found


def _before(value: "ir.Value") -> "ir.Value | None":
    node = value.producer()
    if node is None or node.domain or node.op_type not in REARRANGES:
        return None
    return node.inputs[0]
