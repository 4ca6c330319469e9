"""What a graph pass is, and how several run until none finds anything more to do.

A pass is a function from a graph to the number of changes that it made to it. One pass a file; its docstring numbers
the rules, each with what it requires and ensures. No pass reads a weight: weights have no value while passes run, or
one that lies in a file (`small` says which values may be looked at). `mark_islands` alone reads the beginning of each,
far enough to see how large its numbers are, and `quantize` those of linear layers that it smooths.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from trtdiff.errors import ExportError
from trtdiff.types import Array

if TYPE_CHECKING:
    import onnx_ir as ir

Pass: TypeAlias = "Callable[[ir.Model], int]"  # noqa: S105 - a word, not a secret

SMALL = 16_384
"""Elements up to which a value may be computed or compared; embedded constants stay below 64 KB."""


def run_passes(model: "ir.Model", passes: Sequence[Pass], *, rounds: int = 10) -> dict[str, int]:
    """Run the passes in order, again and again until a round changes nothing; give the changes each pass made.

    After every pass that changed something the structure of the graph is checked; a traced graph has no types yet.
    Raises ExportError for a pass that fails, or leaves a broken graph, naming those that ran before it.
    """
    from trtdiff.passes.check_graph import check_structure

    changes: dict[str, int] = {}
    for _ in range(rounds):
        before = sum(changes.values())
        for run in passes:
            name = run.__name__
            try:
                made = run(model)
                changes[name] = changes.get(name, 0) + made
                if made:
                    check_structure(model)
            except Exception as error:  # a pass that meets a graph it was not written for may raise anything
                raise ExportError(
                    f"pass {name} failed: {error}", where=f"graph {model.graph.name}, after {', '.join(changes)}"
                ) from error
        if sum(changes.values()) == before:
            break
    return changes


def small(value: "ir.Value | None") -> Array | None:
    """Give the elements of a constant that may be looked at: held in memory and small."""
    import onnx_ir as ir

    tensor = None if value is None else value.const_value
    if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.size > SMALL:
        return None
    if not (value is not None and (value.is_initializer() or value.producer() is not None)):
        return None
    return tensor.numpy()


def replace(node: "ir.Node", value: "ir.Value") -> None:
    """Let everything that used the single output of a node use a value, and remove the node.

    Requires that the output is not an output of the graph.
    """
    import onnx_ir as ir

    (output,) = node.outputs
    if value.shape is None:
        value.shape = output.shape
    if value.type is None:
        value.type = output.type
    ir.convenience.replace_all_uses_with(output, value)
    graph = node.graph
    assert graph is not None, "a node of a graph"  # noqa: S101 - an invariant, not a check of input
    graph.remove(node, safe=True)


def add_constant(graph: "ir.Graph", array: Array, name: str) -> "ir.Value":
    """Register a new initializer that is held in memory."""
    import onnx_ir as ir

    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def shared_number(graph: "ir.Graph", number: float, dtype: "np.typing.DTypeLike" = np.float32) -> "ir.Value":
    """Give the one constant of a graph, without dimensions, that is this number of this type."""
    array = np.array(number, dtype)
    name = f"{array.dtype} {number!r}"
    return graph.initializers.get(name) or add_constant(graph, array, name)
