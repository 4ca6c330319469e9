"""Dimensions of a traced graph: the tracer's symbols are paired with the contract's names, and verified.

The tracer calls dimensions `s30`, and what it derives from them `((s30 - 1)//2) + 1`. Inputs pair symbols with names;
an output's expression must give the contract's dimension at two sizes; other values keep a short expression of names.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from trtdiff.errors import ExportError
from trtdiff.families.base import ComponentSpec
from trtdiff.types import Dim, TensorSpec

if TYPE_CHECKING:
    import onnx_ir as ir

_LONGEST_EXPRESSION = 40
_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_SYMBOL = re.compile(r"\b[su]\d+\b")


def name_dims(graph: "ir.Graph", spec: ComponentSpec) -> None:
    """Give symbolic dimensions the contract's names, and derived ones an expression of these or none.

    Raises ExportError where a dimension became a number, two became one, or an output's is not what the contract says.
    """
    symbols = _symbols(graph, spec)
    for value, tensor in zip(graph.outputs, spec.outputs, strict=True):
        _check_output(value, tensor, symbols, spec)
    for value in (out for node in graph for out in node.outputs):
        if value.shape is not None:
            value.shape = _renamed(value.shape, symbols)
    ends = [*zip(graph.inputs, spec.inputs, strict=True), *zip(graph.outputs, spec.outputs, strict=True)]
    for value, tensor in ends:
        value.shape = _shape(tensor)


def _symbols(graph: "ir.Graph", spec: ComponentSpec) -> dict[str, str]:
    """Pair the tracer's symbols with the contract's dimensions."""
    symbols: dict[str, str] = {}
    for value, tensor in zip(graph.inputs, spec.inputs, strict=True):
        found = [dim if isinstance(dim, int) else dim.value for dim in value.shape or ()]
        where = f"{spec.name}, input {tensor.name}"
        if len(found) != len(tensor.dims):
            raise ExportError(f"the graph has {len(found)} dimensions, the contract {len(tensor.dims)}", where=where)
        for got, wanted in zip(found, tensor.dims, strict=True):
            if isinstance(wanted, int) != isinstance(got, int) or (isinstance(got, int) and got != wanted):
                raise ExportError(f"dimension {wanted!r} became {got!r} in the trace", where=where,
                                  hint="some code of the model depends on this size; the graph would not")  # fmt: skip
            if isinstance(got, str) and isinstance(wanted, str) and symbols.setdefault(got, wanted) != wanted:
                raise ExportError(f"dimensions {wanted!r} and {symbols[got]!r} became the same", where=where)
    return symbols


def _renamed(shape: "ir.Shape", symbols: Mapping[str, str]) -> "ir.Shape":
    import onnx_ir as ir

    dims: list[int | str | None] = []
    for dim in shape:
        if isinstance(dim, int) or dim.value is None:
            dims.append(dim if isinstance(dim, int) else None)
            continue
        text = _SYMBOL.sub(partial(_word, symbols), dim.value)
        dims.append(text if "?" not in text and len(text) <= _LONGEST_EXPRESSION else None)
    return ir.Shape(dims)


def _word(symbols: Mapping[str, str], match: "re.Match[str]") -> str:
    return symbols.get(match[0], "?")


def _shape(tensor: TensorSpec) -> "ir.Shape":
    import onnx_ir as ir

    return ir.Shape(tensor.dims)


def _check_output(value: "ir.Value", tensor: TensorSpec, symbols: Mapping[str, str], spec: ComponentSpec) -> None:
    """Evaluate the tracer's expression of each output dimension at two sizes, and compare with the contract's."""
    where = f"{spec.name}, output {tensor.name}"
    found = [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape or ()]
    if len(found) != len(tensor.dims):
        raise ExportError(f"the graph has {len(found)} dimensions, the contract {len(tensor.dims)}", where=where)
    for got, wanted in zip(found, tensor.dims, strict=True):
        for factor in (3, 10):
            if _evaluate(got, symbols, factor) != _size(wanted, factor):
                raise ExportError(f"dimension {wanted!r} became {got!r} in the trace", where=where)


def _size(dim: Dim, factor: int) -> int:
    """Give a dimension where every size is the factor times its own number, a multiple of 64."""
    if isinstance(dim, int):
        return dim
    name, _, divisor = dim.partition("/")
    return 64 * factor * (sum(name.encode()) % 97 + 1) // int(divisor or 1)


def _evaluate(dim: Dim, symbols: Mapping[str, str], factor: int) -> int | None:
    if isinstance(dim, int):
        return dim

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Name) and node.id in symbols:
            return _size(symbols[node.id], factor)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError(ast.dump(node))

    try:
        return value(ast.parse(dim, mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None
