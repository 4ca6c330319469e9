"""Single precision everywhere: the reference that other precisions are compared with."""

from trtdiff.recipes.base import PrecisionRecipe
from trtdiff.types import Tolerance

RECIPE = PrecisionRecipe(
    name="fp32",
    summary="float32 weights and arithmetic; the same numbers as PyTorch but for the order of sums",
    computes_in="float32",
    passes=("trtdiff.passes.widen_weights:widen_weights",),
    tolerance=Tolerance(components={"*": 1e-4}, latents=1e-4, levels=1),
)
