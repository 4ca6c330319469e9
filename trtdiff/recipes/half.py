"""Half precision: fp16 has 11 bits and ends at 65,504; bf16 has 8 bits and float32's range.

Tolerances are about twice what was measured with the demo checkpoint on the backend `rounded`, at the least, tuned and
largest shapes and guidance 3 and 7.5. Largest relative L2, which is the denoiser's: fp16 5.1e-3, bf16 4.5e-2; pictures
after 20 steps: 2 and 30 levels.
"""

from trtdiff.recipes.base import PrecisionRecipe
from trtdiff.types import Tolerance

_HALF = "trtdiff.passes.half_precision:half_precision"

FP16 = PrecisionRecipe(
    name="fp16",
    summary="float16 weights and arithmetic; float32 where the timestep becomes waves",
    computes_in="float16",
    passes=(f"{_HALF} dtype=float16",),
    tolerance=Tolerance(relative_l2=1e-2, levels=4),
)
BF16 = PrecisionRecipe(
    name="bf16",
    summary="bfloat16 weights and arithmetic; float32 where the timestep becomes waves",
    computes_in="bfloat16",
    passes=(f"{_HALF} dtype=bfloat16",),
    tolerance=Tolerance(relative_l2=8e-2, levels=60),
)
