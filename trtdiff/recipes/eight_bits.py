"""Precisions that compute in 8 bits, on top of float16.

int8           convolutions and linear layers; linear ones smoothed
fp8            E4M3: convolutions, linear layers, and the products of attention
fp8-mixed      fp8, but for what people keep in float16 when they ship it
int8-weights   weights alone: half the size, float16's arithmetic

In all of them the layers that touch the latent itself and the timestep's embedding stay in float16: they are below 1 %
of the multiply-adds and make much of the error (a random UNet of 220 M parameters: 0.044 instead of 0.051 in int8,
0.116 instead of 0.131 in E4M3, relative L2). So do the layers through which the text comes into a transformer. Text
encoders and VAEs stay in float16 too, but for `int8-weights`.

Smoothing costs such a network nothing (0.0444 instead of 0.0441), and is what saves one with outlier channels.

Tolerances are one and a half to two times what was measured on the backend `rounded`, the larger figure of the demo
checkpoint, calibrated on its own prompts, and a tiny one of random weights: executions on random inputs, whose
conditions are no prompt's and go beyond what was calibrated, and pictures of 20 steps at guidance 7.5 (relative L2;
levels of 255). A picture in 8 bits is another picture that is as good, more than the same one: what it is worth is seen
by comparing many.

                     int8     fp8      fp8-mixed  int8-weights
    text encoder     -        -        -          0.017
    denoiser         0.42     0.44     0.47       0.022
    latents          0.10     0.26     0.14       0.017
    levels           61       92       98         10
"""

from dataclasses import replace

from trtdiff.recipes.base import PrecisionRecipe
from trtdiff.recipes.half import FP16
from trtdiff.recipes.quantization import ALPHA, Quantization
from trtdiff.types import Tolerance

_LATENT = "it reads or writes the latent itself, where every error is an error of the picture"
_TIME = "the timestep's embedding steers every block, and is next to no work"
_TEXT = "all that the prompt says goes through it, and it is next to no work"
ENDS = {
    # UNets
    "conv_in": _LATENT, "conv_out": _LATENT, "time_embedding.*": _TIME, "*.time_emb_proj": _TIME,
    "add_embedding.*": _TIME,
    # transformers
    "x_embedder": _LATENT, "pos_embed.proj": _LATENT, "proj_out": _LATENT, "norm_out.*": _TIME,
    "time_text_embed.*": _TIME, "adaln_single.*": _TIME, "context_embedder": _TEXT, "caption_projection.*": _TEXT,
}  # fmt: skip
_MIXED = {**ENDS, "*.proj_out": "a transformer's way back into the residual stream"}
_VAE = {name: bound for name, bound in FP16.tolerance.components.items() if name.startswith("vae")}
TENSOR_CORE = 16
"""Tensor cores multiply 8 bits in blocks of 16: smaller sums gain nothing."""

INT8 = PrecisionRecipe(
    name="int8",
    summary="int8 convolutions and linear layers (SmoothQuant, alpha 0.5), float16 for all else",
    computes_in=FP16.computes_in,
    passes=FP16.passes,
    quantization=Quantization("int8", "int8", keep=ENDS, method="mse", smooth=ALPHA),
    tolerance=Tolerance(components={**FP16.tolerance.components, "denoiser": 0.7}, latents=0.2, levels=120),
)
FP8 = PrecisionRecipe(
    name="fp8",
    summary="float8 (E4M3) convolutions, linear layers and attention, float16 for all else",
    computes_in=FP16.computes_in,
    passes=FP16.passes,
    quantization=Quantization("float8", "float8", ("conv", "linear", "attention"), keep=ENDS, method="mse"),
    tolerance=Tolerance(components={**FP16.tolerance.components, "denoiser": 0.7}, latents=0.45, levels=180),
)
FP8_MIXED = replace(
    FP8,
    name="fp8-mixed",
    summary="float8 (E4M3) where it is safe, float16 for projections out of blocks, small layers and all else",
    quantization=Quantization(
        "float8", "float8", ("conv", "linear", "attention"), keep=_MIXED, least=TENSOR_CORE, method="mse"
    ),
)
INT8_WEIGHTS = PrecisionRecipe(
    name="int8-weights",
    summary="weights stored in int8, float16 arithmetic",
    computes_in=FP16.computes_in,
    passes=FP16.passes,
    quantization=Quantization("int8", None, components=("denoiser", "text_encoder*"), keep=ENDS),
    tolerance=Tolerance(components={**_VAE, "text_encoder*": 2.6e-2, "denoiser": 4e-2}, latents=3e-2, levels=18),
)
