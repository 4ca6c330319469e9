"""`GroupNormalization` written as `InstanceNormalization` over the groups, then scale and shift by channel."""

from typing import TYPE_CHECKING

import numpy as np

from trtdiff.passes.tape import Tape

if TYPE_CHECKING:
    import onnx_ir as ir


def by_instance(node: "ir.Node") -> bool:
    """Replace a `GroupNormalization`; whether it was done, for which the dimensions of its input must be known."""
    value, weight, bias = node.inputs
    if value is None or weight is None or bias is None or value.shape is None:
        return False
    groups = node.attributes["num_groups"].as_int()
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
    dtype = np.float32 if value.dtype is None else value.dtype.numpy()
    tape = Tape()
    ones, zeros = (tape.constant(np.full(groups, number, dtype)) for number in (1, 0))
    grouped = tape.op("Reshape", value, tape.ints(0, groups, -1))
    normal = tape.op("InstanceNormalization", grouped, ones, zeros, epsilon=epsilon)
    whole = tape.op("Reshape", normal, tape.op("Shape", value))
    per_channel = tape.ints(-1, *[1] * (len(value.shape) - 2))
    scaled = tape.op("Mul", whole, tape.op("Reshape", weight, per_channel))
    tape.put_instead_of(node, tape.op("Add", scaled, tape.op("Reshape", bias, per_channel)))
    return True
