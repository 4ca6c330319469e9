"""A canonical graph computes in float32: what a model computes in float64 (positions of transformers) does too.

No compiler for GPUs takes float64. Constants were folded in it as far as they could be; what is left are a few angles
that depend on the picture's size: a position of some hundreds times a rate of at most 1, which float32 has to 1e-5.

1. A constant of float64 becomes float32.
2. A `Cast` to float64 casts to float32.
3. Values between are typed anew.

Requires that no weight is stored in float64. Ensures that no value of the graph is.
"""

from typing import TYPE_CHECKING

import numpy as np

from trtdiff.passes.base import small

if TYPE_CHECKING:
    import onnx_ir as ir


def narrow_float64(model: "ir.Model") -> int:
    """Give the number of values that were float64."""
    import onnx_ir as ir

    narrowed = 0
    for value in (*model.graph.initializers.values(), *(out for node in model.graph for out in node.outputs)):
        if value.dtype != ir.DataType.DOUBLE:
            continue
        if value.is_initializer() and (array := small(value)) is not None:
            value.const_value = ir.tensor(array.astype(np.float32), name=value.name)
        value.dtype = ir.DataType.FLOAT
        narrowed += 1
    for node in model.graph:
        if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.DOUBLE:
            node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
            node.outputs[0].const_value = None
    return narrowed
