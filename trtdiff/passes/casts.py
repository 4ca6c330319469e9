"""One `Cast` right behind where a value comes from, for all who want the value in that type."""

from typing import TYPE_CHECKING

from trtdiff.passes.schemas import type_word

if TYPE_CHECKING:
    import onnx_ir as ir


class Casts:
    """Writes the casts of one graph: each once, under a name that nothing else has."""

    def __init__(self, graph: "ir.Graph") -> None:
        self._graph = graph
        self._made: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self._names = {str(value.name) for value in (*graph.inputs, *graph.initializers.values())}
        for node in graph:
            self._names.update((str(node.name), *(str(value.name) for value in node.outputs)))

    def cast(self, value: "ir.Value", to: "ir.DataType") -> "ir.Value":
        """Give the value in a type. The node has the metadata of the one that makes the value."""
        import onnx_ir as ir

        if (value, to) in self._made:
            return self._made[value, to]
        name = self.unused(f"{value.name}/{type_word(to)}")
        node = ir.node("Cast", [value], {"to": int(to)}, name=name)
        made = node.outputs[0]
        made.name, made.shape, made.type = name, value.shape, ir.TensorType(to)
        producer = value.producer()
        if producer is not None:
            node.metadata_props.update(producer.metadata_props)
            self._graph.insert_after(producer, node)
        elif len(self._graph):
            self._graph.insert_before(self._graph[0], node)
        else:
            self._graph.append(node)
        self._made[value, to] = made
        return made

    def unused(self, name: str) -> str:
        """Give the name, lengthened where it is taken; it is taken from now on."""
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name
