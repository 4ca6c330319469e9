"""Nodes that give back what they are given are removed.

1. `Identity`; `Concat` of one input; `Dropout` at inference (no training input, or a false one).
2. `Cast` to the type that the input has. Requires a known input type.
3. `Transpose` whose permutation is the identity.
4. `Slice` from 0 in steps of 1 over axes, to an end beyond every size (the exporter's "to the end").
5. `Reshape` and `Expand` whose output has the very dimensions of the input: numbers, or the same symbols.

An output of the graph keeps its name: such a node stays if its input is an input, an initializer or another output of
the graph, else the input takes the output's name. Ensures that names, types and shapes of the graph's ends stay.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from trtdiff.passes.base import replace, small

if TYPE_CHECKING:
    import onnx_ir as ir

_TO_THE_END = 2**31 - 1


def drop_noops(model: "ir.Model") -> int:
    """Give the number of nodes that are gone."""
    dropped = 0
    for node in list(model.graph):
        if node.domain or not _is_noop(node):
            continue
        value, output = node.inputs[0], node.outputs[0]
        if value is None:
            continue
        if any(extra.uses() or extra.is_graph_output() for extra in node.outputs[1:]):
            continue
        node.resize_outputs(1)
        if not output.is_graph_output():
            replace(node, value)
        elif value.is_graph_input() or value.is_initializer() or value.is_graph_output():
            continue
        else:
            _become_output(value, node)
        dropped += 1
    return dropped


def _become_output(value: "ir.Value", node: "ir.Node") -> None:
    """Let a value take over name and place of the output that the node made of it."""
    import onnx_ir as ir

    (output,), graph = node.outputs, node.graph
    assert graph is not None, "a node of a graph"  # noqa: S101 - an invariant
    value.shape, value.type = output.shape, output.type
    ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
    name, output.name = output.name, None
    graph.remove(node, safe=True)
    value.name = name


def _is_noop(node: "ir.Node") -> bool:
    rule = RULES.get(node.op_type)
    return rule is not None and rule(node)


def _is_inference(node: "ir.Node") -> bool:
    training = node.inputs[2] if len(node.inputs) > 2 else None
    mode = small(training)
    return training is None or (mode is not None and not mode.any())


def _keeps_type(node: "ir.Node") -> bool:
    return node.inputs[0] is not None and node.inputs[0].dtype == node.attributes["to"].as_int()


def _keeps_order(node: "ir.Node") -> bool:
    perm = node.attributes.get("perm")
    return perm is not None and list(perm.as_ints()) == sorted(perm.as_ints())


def _takes_all(node: "ir.Node") -> bool:
    starts, ends = small(node.inputs[1]), small(node.inputs[2])
    steps = small(node.inputs[4]) if len(node.inputs) > 4 else np.ones(1)
    if starts is None or ends is None or steps is None:
        return False
    return not starts.any() and bool((ends >= _TO_THE_END).all()) and bool((steps == 1).all())


def _same_dims(node: "ir.Node") -> bool:
    value, output = node.inputs[0], node.outputs[0]
    if value is None or value.shape is None or output.shape is None:
        return False
    before, after = list(value.shape), list(output.shape)
    known = all(isinstance(dim, int) or dim.value is not None for dim in before)
    return known and before == after


RULES: "Mapping[str, Callable[[ir.Node], bool]]" = {
    "Identity": lambda _: True,
    "Concat": lambda node: len(node.inputs) == 1,
    "Dropout": _is_inference,
    "Cast": _keeps_type,
    "Transpose": _keeps_order,
    "Slice": _takes_all,
    "Reshape": _same_dims,
    "Expand": _same_dims,
}
"""Operator → whether such a node gives back its first input."""
