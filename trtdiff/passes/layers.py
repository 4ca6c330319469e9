"""The layers of a canonical graph that multiply: convolutions, linear layers, and the products of attention.

They are where 8 bits pay. Each is found with the inputs that are activations, the stored weight behind its `Cast` and
`Transpose`, the size of its sums, and the PyTorch module it came from.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias

from trtdiff.export.graph import MODULE
from trtdiff.passes.mark_islands import stored_weight

if TYPE_CHECKING:
    import onnx_ir as ir

Operator: TypeAlias = Literal["conv", "linear", "attention"]


@dataclass(frozen=True)
class Layer:
    """One node that multiplies."""

    node: "ir.Node"
    operator: Operator
    activations: tuple[int, ...]
    """Places of the inputs that come from the data: 0; of attention query, key and value."""
    weight: "ir.Value | None" = None
    """The initializer, [out, in, …] as PyTorch stores it; none for attention."""
    inner: int = 0
    """Terms of each sum (K): in features, or channels of a group times kernel size; of attention its head size."""
    outer: int = 0
    """Output features or channels (N); of attention its head size."""

    @property
    def module(self) -> str:
        """Path of the PyTorch module; empty where the graph does not say."""
        return self.node.metadata_props.get(MODULE, "")

    @property
    def name(self) -> str:
        """Name of the node."""
        return str(self.node.name)


def layers(graph: "ir.Graph") -> Iterator[Layer]:
    """Give the layers in the order of the graph.

    Requires the canonical graph, weights through at most one `Cast` and one `Transpose`. A product of two activations
    outside of an `Attention` is no layer of these.
    """
    for node in graph:
        if node.domain:
            continue
        if node.op_type == "Conv":
            weight = _weight(node.inputs[1])
            if weight is not None:
                out, *sums = _sizes(weight)
                yield Layer(node, "conv", (0,), weight, prod(sums), out)
        elif node.op_type == "MatMul" or (node.op_type == "Gemm" and _plain(node)):
            weight = _weight(node.inputs[1])
            if weight is not None and len(_sizes(weight)) == 2:
                out, sums_ = _sizes(weight)
                yield Layer(node, "linear", (0,), weight, sums_, out)
        elif node.op_type == "Attention":
            head = _head(node)
            yield Layer(node, "attention", (0, 1, 2), None, head, head)


def _weight(value: "ir.Value | None") -> "ir.Value | None":
    """Find the initializer [out, in, …] that a layer multiplies with."""
    if value is None:
        return None
    consumers_turn = value.uses()
    producer = value.producer()
    turned = False
    if producer is not None and producer.op_type == "Transpose":
        turned = True
        value = producer.inputs[0]
        producer = None if value is None else value.producer()
    if producer is not None and stored_weight(producer):
        value = producer.inputs[0]
    if value is None or not value.is_initializer() or value.const_value is None:
        return None
    matmul = all(use.node.op_type == "MatMul" for use in consumers_turn)
    return value if turned == matmul else None


def _plain(node: "ir.Node") -> bool:
    """Whether a Gemm is a linear layer: x · Wᵀ + b."""
    number = {name: node.attributes[name].value for name in node.attributes}
    return (
        bool(number.get("transB", 0))
        and not number.get("transA", 0)
        and number.get("alpha", 1.0) == 1.0
        and number.get("beta", 1.0) == 1.0
    )


def _sizes(weight: "ir.Value") -> tuple[int, ...]:
    assert weight.const_value is not None, "an initializer"  # noqa: S101 - `_weight` looked at it
    return tuple(int(size) for size in weight.const_value.shape.numpy())


def _head(node: "ir.Node") -> int:
    """Head size of an attention on [B, heads, tokens, size]; 0 where the graph does not say."""
    query = node.inputs[0]
    shape = None if query is None else query.shape
    size = None if shape is None or len(shape) != 4 else shape[-1]
    return size if isinstance(size, int) else 0
