"""Questions about shapes are asked the short way.

1. `Reshape` to [-1], or `Unsqueeze` at 0, of `Squeeze` of a value with one element in one dimension is that value: the
   exporter makes each dimension a scalar and then a vector again.
2. `CastLike` a value of a known type is a `Cast` to that type.
3. `Transpose` of `Transpose` is one, of the composed permutation (which `drop_noops` removes where it is the identity).

Ensures equal values; the inner nodes stay where something else uses them.
"""

from typing import TYPE_CHECKING

from trtdiff.passes.base import replace, small

if TYPE_CHECKING:
    import onnx_ir as ir


def straighten_shapes(model: "ir.Model") -> int:
    """Give the number of nodes that are gone or simpler."""
    changed = 0
    for node in list(model.graph):
        if node.domain or node.outputs[0].is_graph_output():
            continue
        match node.op_type:
            case "Reshape" | "Unsqueeze":
                changed += _vector_of_scalar(node)
            case "CastLike":
                changed += _cast(node)
            case "Transpose":
                changed += _compose(node)
    return changed


def _vector_of_scalar(node: "ir.Node") -> int:
    scalar, wanted = node.inputs[0], small(node.inputs[1])
    squeeze = None if scalar is None else scalar.producer()
    if squeeze is None or squeeze.op_type != "Squeeze" or wanted is None:
        return 0
    if wanted.tolist() != ([-1] if node.op_type == "Reshape" else [0]):
        return 0
    vector = squeeze.inputs[0]
    if vector is None or not _one_element(vector):
        return 0
    replace(node, vector)
    return 1


def _one_element(value: "ir.Value") -> bool:
    """Whether a value is a vector of one element: by its shape, or as the `Shape` of one dimension."""
    if value.shape is not None:
        return list(value.shape) == [1]
    node = value.producer()
    if node is None or node.op_type != "Shape":
        return False
    start, end = node.attributes.get("start"), node.attributes.get("end")
    return start is not None and end is not None and end.as_int() - start.as_int() == 1 and start.as_int() >= 0


def _cast(node: "ir.Node") -> int:
    import onnx_ir as ir

    value, like = node.inputs
    if value is None or like is None or like.dtype is None:
        return 0
    cast = ir.node("Cast", [value], {"to": int(like.dtype)}, metadata_props=node.metadata_props)
    cast.outputs[0].shape, cast.outputs[0].dtype = value.shape, like.dtype
    cast.outputs[0].name = f"{node.outputs[0].name}.cast"
    model_graph = node.graph
    assert model_graph is not None, "a node of a graph"  # noqa: S101 - an invariant
    model_graph.insert_before(node, cast)
    replace(node, cast.outputs[0])
    return 1


def _compose(node: "ir.Node") -> int:
    import onnx_ir as ir

    value = node.inputs[0]
    inner = None if value is None else value.producer()
    if inner is None or inner.op_type != "Transpose" or "perm" not in node.attributes or "perm" not in inner.attributes:
        return 0
    outer, first = node.attributes["perm"].as_ints(), inner.attributes["perm"].as_ints()
    node.attributes["perm"] = ir.AttrInt64s("perm", [first[axis] for axis in outer])
    node.replace_input_with(0, inner.inputs[0])
    return 1
