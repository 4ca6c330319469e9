"""Half precision: fp16 has 11 bits and ends at 65,504; bf16 has 8 bits and float32's range.

Tolerances are one and a half to two times what was measured on the backend `rounded`, at the least, tuned and
largest shapes, of random inputs. Largest relative L2, which is the denoiser's: bf16 4.5e-2 with the demo checkpoint,
8.0e-2 with a tiny one of random weights; fp16 an eighth of that. Pictures of the demo after 20 steps, at guidance 3 and
7.5: 30 and 2 levels.
"""

from trtdiff.recipes.base import PrecisionRecipe
from trtdiff.types import Tolerance

_HALF = "trtdiff.passes.half_precision:half_precision"
_LEGAL = "trtdiff.passes.legalise_types:legalise_types"

FP16 = PrecisionRecipe(
    name="fp16",
    summary="float16 weights and arithmetic; float32 for the timestep's waves and what float16 cannot hold",
    computes_in="float16",
    passes=(f"{_HALF} dtype=float16", _LEGAL),
    tolerance=Tolerance(components={"*": 1.5e-2}, latents=1.5e-2, levels=4),
)
BF16 = PrecisionRecipe(
    name="bf16",
    summary="bfloat16 weights and arithmetic; float32 for the timestep's waves",
    computes_in="bfloat16",
    passes=(f"{_HALF} dtype=bfloat16", _LEGAL),
    tolerance=Tolerance(components={"*": 1.2e-1}, latents=1.2e-1, levels=60),
)
