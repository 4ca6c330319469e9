"""Nodes that give back what they are given are removed.

1. `Identity`; `Concat` of one input; `Dropout` at inference (no training input, or a false one).
2. `Cast` to the type that the input has. Requires a known input type.
3. `Transpose` whose permutation is the identity.
4. `Slice` from 0 in steps of 1 over axes, to an end beyond every size (the exporter's "to the end").
5. `Reshape` and `Expand` whose output has the very dimensions of the input: numbers, or the same symbols.

An output of the graph keeps its name: such a node stays if its input is an input, an initializer or another output of
the graph, else the input takes the output's name. Ensures that names, types and shapes of the graph's ends stay.
"""

from typing import TYPE_CHECKING

import numpy as np

from trtdiff.passes.base import replace, small

if TYPE_CHECKING:
    import onnx_ir as ir

_TO_THE_END = 2**31 - 1


def drop_noops(model: "ir.Model") -> int:
    """Give the number of nodes that are gone."""
    import onnx_ir as ir

    dropped = 0
    for node in list(model.graph):
        if node.domain or not _is_noop(node):
            continue
        value, output = node.inputs[0], node.outputs[0]
        if value is None:
            continue
        if output.is_graph_output():
            if value.is_graph_input() or value.is_initializer() or value.is_graph_output():
                continue
            value.shape, value.type = output.shape, output.type
            ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
            name, output.name = output.name, None
            model.graph.remove(node, safe=True)
            value.name = name
        else:
            for extra in node.outputs[1:]:
                if extra.uses() or extra.is_graph_output():
                    break
            else:
                node.resize_outputs(1)
                replace(node, value)
                dropped += 1
            continue
        dropped += 1
    return dropped


def _is_noop(node: "ir.Node") -> bool:
    match node.op_type:
        case "Identity":
            return True
        case "Concat":
            return len(node.inputs) == 1
        case "Dropout":
            training = node.inputs[2] if len(node.inputs) > 2 else None
            mode = small(training)
            return training is None or (mode is not None and not mode.any())
        case "Cast":
            return node.inputs[0] is not None and node.inputs[0].dtype == node.attributes["to"].as_int()
        case "Transpose":
            perm = node.attributes.get("perm")
            return perm is not None and list(perm.as_ints()) == sorted(perm.as_ints())
        case "Slice":
            return _takes_all(node)
        case "Reshape" | "Expand":
            return _same_dims(node)
        case _:
            return False


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
