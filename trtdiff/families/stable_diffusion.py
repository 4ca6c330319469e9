"""Stable Diffusion 1.x: one CLIP text encoder, a UNet with cross-attention, an AutoencoderKL."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trtdiff.errors import CheckpointError
from trtdiff.families.base import ComponentSpec, Config, LatentFacts, ModelFacts, ModelFamily, TokenFacts, field_of
from trtdiff.types import Array, TensorSpec

if TYPE_CHECKING:
    import torch

    from trtdiff.backends.base import Runs
    from trtdiff.tokens import Tokenizer


class StableDiffusion(ModelFamily):
    """`StableDiffusionPipeline` checkpoints (ε or v prediction; the scheduler's table knows which)."""

    name = "stable-diffusion"
    pipelines = ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline")

    def facts(self, configs: Mapping[str, Config]) -> ModelFacts:
        """Read the latent space from the VAE's config, the native size from the UNet's."""
        unet, vae = configs["unet"], configs["vae"]
        downscale = 2 ** (len(field_of(configs, "vae", "block_out_channels", list)) - 1)
        size = unet.get("sample_size")
        if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(side, int) for side in size):
            rows, columns = size
        else:
            rows = columns = field_of(configs, "unet", "sample_size", int)
        channels = field_of(configs, "vae", "latent_channels", int)
        if unet["in_channels"] != channels:
            raise CheckpointError(
                f"the UNet takes {unet['in_channels']} channels, the VAE makes {channels}",
                where="unet/config.json: in_channels",
                hint="UNets with extra input channels (inpainting, depth) are not supported by this version",
            )
        width = field_of(configs, "text_encoder", "hidden_size", int)
        if unet["cross_attention_dim"] != width:
            raise CheckpointError(
                f"the UNet attends to width {unet['cross_attention_dim']}, the text encoder has {width}",
                where="unet/config.json: cross_attention_dim, text_encoder/config.json: hidden_size",
                hint="use the text encoder that this UNet was trained with",
            )
        return ModelFacts(
            latent=LatentFacts(
                channels=channels,
                downscale=downscale,
                scaling=field_of(configs, "vae", "scaling_factor", float, 0.18215),
                shift=vae.get("shift_factor") or 0.0,
                height=rows * downscale,
                width=columns * downscale,
            ),
            conditions=(TensorSpec("encoder_hidden_states", "float32", ("batch", "tokens", width)),),
            tokens={
                "tokenizer": _tokens(
                    configs.get("tokenizer", {}), field_of(configs, "text_encoder", "max_position_embeddings", int)
                )
            },
            guidance=7.5,
            sizes_multiple_of=max(8, downscale),
        )

    def components(self, configs: Mapping[str, Config]) -> tuple[ComponentSpec, ...]:
        """Text encoder, denoiser, VAE decoder and VAE encoder."""
        latent = self.facts(configs).latent
        width = configs["text_encoder"]["hidden_size"]
        rows, columns = f"height/{latent.downscale}", f"width/{latent.downscale}"
        latents = ("batch", latent.channels, rows, columns)
        image = ("batch", 3, "height", "width")
        states = ("batch", "tokens", width)
        return (
            ComponentSpec(
                name="text_encoder",
                folder="text_encoder",
                inputs=(TensorSpec("input_ids", "int64", ("batch", "tokens")),),
                outputs=(TensorSpec("encoder_hidden_states", "float32", states),),
                build=_text_encoder,
                prefix="text_encoder",
            ),
            ComponentSpec(
                name="denoiser",
                folder="unet",
                inputs=(
                    TensorSpec("sample", "float32", latents),
                    TensorSpec("timestep", "float32", ("batch",)),
                    TensorSpec("encoder_hidden_states", "float32", states),
                ),
                outputs=(TensorSpec("prediction", "float32", latents),),
                build=_denoiser,
                prefix="unet",
                keep_high={"time_proj": "diffusers computes a timestep's waves in float32, whatever the type"},
            ),
            ComponentSpec(
                name="vae_decoder",
                folder="vae",
                inputs=(TensorSpec("latent", "float32", latents),),
                outputs=(TensorSpec("image", "float32", image),),
                build=_vae_decoder,
                prefix="vae",
            ),
            ComponentSpec(
                name="vae_encoder",
                folder="vae",
                inputs=(TensorSpec("image", "float32", image),),
                outputs=(TensorSpec("mean", "float32", latents), TensorSpec("std", "float32", latents)),
                build=_vae_encoder,
                prefix="vae",
            ),
        )

    def encode(
        self,
        prompts: Sequence[str],
        facts: ModelFacts,  # noqa: ARG002 - other families need them
        tokenizers: Mapping[str, "Tokenizer"],
        sessions: Mapping[str, "Runs"],
    ) -> dict[str, Array]:
        """Run the text encoder over padded token ids; the last hidden state is the condition."""
        ids = np.stack([tokenizers["tokenizer"].encode(prompt) for prompt in prompts])  # [B, tokens] int64
        return {"encoder_hidden_states": sessions["text_encoder"].run({"input_ids": ids})["encoder_hidden_states"]}


def _tokens(tokenizer: Config, positions: int) -> TokenFacts:
    """Read the padding token (a word, or a dictionary that holds it) and the row length that the text encoder takes."""
    pad = tokenizer.get("pad_token") or "<|endoftext|>"
    return TokenFacts(
        limit=min(positions, tokenizer.get("model_max_length") or positions),
        pad=pad["content"] if isinstance(pad, Mapping) else pad,
    )


# --- the modules that are traced: tensors in, tensors out ------------------------------------------------------------

ALWAYS_PASS_SIZES = 30
"""diffusers' UNet hands explicit sizes to its upsamplers where a latent side is no multiple of 2 ** num_upsamplers.

None is a multiple of 2 ** 30, so with this number it always does: one graph for every size. Where the sizes would not
have been needed they are twice the level's own, which is what upsampling does by itself.
"""


def _text_encoder(config: Config) -> "torch.nn.Module":
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    class TextEncoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text_encoder = CLIPTextModel(CLIPTextConfig(**config))

        def forward(self, input_ids: torch.Tensor) -> Any:
            return self.text_encoder(input_ids, return_dict=False)[0]

    return TextEncoder().eval()


def _denoiser(config: Config) -> "torch.nn.Module":
    import torch
    from diffusers import UNet2DConditionModel

    class Denoiser(torch.nn.Module):
        unet: Any

        def __init__(self) -> None:
            super().__init__()
            self.unet = UNet2DConditionModel.from_config(dict(config))  # type: ignore[no-untyped-call]
            self.unet.num_upsamplers = ALWAYS_PASS_SIZES

        def forward(self, sample: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor) -> Any:
            return self.unet(sample, timestep, encoder_hidden_states, return_dict=False)[0]

    return Denoiser().eval()


def _vae(config: Config) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_config(dict(config))  # type: ignore[no-untyped-call]


def _vae_decoder(config: Config) -> "torch.nn.Module":
    import torch

    class Decoder(torch.nn.Module):
        vae: Any

        def __init__(self) -> None:
            super().__init__()
            self.vae = _vae(config)

        def forward(self, latent: torch.Tensor) -> Any:
            """`latent` is in the denoiser's space; the VAE's own space is latent / scaling + shift."""
            inner = latent / config.get("scaling_factor", 0.18215) + (config.get("shift_factor") or 0.0)
            return self.vae.decode(inner, return_dict=False)[0]

    return Decoder().eval()


def _vae_encoder(config: Config) -> "torch.nn.Module":
    import torch

    class Encoder(torch.nn.Module):
        vae: Any

        def __init__(self) -> None:
            super().__init__()
            self.vae = _vae(config)

        def forward(self, image: torch.Tensor) -> Any:
            """Mean and standard deviation of the latent, in the denoiser's space."""
            scaling, shift = config.get("scaling_factor", 0.18215), config.get("shift_factor") or 0.0
            posterior = self.vae.encode(image, return_dict=False)[0]
            return (posterior.mean - shift) * scaling, posterior.std * scaling

    return Encoder().eval()
