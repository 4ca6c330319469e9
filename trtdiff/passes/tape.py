"""New nodes for a graph, written down in order and put in together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trtdiff.passes.schemas import result_types
from trtdiff.types import Array

if TYPE_CHECKING:
    import onnx_ir as ir


class Tape:
    """Collects nodes; `put_first`, `put_last`, `put_at` or `put_before` inserts them, and types what they make."""

    def __init__(self) -> None:
        self._nodes: list[ir.Node] = []

    def op(
        self, kind: str, *inputs: "ir.Value", domain: str = "", output: "ir.Value | None" = None, **attributes: Any
    ) -> "ir.Value":
        """Add a node of one output and give that output."""
        import onnx_ir as ir

        outputs: dict[str, Any] = {"num_outputs": 1} if output is None else {"outputs": [output]}
        node = ir.node(kind, inputs, attributes, domain=domain, **outputs)
        self._nodes.append(node)
        return node.outputs[0]

    def like(self, node: "ir.Node", inputs: "Sequence[ir.Value | None]") -> "ir.Value":
        """Add a node of one output that does to other inputs what a node does, and give that output."""
        import onnx_ir as ir

        made = ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), num_outputs=1)
        self._nodes.append(made)
        return made.outputs[0]

    def constant(self, array: Array) -> "ir.Value":
        """Add a constant."""
        import onnx_ir as ir

        return self.op("Constant", value=ir.tensor(array))

    def number(self, number: float) -> "ir.Value":
        """Add a float32 constant without dimensions."""
        return self.constant(np.array(number, np.float32))

    def ints(self, *numbers: int) -> "ir.Value":
        """Add a constant vector of int64: a shape, axes."""
        return self.constant(np.array(numbers, np.int64))

    def in_float32(self, value: "ir.Value") -> "ir.Value":
        """Cast where the value is not float32 already."""
        import onnx_ir as ir

        return value if value.dtype == ir.DataType.FLOAT else self.op("Cast", value, to=int(ir.DataType.FLOAT))

    def stacked(
        self, values: "Sequence[ir.Value]", dtype: "ir.DataType", output: "ir.Value | None" = None
    ) -> "ir.Value":
        """Lay values of one shape and type side by side; a sequence does it by one node, `Concat` by a `Reshape` each.

        Types are set where nothing else would write them down.
        """
        import onnx_ir as ir

        sequence = self.op("SequenceConstruct", *values)
        sequence.type = ir.SequenceType(ir.TensorType(dtype))
        made = self.op("ConcatFromSequence", sequence, output=output, axis=0, new_axis=1)
        made.type = ir.TensorType(dtype)
        return made

    def put_first(self, graph: "ir.Graph") -> None:
        """Insert in front of everything."""
        if len(graph):
            graph.insert_before(graph[0], self._nodes)
        else:
            graph.extend(self._nodes)
        self._type(graph)

    def put_last(self, graph: "ir.Graph") -> None:
        """Insert behind everything."""
        graph.extend(self._nodes)
        self._type(graph)

    def put_at(self, graph: "ir.Graph", value: "ir.Value") -> None:
        """Insert where a value is made: right behind its node, or in front of everything for an input of the graph."""
        node = value.producer()
        if node is None:
            self.put_first(graph)
            return
        graph.insert_after(node, self._nodes)
        self._type(graph)

    def put_before(self, node: "ir.Node") -> None:
        """Insert in front of a node."""
        import onnx_ir as ir

        if not isinstance(node.graph, ir.Graph):
            raise TypeError("the node is in no graph")
        node.graph.insert_before(node, self._nodes)
        self._type(node.graph)

    def put_instead_of(self, node: "ir.Node", result: "ir.Value") -> None:
        """Replace a node of one used output; `result` takes over its readers, name, type and place among outputs."""
        import onnx_ir as ir

        output, graph = node.outputs[0], node.graph
        result.shape, result.type = output.shape, output.type
        ir.convenience.replace_all_uses_with(output, result, replace_graph_outputs=True)
        self.put_before(node)
        self.name_after(node)
        name, output.name = output.name, None
        assert graph is not None, "a node of a graph"  # noqa: S101 - `put_before` has checked it
        graph.remove(node, safe=True)
        result.name = name

    def name_after(self, node: "ir.Node") -> None:
        """Name nodes and values for the node that they replace, and give them its module and mark."""
        self.name_all(str(node.name), node.metadata_props)

    def name_all(self, stem: str, metadata: "Mapping[str, str]") -> None:
        """Name nodes and values `stem/Operator`, and give them the metadata."""
        taken: Counter[str] = Counter()
        for made in self._nodes:
            made.name = f"{stem}/{made.op_type}"
            taken[made.name] += 1
            if taken[made.name] > 1:
                made.name = f"{made.name}_{taken[made.name]}"
            made.metadata_props.update(metadata)
            for value in made.outputs:
                if not value.is_graph_output():
                    value.name = made.name

    def _type(self, graph: "ir.Graph") -> None:
        """Type new values; one of an operator that ONNX does not define has the type of its first input."""
        for node in self._nodes:
            for value, dtype in zip(node.outputs, result_types(node, graph.opset_imports), strict=True):
                first = node.inputs[0] if node.domain and node.inputs else None
                known = dtype if first is None else first.dtype
                if value.dtype is None and known is not None:
                    value.dtype = known
