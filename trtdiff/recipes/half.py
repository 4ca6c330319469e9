"""Half precision: fp16 has 11 bits and ends at 65,504; bf16 has 8 bits and float32's range.

Tolerances are one and a half to two times what was measured on the backend `rounded`, at the least, tuned and
largest shapes, with random inputs; the larger figure of the demo checkpoint and of a tiny one of random weights:

                          fp16      bf16    (relative L2)
    text encoder          1.2e-3    9.5e-3
    denoiser              7.4e-3    8.0e-2
    VAE decoder           2.6e-3    2.1e-2
    VAE encoder           1.8e-3    1.5e-2
    latents, 20 steps     3.5e-3    2.5e-2

Pictures of the demo after 20 steps, at guidance 3 and 7.5: 2 and 30 levels.
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
    tolerance=Tolerance(
        components={"text_encoder*": 2.4e-3, "denoiser": 1.4e-2, "vae_decoder": 5e-3, "vae_encoder": 3.6e-3},
        latents=7e-3,
        levels=4,
    ),
)
BF16 = PrecisionRecipe(
    name="bf16",
    summary="bfloat16 weights and arithmetic; float32 for the timestep's waves",
    computes_in="bfloat16",
    passes=(f"{_HALF} dtype=bfloat16", _LEGAL),
    tolerance=Tolerance(
        components={"text_encoder*": 1.9e-2, "denoiser": 1.2e-1, "vae_decoder": 4e-2, "vae_encoder": 3e-2},
        latents=5e-2,
        levels=60,
    ),
)
