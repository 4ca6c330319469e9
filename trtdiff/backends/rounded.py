"""What fp16 and bf16 engines compute, shown on any CPU: every value rounded to its type, in ONNX Runtime.

Not for speed. The graph is the one that TensorRT for RTX gets, attention that has no fused kernel decomposed as there,
its half values made visible by `round_values`, and run without graph optimizations, which would take the roundings out.
"""

from typing import Any

from trtdiff.backends.onnxruntime import OnnxRuntime


class Rounded(OnnxRuntime):
    """ONNX Runtime on a graph that rounds."""

    name = "rounded"
    target = "rounded"
    passes = (
        "trtdiff.passes.decompose_attention:decompose_attention target=rtx",
        "trtdiff.passes.round_values:round_values",
        *OnnxRuntime.passes,
    )
    fuses_attention = False  # heads that no GPU's kernel fits are decomposed as they are there
    bases = ("float16", "bfloat16")

    def _options(self, ort: Any, threads: int) -> Any:
        options = super()._options(ort, threads)
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return options
