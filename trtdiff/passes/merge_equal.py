"""Nodes that compute the same become one.

1. Two nodes with the same operator, inputs and attributes become the first of them (common subexpressions). Not for
   random operators and those with subgraphs.

Exported graphs ask for the same dimension of the same tensor hundreds of times; this leaves one question each.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def merge_equal(model: "ir.Model") -> int:
    """Give the number of nodes that are gone."""
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass

    before = len(model.graph)
    CommonSubexpressionEliminationPass()(model)
    return before - len(model.graph)
