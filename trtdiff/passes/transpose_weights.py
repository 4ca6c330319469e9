"""Store weights the way they are multiplied.

PyTorch keeps the weight of a linear layer as [out, in], a `MatMul` wants [in, out], and an export only writes down the
transpose. ONNX Runtime would carry it out at every start, into memory of its own: with 671 MB of weights a start takes
3.0 s and 904 MB instead of 1.8 s and 712 MB (one core, ONNX Runtime 1.32). So it is done when the tensor is written.
"""

from typing import TYPE_CHECKING

import numpy as np

from trtdiff.passes.derived import derived_weight, forget_if_unused

if TYPE_CHECKING:
    import onnx_ir as ir


def transpose_weights(model: "ir.Model") -> None:
    """Replace `initializer → Transpose` by an initializer.

    Requires that weights have the type they are used in (`widen_weights` came before). Ensures that no Transpose reads
    an initializer.
    """
    import onnx_ir as ir

    graph = model.graph
    for value in list(graph.initializers.values()):
        if value.const_value is None or value.dtype is None:
            continue
        shape = value.const_value.shape.numpy()
        for node in [node for node in value.consumers() if node.op_type == "Transpose" and node.graph is graph]:
            perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else range(len(shape))[::-1]
            name = f"{value.name}.{''.join(map(str, perm))}"
            turned = graph.initializers.get(name) or derived_weight(
                value,
                name,
                lambda array, perm=tuple(perm): np.ascontiguousarray(array.transpose(perm)),  # type: ignore[misc]
                dtype=value.dtype,
                shape=[shape[axis] for axis in perm],
            )
            ir.convenience.replace_all_uses_with(node.outputs[0], turned, replace_graph_outputs=True)
            graph.remove(node, safe=True)
        forget_if_unused(value)
