"""Operators in the forms that OpenVINO reads: nothing newer than opset 20.

1. `Attention` → products and a softmax (`decompose_attention`).
2. `GroupNormalization`, which opset 20 has only in a deprecated form, → `InstanceNormalization` over the groups, then
   scale and shift by channel (`by_instance`). Largest error at unit variance and mean 0, 10, 100, 1000: 3e-7, 1.6e-6,
   7e-6, 2.7e-4; OpenVINO's own of the former 3e-7, 1.5e-6, 1.1e-5, 1.3e-4.
3. The opset becomes 20. `LayerNormalization` and `Gelu` exist there as they are; an operator that does not, or has
   attributes that it has not there, is an error.

What it is good for is reach, not speed: OpenVINO 2026.4 reads opset 23 as well and makes the same of it. A random
UNet of 37 M parameters (128, 256, 256 channels, 4 heads), float32, each against the canonical graph in the same run,
least of 3 to 9 calls, on two cores of an AMD EPYC: 64 by 64 latents 0.993; 32 by 32 and two rows 0.994 with dynamic
shapes and 0.992 with fixed ones; decomposed attention alone 0.997, 0.991 and 0.986. Runs differ by more than
that: four of 32 by 32 gave 0.91, 0.99, 0.99 and 1.00.
The peak of memory at 64 by 64 and two rows is 2 % more, 761 MB instead of 748.

ONNX Runtime 1.32 wants `cpu_forms`, not these: at 64 by 64 decomposed attention costs 1.11 times the time of
`MultiHeadAttention` there, and at two rows 1.89 GB instead of 0.73 (the canonical graph 1.12 times, 1.39 GB).
"""

from typing import TYPE_CHECKING

from trtdiff.errors import BuildError
from trtdiff.passes.decompose_attention import ALL, decompose_attention
from trtdiff.passes.group_norm import by_instance
from trtdiff.passes.schemas import attribute_names, describe

if TYPE_CHECKING:
    import onnx_ir as ir

OPSET = 20


def openvino_forms(model: "ir.Model") -> None:
    """Apply the rules.

    Requires the canonical graph with float32 weights, or one in half precision. Ensures the same inputs, outputs and
    values up to the order of sums. Raises BuildError for an operator that opset 20 has not.
    """
    decompose_attention(model, target=ALL)
    for node in list(model.graph):
        if node.op_type == "GroupNormalization" and not node.domain:
            by_instance(node)  # one that it cannot is refused below
    for node in model.graph:
        known = attribute_names(node, OPSET) if not node.domain else node.attributes.keys()
        if known is None or not node.attributes.keys() <= known:
            raise BuildError(f"opset {OPSET} has no such {node.op_type}", where=describe(node),
                             hint="build for another target; the operator needs a rule of its own here")  # fmt: skip
    model.graph.opset_imports[""] = OPSET
