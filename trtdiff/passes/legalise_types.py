"""Write down the casts that PyTorch makes silently, so that every node type-checks.

PyTorch promotes mixed inputs (`float16 * float32`, `torch.cat` of both, a mask of another type) and exporters do not
always write that down; a pass that changes types may leave such mixtures too. ONNX allows none within one type
parameter, and TensorRT refuses them: it compiles strongly typed networks, in which nothing is converted unasked.

1. Inputs of one type parameter get one type: the one that PyTorch's promotion gives. Floats win over integers, these
   over booleans; float16 and bfloat16 become float32; a tensor without dimensions does not widen one with, within a
   category, unless it is a constant that the narrower type cannot hold.
2. An input whose type its operator does not take gets the next wider that it takes: `scales` of `Resize` and all of
   `Range` are float32 by definition, and `Resize` knows no bfloat16.
3. `Attention` wants equal types of query, key, value and a mask of numbers. ONNX gives value and mask type parameters
   of their own; TensorRT 1.7 for RTX parses such a node, and fails when it builds.
4. The types of outputs follow, through the whole graph; outputs of the graph are cast back to what they were.

TensorRT takes what ONNX takes beyond that: exponents of `Pow` in another type than the base, and int64. It has no
float64: its parser narrows that to float32 and clamps. All of it was tried with TensorRT for RTX 1.7.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trtdiff.errors import BuildError
from trtdiff.passes.base import small
from trtdiff.passes.casts import Casts
from trtdiff.passes.schemas import FLOATS, Formal, describe, result_types, signature, type_word

if TYPE_CHECKING:
    import onnx_ir as ir

TOGETHER: Mapping[str, tuple[str, ...]] = {"Attention": ("T1", "T2", "U")}
"""Operator → type parameters that share one float type."""
_CATEGORIES = (("BOOL",), ("INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64"), FLOATS)


def legalise_types(model: "ir.Model") -> None:
    """Insert the casts and follow the types, node by node in order.

    Requires sorted nodes, and types of inputs and initializers. Ensures the same inputs and outputs. Nodes of operators
    that ONNX does not define stay as they are. Raises BuildError for a node that takes no type an input can have.
    """
    _Legaliser(model).run()


def promoted(values: "Sequence[ir.Value]") -> "ir.DataType":
    """Give the type in which PyTorch would compute with these values; all have one.

    See PyTorch's page "Tensor Attributes" on type promotion: a value without dimensions counts only where its category
    is higher than that of all with dimensions.
    """
    full = [value for value in values if value.shape is None or len(value.shape)]
    scalars = [value for value in values if value not in set(full)]
    widest = _widest([value.dtype for value in full if value.dtype is not None])
    own = _widest([value.dtype for value in scalars if value.dtype is not None])
    if widest is None or own is None:
        found = own if widest is None else widest
        assert found is not None, "each has a type"  # noqa: S101 - an invariant, not a check of input
        return found
    if _category(own) > _category(widest):
        return own
    unfit = [value.dtype for value in scalars if value.dtype is not None and not _fits(value, widest)]
    return _widest([widest, *unfit]) or widest


class _Legaliser:
    """One graph on its way."""

    def __init__(self, model: "ir.Model") -> None:
        self._graph = model.graph
        self._opsets = model.opset_imports
        self._declared = [value.dtype for value in self._graph.outputs]
        self._casts = Casts(self._graph)

    def run(self) -> None:
        for node in list(self._graph):
            found = signature(node, self._opsets)
            if found is None:
                continue
            for places in self._groups(node):
                self._unify(node, places, found.input)
            for value, dtype in zip(node.outputs, result_types(node, self._opsets), strict=True):
                if dtype is not None:
                    value.dtype = dtype
        self._restore_outputs()

    def _groups(self, node: "ir.Node") -> list[list[int]]:
        """Give the places of inputs that must have one type; one of a definite type is alone."""
        found = signature(node, self._opsets)
        together = TOGETHER.get(node.op_type, ())
        groups: dict[str, list[int]] = {}
        for place, value in enumerate(node.inputs):
            if found is None or value is None or value.dtype is None:
                continue
            parameter = found.input(place).parameter or f"place {place}"
            if parameter in together and value.dtype.name in FLOATS:
                parameter = together[0]
            groups.setdefault(parameter, []).append(place)
        return list(groups.values())

    def _unify(self, node: "ir.Node", places: list[int], formal: Callable[[int], Formal]) -> None:
        values = [value for value in (node.inputs[place] for place in places) if value is not None]
        kinds = {value.dtype for value in values}
        if any(_category(kind) < 0 for kind in kinds):
            if len(kinds) > 1:
                raise BuildError(f"{', '.join(map(type_word, kinds))} have no common type", where=describe(node),
                                 hint="only a pass that quantizes can have made this; report it")  # fmt: skip
            return
        wanted = promoted(values)
        for place, value in zip(places, values, strict=True):
            dtype = self._taken(node, formal(place), wanted)
            if value.dtype != dtype:
                node.replace_input_with(place, self._casts.cast(value, dtype))

    def _taken(self, node: "ir.Node", formal: Formal, wanted: "ir.DataType") -> "ir.DataType":
        """Give the type itself where the operator takes it, else the next wider that it takes."""
        if not formal.allowed or wanted in formal.allowed:
            return wanted
        wider = _WIDER.get(wanted.name, ())
        found = next((dtype for word in wider for dtype in formal.allowed if dtype.name == word), None)
        if found is None:
            raise BuildError(
                f"{node.op_type} takes no {type_word(wanted)} as {formal.name}, and nothing wider",
                where=describe(node),
                hint="build in another precision; if it ought to work, please report the node"
            )  # fmt: skip
        return found

    def _restore_outputs(self) -> None:
        for place, declared in enumerate(self._declared):
            value = self._graph.outputs[place]
            if declared is not None and value.dtype != declared:
                name = str(value.name)
                made = self._casts.cast(value, declared)
                value.name, made.name = made.name, name
                self._graph.outputs[place] = made


_WIDER = {
    "FLOAT16": ("FLOAT", "DOUBLE"), "BFLOAT16": ("FLOAT", "DOUBLE"), "FLOAT": ("DOUBLE",),
    "INT32": ("INT64", "FLOAT"), "INT64": ("FLOAT",),
}  # fmt: skip
"""Type → those that replace it where an operator does not take it; PyTorch's roots of integers are float32."""


def _category(dtype: "ir.DataType | None") -> int:
    """Give 0 for booleans, 1 for integers, 2 for floats, -1 for what PyTorch does not promote."""
    name = "" if dtype is None else dtype.name
    return next((rank for rank, names in enumerate(_CATEGORIES) if name in names), -1)


def _widest(dtypes: "Sequence[ir.DataType]") -> "ir.DataType | None":
    import onnx_ir as ir

    if not dtypes:
        return None
    top = max(map(_category, dtypes))
    kinds = {dtype for dtype in dtypes if _category(dtype) == top}
    if {dtype.name for dtype in kinds} == {"FLOAT16", "BFLOAT16"}:
        return ir.DataType.FLOAT
    if top == 1:
        return ir.DataType.from_numpy(np.result_type(*(dtype.numpy() for dtype in kinds)))
    return max(kinds, key=lambda dtype: _CATEGORIES[top].index(dtype.name))


def _fits(value: "ir.Value", dtype: "ir.DataType") -> bool:
    """Whether a constant stays finite in a type; what is no constant is taken to."""
    array = small(value)
    if array is None or _category(dtype) < 2:
        return True
    wide = array.astype(np.float64)
    with np.errstate(over="ignore"):
        return bool(np.array_equal(np.isfinite(wide), np.isfinite(wide.astype(dtype.numpy()).astype(np.float64))))
