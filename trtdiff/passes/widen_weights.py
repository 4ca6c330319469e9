"""Store weights in float32 where the graph computes in float32.

A canonical graph keeps each weight in the checkpoint's type and widens it with a `Cast` in front of its use. A runtime
that executes the graph as it stands would do that again on every start, and hold both copies; so the cast is done here,
once, when the tensor is written: `lowered.write_graph` asks for one tensor at a time.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir


def widen_weights(model: "ir.Model") -> None:
    """Replace `initializer → Cast(to=FLOAT)` by a float32 initializer.

    Requires nothing. Ensures that no Cast to float32 reads a float16 or bfloat16 initializer; the values are the same,
    since every number of those types is a float32 number. An initializer that something else reads too stays as it was.
    """
    import onnx_ir as ir

    graph = model.graph
    for value in list(graph.initializers.values()):
        if value.dtype not in {ir.DataType.FLOAT16, ir.DataType.BFLOAT16} or value.const_value is None:
            continue
        casts = [
            node
            for node in value.consumers()
            if node.op_type == "Cast" and node.graph is graph and node.attributes["to"].as_int() == ir.DataType.FLOAT
        ]
        if not casts:
            continue
        wide = ir.Value(
            name=f"{value.name}.float32",
            shape=ir.Shape(value.const_value.shape.numpy()),
            type=ir.TensorType(ir.DataType.FLOAT),
            const_value=_widened(value.const_value, f"{value.name}.float32"),
        )
        graph.register_initializer(wide)
        for cast in casts:
            ir.convenience.replace_all_uses_with(cast.outputs[0], wide, replace_graph_outputs=True)
            graph.remove(cast, safe=True)
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[str(value.name)]


def _widened(narrow: "ir.TensorProtocol", name: str) -> "ir.LazyTensor":
    import onnx_ir as ir

    def read() -> ir.TensorProtocol:
        array = np.asarray(narrow.numpy()).astype(np.float32)
        if isinstance(narrow, ir.ExternalTensor):
            narrow.release()  # lets go of the mapped file
        return ir.Tensor(array, name=name)

    return ir.LazyTensor(read, dtype=ir.DataType.FLOAT, shape=ir.Shape(narrow.shape.numpy()), name=name)
