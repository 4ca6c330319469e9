"""Operators that only move numbers: each element of the output is an element of an input, bit for bit."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

ALL = (0, None)
_FIRST = (0, 1)

MOVERS: Mapping[str, tuple[int, int | None]] = {
    "Concat": ALL,
    "DepthToSpace": _FIRST,
    "Expand": _FIRST,
    "Flatten": _FIRST,
    "Gather": _FIRST,
    "GatherElements": _FIRST,
    "GatherND": _FIRST,
    "Identity": _FIRST,
    "Reshape": _FIRST,
    "Slice": _FIRST,
    "SpaceToDepth": _FIRST,
    "Split": _FIRST,
    "Squeeze": _FIRST,
    "Tile": _FIRST,
    "Transpose": _FIRST,
    "Unsqueeze": _FIRST,
    "Where": (1, 3),
}
"""Operator → its inputs from (and to, exclusively) that are moved; the others say where to."""


def moves(node: "ir.Node") -> bool:
    """Whether a node only moves numbers."""
    return not node.domain and node.op_type in MOVERS


def moved(node: "ir.Node") -> "Iterator[ir.Value]":
    """Give the inputs whose numbers a mover's outputs hold."""
    first, end = MOVERS[node.op_type]
    yield from (value for value in node.inputs[first:end] if value is not None)
