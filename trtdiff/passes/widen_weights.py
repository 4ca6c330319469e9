"""Store weights in float32 where the graph computes in float32.

A canonical graph keeps each weight in the checkpoint's type and widens it with a `Cast` in front of its use. A runtime
that executes the graph as it stands would do that again on every start, and hold both copies; so the cast is done here,
once, when the tensor is written: `lowered.write_graph` asks for one tensor at a time.
"""

from typing import TYPE_CHECKING

import numpy as np

from trtdiff.passes.derived import derived_weight, forget_if_unused

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
        wide = derived_weight(
            value,
            f"{value.name}.float32",
            lambda array: array.astype(np.float32),
            dtype=ir.DataType.FLOAT,
            shape=value.const_value.shape.numpy(),
        )
        for cast in casts:
            ir.convenience.replace_all_uses_with(cast.outputs[0], wide, replace_graph_outputs=True)
            graph.remove(cast, safe=True)
        forget_if_unused(value)
