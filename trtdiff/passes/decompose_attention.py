"""`Attention` where the target has no fused kernel for its type and head size → products and a softmax.

1. The query is scaled, and multiplied with the transposed key; scores are capped where `softcap` says so.
2. A Boolean mask and causality (query i sees key j ≤ i) become 0 and minus infinity, a mask of numbers is added.
3. A row that sees no key gives zeros, as the operator's definition has it, and not 0 / 0.
4. Heads of keys and values that several heads of queries share are repeated.

5. Scores of float16 cannot overflow. Each row of the query is divided by twice the sum of its magnitudes, so that its
   product with any key stays below float16's end, and with it every partial sum; the divisor comes back in float32,
   where caps, masks and the softmax are computed too. Heads of 512 whose queries and keys are about 60 have scores of
   80,000.

Rule 5 is needed because nothing before could see these scores: to the range scan and to `half_precision`, which come
first, attention is one node, whose fused kernels keep scores in float32. The product itself stays in float16, as
TensorRT for RTX 1.7 has no float32 products for Turing (sm75); so scores are as exact as float16 rounds them. bfloat16
ends where float32 does, and its scores stay in it.

With `softmax_precision` the softmax is computed in that type where it is a wider one. The scores are held whole: 64 by
64 latents take 4,096² · heads numbers an image. What a cache or further outputs would need is refused.
"""

from typing import TYPE_CHECKING

import numpy as np

from trtdiff.backends.attention import fuses
from trtdiff.errors import BuildError
from trtdiff.passes.schemas import describe, type_word
from trtdiff.passes.tape import Tape

if TYPE_CHECKING:
    import onnx_ir as ir

ALL = "all"
_Q, _K, _V, _MASK = range(4)
_LEAST = 2.0**-24
"""float16's smallest number: no row has a smaller sum of magnitudes, but one of zeros."""


def decompose_attention(model: "ir.Model", *, target: str) -> int:
    """Replace the nodes that `target` has no fused kernel for, all for `target=all`; give their number.

    Requires final types, and inputs [B, heads, tokens, head size] with known heads and head size. Ensures the same
    values up to rounding and the order of sums, and names of outputs. Raises BuildError for a node that needs to be
    decomposed and cannot be.
    """
    replaced = 0
    for node in list(model.graph):
        if node.op_type == "Attention" and not node.domain and not _fused(node, target):
            _decompose(node)
            replaced += 1
    return replaced


def _fused(node: "ir.Node", target: str) -> bool:
    sizes = [_dim(node, place, -1) for place in (_Q, _V)]
    query, mask = _input(node, _Q), _input(node, _MASK)
    if target == ALL or query is None:
        return False
    words = type_word(query.dtype), "" if mask is None else type_word(mask.dtype)
    return all(fuses(target, words[0], size, words[1]) for size in sizes)


def _decompose(node: "ir.Node") -> None:
    _require_plain(node)
    query, key, value = (node.inputs[place] for place in (_Q, _K, _V))
    assert query is not None, "required"  # noqa: S101 - the operator's definition
    assert key is not None, "required"  # noqa: S101
    assert value is not None, "required"  # noqa: S101
    tape, dtype = _Typed(_scores_type(query)), query.dtype
    repeats = _dim(node, _Q, 1) // _dim(node, _K, 1)
    if repeats > 1:
        key, value = (_repeated(tape, shared, repeats) for shared in (key, value))
    scores = _scores(node, tape, query, tape.op("Transpose", key, perm=[0, 1, 3, 2]))
    softcap = node.attributes["softcap"].as_float() if "softcap" in node.attributes else 0.0
    if softcap:
        cap = tape.number(softcap)
        scores = tape.op("Mul", cap, tape.op("Tanh", tape.op("Div", scores, cap)))
    bias = _bias(node, tape, query, key)
    if bias is not None:
        scores = tape.op("Add", scores, bias)
    weights = _softmax(node, tape, scores)
    if bias is not None and _input(node, _MASK) is not None:
        best = tape.op("ReduceMax", bias, tape.ints(-1))
        weights = tape.op("Where", tape.op("Equal", best, tape.number(-np.inf)), tape.number(0.0), weights)
    if tape.dtype != dtype and dtype is not None:
        weights = tape.op("Cast", weights, to=int(dtype))
    tape.put_instead_of(node, tape.op("MatMul", weights, value))


def _scores_type(query: "ir.Value") -> "ir.DataType":
    """Give the type of scores: the query's, but float32 for float16."""
    import onnx_ir as ir

    return ir.DataType.FLOAT if query.dtype in {None, ir.DataType.FLOAT16} else query.dtype


def _scores(node: "ir.Node", tape: "_Typed", query: "ir.Value", keys: "ir.Value") -> "ir.Value":
    """Multiply the scaled query with transposed keys."""
    factor = node.attributes["scale"].as_float() if "scale" in node.attributes else 0.0
    scale = tape.number(factor or _dim(node, _Q, -1) ** -0.5)
    half = query.dtype
    if half is None or half == tape.dtype:
        return tape.op("MatMul", tape.op("Mul", query, scale), keys)
    wide = tape.in_float32(query)
    total = tape.op("ReduceL1", wide, tape.ints(-1), keepdims=1)
    divisor = tape.op("Max", tape.op("Mul", total, tape.number(2.0)), tape.number(_LEAST))  # twice: room for rounding
    small = tape.op("Cast", tape.op("Div", wide, divisor), to=int(half))
    product = tape.op("Cast", tape.op("MatMul", small, keys), to=int(tape.dtype))
    return tape.op("Mul", product, tape.op("Mul", divisor, scale))


def _require_plain(node: "ir.Node") -> None:
    """Refuse what exports of diffusers have not: caches, other outputs, heads inside the last dimension."""
    query = node.inputs[_Q]
    problems = {
        "it has a cache": any(value is not None for value in node.inputs[4:]),
        "its scores are read": any(value.uses() or value.is_graph_output() for value in node.outputs[1:]),
        "its inputs have not 4 dimensions": query is None or query.shape is None or len(query.shape) != 4,
    }
    problem = next((words for words, found in problems.items() if found), "")
    if problem:
        raise BuildError(
            f"no fused kernel computes this attention, and it cannot be decomposed: {problem}", where=describe(node),
            hint="keep its module out of the islands, build in another precision, or for another target"
        )  # fmt: skip


def _repeated(tape: "_Typed", value: "ir.Value", times: int) -> "ir.Value":
    """[B, heads, …] → [B, heads · times, …], each head that often."""
    heads = int(value.shape[1]) if value.shape is not None else 0  # type: ignore[arg-type]  # `_dim` looked at it
    order = np.repeat(np.arange(heads), times)
    return tape.op("Gather", value, tape.ints(*order), axis=1)


def _bias(node: "ir.Node", tape: "_Typed", query: "ir.Value", key: "ir.Value") -> "ir.Value | None":
    """Give what is added to the scores: 0, minus infinity, or a mask's numbers."""
    import onnx_ir as ir

    mask = _input(node, _MASK)
    allowed = mask if mask is not None and mask.dtype == ir.DataType.BOOL else None
    if "is_causal" in node.attributes and node.attributes["is_causal"].as_int():
        rows, columns = (
            tape.op("Range", zero, tape.op("Squeeze", tape.op("Shape", value, start=2, end=3)), tape.integer(1))
            for value, zero in ((query, tape.integer(0)), (key, tape.integer(0)))
        )
        causal = tape.op("GreaterOrEqual", tape.op("Unsqueeze", rows, tape.ints(1)), columns)
        allowed = causal if allowed is None else tape.op("And", allowed, causal)
    bias = None if allowed is None else tape.op("Where", allowed, tape.number(0.0), tape.number(-np.inf))
    if mask is None or mask.dtype == ir.DataType.BOOL:
        return bias
    mask = mask if mask.dtype == tape.dtype else tape.op("Cast", mask, to=int(tape.dtype))
    return mask if bias is None else tape.op("Add", bias, mask)


def _softmax(node: "ir.Node", tape: "_Typed", scores: "ir.Value") -> "ir.Value":
    import onnx_ir as ir

    precise = node.attributes["softmax_precision"].as_int() if "softmax_precision" in node.attributes else 0
    if precise == tape.dtype or precise not in {ir.DataType.FLOAT, ir.DataType.DOUBLE}:
        return tape.op("Softmax", scores, axis=-1)
    wide = tape.op("Softmax", tape.op("Cast", scores, to=precise), axis=-1)
    return tape.op("Cast", wide, to=int(tape.dtype))


def _input(node: "ir.Node", place: int) -> "ir.Value | None":
    return node.inputs[place] if place < len(node.inputs) else None


def _dim(node: "ir.Node", place: int, axis: int) -> int:
    """Give a known dimension of an input."""
    value = node.inputs[place]
    shape = None if value is None else value.shape
    dim = None if shape is None or len(shape) != 4 else shape[axis]
    if not isinstance(dim, int):
        raise BuildError("heads and head size of this attention are not known", where=describe(node),
                         hint="export again; a canonical graph has them as numbers")  # fmt: skip
    return dim


class _Typed(Tape):
    """A tape whose numbers have one type."""

    def __init__(self, dtype: "ir.DataType") -> None:
        super().__init__()
        self.dtype = dtype

    def number(self, number: float) -> "ir.Value":
        """Add a constant without dimensions."""
        import onnx_ir as ir

        array = np.array(number).astype(self.dtype.numpy())
        return self.op("Constant", value=ir.Tensor(array, dtype=self.dtype))

    def integer(self, number: int) -> "ir.Value":
        """Add an int64 without dimensions."""
        return self.constant(np.array(number, np.int64))
