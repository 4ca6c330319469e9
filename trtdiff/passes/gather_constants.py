"""Constants become initializers, each value once.

1. A `Constant` node becomes an initializer. Requires that its output is not an output of the graph.
2. Initializers held in memory with equal type, shape and bytes become one. Requires at most `SMALL` elements.

Ensures that no `Constant` node is left outside of subgraphs. Names are `const_<n>`, counted in the graph's order.
"""

from typing import TYPE_CHECKING

from trtdiff.passes.base import add_constant, replace, small
from trtdiff.types import Array

if TYPE_CHECKING:
    import onnx_ir as ir

_Key = tuple[str, tuple[int, ...], bytes]


def gather_constants(model: "ir.Model") -> int:
    """Give the number of nodes and initializers that are gone."""
    import onnx_ir as ir

    graph = model.graph
    known: dict[_Key, ir.Value] = {}
    gone = 0
    for name, value in list(graph.initializers.items()):
        array = small(value)
        if array is None or value.is_graph_output():
            continue
        first = known.setdefault(_key(array), value)
        if first is not value:
            ir.convenience.replace_all_uses_with(value, first)
            del graph.initializers[name]
            gone += 1
    number = len(graph.initializers)
    for node in list(graph):
        if node.op_type != "Constant" or node.domain or node.outputs[0].is_graph_output():
            continue
        tensor = ir.convenience.get_const_tensor(node.outputs[0])
        if tensor is None:
            continue
        array = tensor.numpy()
        key = _key(array)
        if key not in known:
            while (name := f"const_{number}") in graph.initializers:
                number += 1
            known[key] = add_constant(graph, array, name)
        replace(node, known[key])
        gone += 1
    return gone


def _key(array: Array) -> _Key:
    return (str(array.dtype), array.shape, array.tobytes())
