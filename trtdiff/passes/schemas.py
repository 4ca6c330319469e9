"""What ONNX says about the types of an operator's inputs and outputs, in a form that is quick to ask.

A formal input or output has either one type by definition (`tensor(int64)`) or a *parameter* (`T`), for which a list
of types is allowed; all inputs and outputs of one parameter have one type.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from trtdiff.export.graph import MODULE

if TYPE_CHECKING:
    import onnx_ir as ir

FLOATS = ("FLOAT16", "BFLOAT16", "FLOAT", "DOUBLE")
"""Types of ordinary arithmetic; eight bits and fewer are storage, and change only where a graph says so."""


@dataclass(frozen=True)
class Formal:
    """One formal input or output; the last of a variadic list stands for all that follow."""

    name: str
    allowed: "frozenset[ir.DataType]"
    """Element types of tensors; empty where it is no tensor."""
    parameter: str
    """Name of the type parameter; empty where the type stands in the definition, or every value may have its own."""


@dataclass(frozen=True)
class Signature:
    """Types of one operator."""

    inputs: tuple[Formal, ...]
    outputs: tuple[Formal, ...]

    def input(self, place: int) -> Formal:
        """Give the formal input at a place."""
        return self.inputs[min(place, len(self.inputs) - 1)]

    def output(self, place: int) -> Formal:
        """Give the formal output at a place."""
        return self.outputs[min(place, len(self.outputs) - 1)]


def signature(node: "ir.Node", opsets: Mapping[str, int]) -> Signature | None:
    """Give the types of a node's operator, or None where ONNX does not define it (another domain, no opset)."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = node.version or opsets.get(domain) or opsets.get(domain or "ai.onnx")
    return None if version is None else _signature(node.op_type, version, domain)


def result_types(node: "ir.Node", opsets: Mapping[str, int]) -> "list[ir.DataType | None]":
    """Give the element type of every output as the types of the inputs, and the attributes, determine it.

    None where nothing does: an operator that ONNX does not define, or inputs of unknown type.
    """
    found = signature(node, opsets)
    if found is None:
        return [None] * len(node.outputs)
    bound: dict[str, ir.DataType] = {}
    for place, value in enumerate(node.inputs):
        if value is not None and value.dtype is not None and found.input(place).parameter:
            bound.setdefault(found.input(place).parameter, value.dtype)
    types: list[ir.DataType | None] = []
    for place in range(len(node.outputs)):
        formal = found.output(place)
        only = next(iter(formal.allowed)) if len(formal.allowed) == 1 else None
        types.append(bound.get(formal.parameter) or only or _by_attribute(node))
    if node.op_type in {"RandomNormalLike", "RandomUniformLike", "Bernoulli", "EyeLike"} and node.inputs[0] is not None:
        types[0] = types[0] or node.inputs[0].dtype
    if node.op_type == "DequantizeLinear" and types[0] is None and node.inputs[1] is not None:
        types[0] = node.inputs[1].dtype  # "if neither is given, that of x_scale", from opset 23
    return types


def attribute_names(node: "ir.Node", version: int) -> frozenset[str] | None:
    """Give the attributes that a node's operator has in an opset; None where that has it not, or deprecates it."""
    import onnx

    try:
        schema = onnx.defs.get_schema(node.op_type, version, node.domain)
    except onnx.defs.SchemaError:
        return None
    return None if schema.deprecated else frozenset(schema.attributes)


def describe(node: "ir.Node") -> str:
    """Give a node in words: operator, name, the PyTorch module it came from, and the types of its inputs."""
    module = node.metadata_props.get(MODULE, "")
    kinds = ", ".join("-" if value is None else f"{value.name}: {type_word(value.dtype)}" for value in node.inputs)
    words = (f"node {node.op_type} {node.name or ''}".rstrip(), module and f"module {module}", kinds)
    return "; ".join(word for word in words if word)


def type_word(dtype: "ir.DataType | None") -> str:
    """Name a type as numpy does."""
    return "unknown" if dtype is None else {"FLOAT": "float32", "DOUBLE": "float64"}.get(dtype.name, dtype.name.lower())


@cache
def _signature(operator: str, version: int, domain: str) -> Signature | None:
    import onnx

    try:
        schema = onnx.defs.get_schema(operator, version, domain)
    except onnx.defs.SchemaError:
        return None
    types = {entry.type_param_str: tuple(entry.allowed_type_strs) for entry in schema.type_constraints}
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic

    def formal(entry: "onnx.defs.OpSchema.FormalParameter") -> Formal:
        shared = entry.is_homogeneous or entry.option != variadic
        parameter = entry.type_str if shared and entry.type_str in types else ""
        return Formal(entry.name, _elements(types.get(entry.type_str, (entry.type_str,))), parameter)

    return Signature(tuple(map(formal, schema.inputs)), tuple(map(formal, schema.outputs)))


def _elements(words: tuple[str, ...]) -> "frozenset[ir.DataType]":
    """Read `tensor(float16)`; what is no tensor is left out."""
    import onnx_ir as ir

    names = [word[len("tensor(") : -1].upper() for word in words if word.startswith("tensor(")]
    return frozenset(ir.DataType[name] for name in names if name in ir.DataType.__members__)


def _by_attribute(node: "ir.Node") -> "ir.DataType | None":
    """Read the type that a node makes by itself: `to` of a Cast, the value of a Constant."""
    import onnx_ir as ir

    for name in ("to", "dtype", "output_dtype"):
        if name in node.attributes and node.attributes[name].as_int():
            return ir.DataType(node.attributes[name].as_int())
    if "value" in node.attributes:
        return node.attributes["value"].as_tensor().dtype
    kinds = {"value_float": "FLOAT", "value_floats": "FLOAT", "value_int": "INT64", "value_ints": "INT64",
             "value_string": "STRING", "value_strings": "STRING"}  # fmt: skip
    word = next((kind for name, kind in kinds.items() if name in node.attributes), "")
    if not word and node.op_type == "ConstantOfShape":
        word = "FLOAT"
    return ir.DataType[word] if word else None
