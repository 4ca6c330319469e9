"""Operators in the forms that ONNX Runtime's CPU kernels compute well: fast, in little memory, in full precision.

1. `Attention` without mask, cache or causality, between the usual transposes → `com.microsoft.MultiHeadAttention`,
   which never holds all scores at once. 2,048 tokens, 8 heads, 2 rows: 124 MB instead of 630 MB, 185 ms instead of 212.
2. `GroupNormalization` → `InstanceNormalization` over the groups, then scale and shift. The former has no kernel:
   ONNX Runtime expands it into the mean of squares less the squared mean, in float32, which cancels where the mean is
   large. Largest error at unit variance and mean 0, 10, 100, 1000: 8e-7, 5e-5, 2e-3, 5e-1; with this form 4e-7, 4e-6,
   2e-5, 2e-4, as PyTorch's. Faster too: 2 rows, 320 channels, 64 by 64: 7.3 ms instead of 15.6. (`LayerNormalization`
   would take 4.5 ms, but cancels like the expansion.)
3. `Gelu` → `com.microsoft.Gelu`: the same erf, vectorized. 2,048 by 1,280: 3.3 ms instead of 6.1.

Measured on one core of an AMD EPYC with ONNX Runtime 1.32.
"""

from typing import TYPE_CHECKING

from trtdiff.passes.group_norm import by_instance
from trtdiff.passes.tape import Tape

if TYPE_CHECKING:
    import onnx_ir as ir

MICROSOFT = "com.microsoft"


def cpu_forms(model: "ir.Model") -> None:
    """Apply the rules. Requires inferred shapes, without which a node stays as it is; keeps inputs and outputs.

    New nodes have the module of the one that they replace, and are named after it.
    """
    rules = {"Attention": _attention, "GroupNormalization": by_instance, "Gelu": _gelu}
    changed = False
    for node in list(model.graph):
        if node.domain == "" and node.op_type in rules:
            changed |= rules[node.op_type](node)
    if changed:
        from onnx_ir.passes.common import RemoveUnusedNodesPass

        model.graph.opset_imports[MICROSOFT] = 1
        RemoveUnusedNodesPass()(model)


def _attention(node: "ir.Node") -> bool:
    heads_last = [_before_transpose(value) for value in node.inputs[:3]]  # [B, tokens, heads, size] each
    query = node.inputs[0]
    plain = (
        all(value is None for value in node.inputs[3:])
        and all(not output.uses() and not output.is_graph_output() for output in node.outputs[1:])
        and not _int(node, "is_causal")
        and not _float(node, "softcap")
    )
    users = [use.node for use in node.outputs[0].uses()]
    turned = all(user.op_type == "Transpose" and _perm(user) == (0, 2, 1, 3) for user in users)
    shapes = [None if value is None else value.shape for value in node.inputs[:3]]
    if not plain or not turned or not users or query is None or node.outputs[0].is_graph_output():
        return False
    if any(value is None for value in heads_last) or any(shape is None or len(shape) != 4 for shape in shapes):
        return False
    known = [[shape[axis] for shape in shapes if shape is not None] for axis in (1, 3)]
    heads, size = ([dim for dim in dims if isinstance(dim, int)] for dims in known)
    if len(size) != 3 or len(heads) != 3 or len(set(heads)) != 1:
        return False  # grouped heads, or numbers that are not known
    tape = Tape()
    flat = [tape.op("Reshape", value, tape.ints(0, 0, -1)) for value in heads_last if value is not None]
    scale = _float(node, "scale") or float(size[0]) ** -0.5
    joined = tape.op("MultiHeadAttention", *flat, domain=MICROSOFT, num_heads=heads[0], scale=scale)
    result = tape.op("Reshape", joined, tape.ints(0, 0, heads[0], size[2]))
    for user in users:
        _replace(user, result)
    tape.put_before(node)
    tape.name_after(node)
    for user in users:
        _remove(user)
    _remove(node)
    return True


def _gelu(node: "ir.Node") -> bool:
    approximate = node.attributes.get("approximate")
    value = node.inputs[0]
    if value is None or (approximate is not None and approximate.as_string() != "none"):
        return False
    tape = Tape()
    tape.put_instead_of(node, tape.op("Gelu", value, domain=MICROSOFT))
    return True


# --- helpers ---------------------------------------------------------------------------------------------------------


def _before_transpose(value: "ir.Value | None") -> "ir.Value | None":
    """Give what a transpose of heads and tokens was made from."""
    node = None if value is None else value.producer()
    return node.inputs[0] if node is not None and node.op_type == "Transpose" and _perm(node) == (0, 2, 1, 3) else None


def _perm(node: "ir.Node") -> tuple[int, ...]:
    return tuple(node.attributes["perm"].as_ints()) if "perm" in node.attributes else ()


def _int(node: "ir.Node", name: str) -> int:
    return node.attributes[name].as_int() if name in node.attributes else 0


def _float(node: "ir.Node", name: str) -> float:
    return node.attributes[name].as_float() if name in node.attributes else 0.0


def _replace(node: "ir.Node", result: "ir.Value") -> None:
    """Let `result` be read, and be named and shaped, as the only used output of `node` was."""
    import onnx_ir as ir

    output = node.outputs[0]
    result.shape, result.type = output.shape, output.type
    ir.convenience.replace_all_uses_with(output, result, replace_graph_outputs=True)


def _remove(node: "ir.Node") -> None:
    if node.graph is not None:
        node.graph.remove(node, safe=True)
