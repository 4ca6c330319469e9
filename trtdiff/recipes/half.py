"""Half precision: fp16 has 11 bits and ends at 65,504; bf16 has 8 bits and float32's range."""

from trtdiff.recipes.base import PrecisionRecipe
from trtdiff.types import Tolerance

_HALF = "trtdiff.passes.half_precision:half_precision"

FP16 = PrecisionRecipe(
    name="fp16",
    summary="float16 weights and arithmetic; float32 where the timestep becomes waves",
    computes_in="float16",
    passes=(f"{_HALF} dtype=float16",),
    tolerance=Tolerance(relative_l2=2e-2, levels=16),
)
BF16 = PrecisionRecipe(
    name="bf16",
    summary="bfloat16 weights and arithmetic; float32 where the timestep becomes waves",
    computes_in="bfloat16",
    passes=(f"{_HALF} dtype=bfloat16",),
    tolerance=Tolerance(relative_l2=1e-1, levels=64),
)
