"""UNet2DConditionModel, the denoiser of Stable Diffusion 1, 2 and XL: what it takes follows from its config."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trtdiff.errors import CheckpointError
from trtdiff.families.autoencoder import latent_dims
from trtdiff.families.base import TIMESTEPS, WAVES, ComponentSpec, Config, LatentFacts, Mode, Uniform, field_of
from trtdiff.types import Array, TensorSpec

if TYPE_CHECKING:
    import torch

MASK, MASKED = "mask", "masked_latent"
"""Conditions of a UNet that inpaints by channels: where to paint, and the latent of the picture without that."""

ALWAYS_PASS_SIZES = 30
"""diffusers' UNet hands explicit sizes to its upsamplers where a latent side is no multiple of 2 ** num_upsamplers.

None is a multiple of 2 ** 30, so with this number it always does: one graph for every size. Where the sizes would not
have been needed they are twice the level's own, which is what upsampling does by itself.
"""

UPCAST = "its config says upcast_attention: scores of this checkpoint are known to leave float16"


def inpaints(configs: Mapping[str, Config], latent: LatentFacts) -> bool:
    """Whether the UNet takes mask and masked latent as channels. Raises CheckpointError for any other number."""
    channels = field_of(configs, "unet", "in_channels", int)
    if channels not in {latent.channels, 2 * latent.channels + 1}:
        raise CheckpointError(
            f"the UNet takes {channels} channels, the VAE makes {latent.channels}",
            where="unet/config.json: in_channels",
            hint=f"{latent.channels} are known, and {2 * latent.channels + 1} for inpainting; UNets with others "
            "(depth, instructions, upscaling) are not supported by this version",
        )
    return channels != latent.channels


def modes_of(configs: Mapping[str, Config], latent: LatentFacts) -> tuple[Mode, ...]:
    """Give the ways in which pictures may begin."""
    return ("inpaint-channels",) if inpaints(configs, latent) else ("text", "image", "inpaint")


def condition_specs(configs: Mapping[str, Config], latent: LatentFacts, *more: TensorSpec) -> tuple[TensorSpec, ...]:
    """Give every condition that the UNet takes: the text, `more`, the embedded guidance, mask and masked latent."""
    width = field_of(configs, "unet", "cross_attention_dim", int)
    embedded = configs["unet"].get("time_cond_proj_dim")
    return (
        TensorSpec("encoder_hidden_states", "float32", ("batch", "context", width)),
        *more,
        *([TensorSpec("timestep_cond", "float32", ("batch", embedded))] if embedded else []),
        *(
            [TensorSpec(MASK, "float32", latent_dims(latent, 1)), TensorSpec(MASKED, "float32", latent_dims(latent))]
            if inpaints(configs, latent)
            else []
        ),
    )


def denoiser(configs: Mapping[str, Config], latent: LatentFacts, conditions: tuple[TensorSpec, ...]) -> ComponentSpec:
    """Describe it."""
    dims = latent_dims(latent)
    return ComponentSpec(
        name="denoiser",
        folder="unet",
        inputs=(
            TensorSpec("sample", "float32", dims),
            TensorSpec("timestep", "float32", ("batch",)),
            *conditions,
        ),
        outputs=(TensorSpec("prediction", "float32", dims),),
        build=partial(_denoiser, names=tuple(spec.name for spec in conditions)),
        prefix="unet",
        keep_high=_keep_high(configs["unet"]),
        values={"timestep": TIMESTEPS, "time_ids": Uniform(0, 1024)},
    )


def _keep_high(config: Config) -> dict[str, str]:
    waves = ["time_proj", *(["add_time_proj"] if config.get("addition_embed_type") == "text_time" else [])]
    upcast = ["*.attn?", "*.attn?.to_q", "*.attn?.to_k"] if config.get("upcast_attention") is True else []
    return {**dict.fromkeys(waves, WAVES), **dict.fromkeys(upcast, UPCAST)}


def embedded_guidance(scale: float, size: int) -> Array:  # [size] float32
    """Embed a guidance scale as latent consistency models take it: waves of 1000 (scale - 1).

    diffusers' `get_guidance_scale_embedding`; https://github.com/google-research/vdm, model_vdm.py, line 298.
    """
    half = size // 2
    rates = np.exp(np.arange(half, dtype=np.float32) * np.float32(-np.log(10000.0) / (half - 1)))
    angles = np.float32(scale - 1) * np.float32(1000) * rates
    waves = np.concatenate([np.sin(angles), np.cos(angles)])
    return np.pad(waves, (0, size - len(waves))).astype(np.float32)


def _denoiser(config: Config, *, names: tuple[str, ...]) -> "torch.nn.Module":
    import torch
    from diffusers import UNet2DConditionModel

    class Denoiser(torch.nn.Module):
        unet: Any

        def __init__(self) -> None:
            super().__init__()
            self.unet = UNet2DConditionModel.from_config(dict(config))  # type: ignore[no-untyped-call]
            self.unet.num_upsamplers = ALWAYS_PASS_SIZES

        def forward(self, sample: torch.Tensor, timestep: torch.Tensor, *conditions: torch.Tensor) -> Any:
            given = dict(zip(names, conditions, strict=True))
            text = given.pop("encoder_hidden_states")
            if MASK in given:
                sample = torch.cat([sample, given.pop(MASK), given.pop(MASKED)], dim=1)
            embedded = given.pop("timestep_cond", None)
            added = given or None
            return self.unet(
                sample, timestep, text, timestep_cond=embedded, added_cond_kwargs=added, return_dict=False
            )[0]

    return Denoiser().eval()
