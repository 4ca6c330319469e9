"""What nothing uses is removed.

1. Nodes whose outputs are neither used nor outputs of the graph; initializers likewise.
2. Unused trailing outputs that are optional (`Attention`'s present keys and scores).
3. Functions that no node calls, and imports of operator sets that none belongs to.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def remove_unused(model: "ir.Model") -> int:
    """Give the number of nodes and initializers that are gone."""
    from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

    before = len(model.graph) + len(model.graph.initializers)
    RemoveUnusedNodesPass()(model)
    RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    RemoveUnusedOpsetsPass()(model)
    return before - len(model.graph) - len(model.graph.initializers)
