"""Which attention a compiler computes in one fused kernel, and how to let it compute the rest in parts.

A fused kernel never holds the matrix of scores; where there is none, TensorRT refuses to build the operator unless it
is allowed to decompose it.
"""

from dataclasses import dataclass
from typing import Any

from trtdiff.errors import UsageError


@dataclass(frozen=True)
class Fused:
    """Head sizes that one compiler has a fused kernel for."""

    target: str
    """As in `--target`, without the device."""
    dtype: str
    heads: range
    """Without mask, causal, or with a mask of numbers."""
    boolean: range
    """With a Boolean mask."""
    source: str
    """Where this is from: a build, or a page of the vendor."""


_RTX_BUILD = (
    "builds with TensorRT for RTX 1.7.1, portable and for sm75, sm80, sm86, sm89, sm120, sm121: sizes 1 to 20, 24, 32, "
    "40, 48, 64, 80, 96, 112, 128, 160, 192, 250 to 261, 264, 320, 512; self and cross attention, without mask, with a "
    "mask of numbers, and causal, all alike. With a Boolean mask, sizes from 9 to 255 that are no multiple of 8 are an "
    "error inside the compiler, also where it may decompose (scripts/attention_support.py)"
)
SUPPORT: tuple[Fused, ...] = (
    Fused("rtx", "float16", range(9, 257), range(16, 257, 8), _RTX_BUILD),
    Fused("rtx", "bfloat16", range(9, 257), range(16, 257, 8), f"{_RTX_BUILD}; sm75 has no bfloat16 at all"),
    Fused("rtx", "float32", range(0), range(0), _RTX_BUILD),
)
"""One row for each target and type. NVIDIA's page on `Attention` lists float32, float16 and bfloat16 without sizes, and
its page on fused attention says that one which no kernel fits must be decomposable."""


def fuses(target: str, dtype: str, head_size: int, mask: str = "") -> bool:
    """Whether the compiler for a target has a fused kernel; `mask` is the type of a mask, empty where there is none.

    Raises UsageError for a target that was never tried.
    """
    rows = [row for row in SUPPORT if row.target == target]
    if not rows:
        raise UsageError(f"nobody has tried which attention {target} fuses", where="backends/attention.py",
                         hint="run scripts/attention_support.py on its compiler, and add rows")  # fmt: skip
    return any(head_size in (row.boolean if mask == "bool" else row.heads) for row in rows if row.dtype == dtype)


def mark_decomposable(trt: Any, network: Any) -> int:
    """Allow a parsed network to compute every attention in parts where no kernel fits it; give their number.

    TensorRT's ONNX parser makes two layers of an `Attention`, its input and its output; both refer to one object with
    the attribute `decomposable`, false at first. The Python API hands out layers as `ILayer`, to be given their class.
    Attention that has a fused kernel is still computed by that. A version without these classes has no such attention:
    0. Seen with TensorRT for RTX 1.7.1: float32 and head sizes 8 and 512, which it refuses otherwise, then build.
    """
    boundary = getattr(trt, "IAttentionOutputLayer", None)
    if boundary is None:
        return 0
    marked = 0
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_OUTPUT:
            layer.__class__ = boundary
            layer.attention.decomposable = True
            marked += 1
    return marked
