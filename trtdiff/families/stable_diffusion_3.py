"""Stable Diffusion 3 and 3.5: two CLIP encoders, T5 where it is not left out, a transformer, flow matching."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trtdiff.errors import CheckpointError
from trtdiff.families import clip, t5
from trtdiff.families.autoencoder import latent_facts, vae_components
from trtdiff.families.base import (
    ComponentSpec,
    Config,
    ModelFacts,
    Reading,
    field_of,
    require_class,
)
from trtdiff.families.transformer import FlowFamily, denoiser
from trtdiff.types import Array, TensorSpec

if TYPE_CHECKING:
    import torch

    from trtdiff.export.schedule_call import ScheduleCall

CLIPS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
T5_TOKENS = 256
"""Of a prompt for T5: the pipeline's own `max_sequence_length`. As many zeros stand there where T5 is left out."""


class StableDiffusion3(FlowFamily):
    """`StableDiffusion3Pipeline` checkpoints."""

    name = "stable-diffusion-3"
    pipelines = (
        "StableDiffusion3Pipeline",
        "StableDiffusion3Img2ImgPipeline",
        "StableDiffusion3InpaintPipeline",
    )

    def facts(self, configs: Mapping[str, Config]) -> ModelFacts:
        """Read the latent space from the VAE's config, the rest from the transformer's."""
        require_class(configs, "transformer", "SD3Transformer2DModel")
        latent = latent_facts(
            configs, configs["transformer"].get("sample_size", 128), where="transformer/config.json: sample_size"
        )
        width = field_of(configs, "transformer", "joint_attention_dim", int, 4096)
        clips = sum(field_of(configs, encoder, "hidden_size", int) for encoder in CLIPS)
        pooled = sum(field_of(configs, encoder, "projection_dim", int, 512) for encoder in CLIPS)
        has_t5 = "text_encoder_3" in configs
        t5_width = field_of(configs, "text_encoder_3", "d_model", int) if has_t5 else width
        expected = field_of(configs, "transformer", "pooled_projection_dim", int, 2048)
        if t5_width != width or clips > width or pooled != expected:
            raise CheckpointError(
                f"the transformer attends to width {width} and a pooled text of {expected}; the text encoders have "
                f"{clips} of CLIP, {t5_width} of T5 and {pooled} pooled",
                where="transformer/config.json: joint_attention_dim, pooled_projection_dim",
                hint="use the text encoders that this transformer was trained with",
            )
        _same_channels(configs, latent.channels)
        patch = field_of(configs, "transformer", "patch_size", int, 2)
        largest = field_of(configs, "transformer", "pos_embed_max_size", int, 96) * patch * latent.downscale
        if max(latent.height, latent.width) > largest:
            raise CheckpointError(
                f"the native size is {latent.height} x {latent.width} pixels, and stored positions end at {largest}",
                where="transformer/config.json: sample_size, pos_embed_max_size",
                hint="download the file again, or write what the model was trained with",
            )
        tokens = {tokenizer: clip.token_facts(configs, tokenizer, encoder) for encoder, tokenizer in CLIPS.items()}
        limit = min(facts.limit for facts in tokens.values())
        if has_t5:
            tokens["tokenizer_3"] = t5.token_facts(configs, "tokenizer_3", T5_TOKENS)
        return ModelFacts(
            latent=latent,
            conditions=(
                TensorSpec("encoder_hidden_states", "float32", ("batch", "context", width)),
                TensorSpec("pooled_projections", "float32", ("batch", pooled)),
            ),
            tokens=tokens,
            guidance=7.0,
            sizes_multiple_of=latent.downscale * patch,
            lengths={"tokens": limit, **({t5.TOKENS: T5_TOKENS} if has_t5 else {}), "context": limit + T5_TOKENS},
            skips="fewer",
            strengths=(0.6, 0.6),
            largest=largest,
            clip_layers=min(field_of(configs, encoder, "num_hidden_layers", int, 12) for encoder in CLIPS) - 1,
            own={"width": width},
        )

    def components(self, configs: Mapping[str, Config]) -> tuple[ComponentSpec, ...]:
        """Text encoders, transformer, VAE decoder and VAE encoder."""
        facts = self.facts(configs)
        transformer = denoiser(facts, _denoiser, waves=["time_text_embed.time_proj"])
        return (
            *(clip.text_encoder(configs, encoder, reads="penultimate", projected=True) for encoder in CLIPS),
            *([t5.text_encoder(configs, "text_encoder_3")] if "text_encoder_3" in configs else []),
            transformer,
            *vae_components(configs, facts.latent),
        )

    def schedule_call(self, pipeline: str, image_tokens: int) -> "ScheduleCall":  # noqa: ARG002 - all call alike
        """Give the call of this family's pipelines, whose schedule may depend on the size."""
        from trtdiff.export.flow_calls import StableDiffusion3Call

        return StableDiffusion3Call(image_tokens)

    def encode(self, texts: Sequence[str | None], reading: Reading) -> dict[str, Array]:
        """Lay CLIP's penultimate layers side by side, padded to T5's width, and T5's rows below them."""
        width = reading.facts.own["width"]
        made = [clip.run_clip(texts, reading, tokenizer, encoder) for encoder, tokenizer in CLIPS.items()]
        states = np.concatenate([one["encoder_hidden_states"] for one in made], axis=-1)  # [B, 77, clips]
        states = np.pad(states, ((0, 0), (0, 0), (0, width - states.shape[-1])))
        if "tokenizer_3" in reading.facts.tokens:
            below = t5.run_t5(texts, reading, "tokenizer_3", "text_encoder_3")
        else:
            below = np.zeros((len(texts), T5_TOKENS, width), np.float32)
        return {
            "encoder_hidden_states": np.concatenate([states, below], axis=1),
            "pooled_projections": np.concatenate([one["pooled"] for one in made], axis=-1),
        }


def _same_channels(configs: Mapping[str, Config], channels: int) -> None:
    taken = field_of(configs, "transformer", "in_channels", int, 16)
    if taken != channels:
        raise CheckpointError(
            f"the transformer takes {taken} channels, the VAE makes {channels}",
            where="transformer/config.json: in_channels, vae/config.json: latent_channels",
            hint="use the VAE that this transformer was trained with",
        )


def _denoiser(config: Config) -> "torch.nn.Module":
    from unittest.mock import patch

    import torch
    from diffusers import SD3Transformer2DModel
    from diffusers.models import embeddings

    def positions(size: int, side: int, **_: Any) -> torch.Tensor:
        """Give positions without values: checkpoints store them, and computing them takes a gigabyte."""
        return torch.empty(side * side, size)

    class Denoiser(torch.nn.Module):
        transformer: Any

        def __init__(self) -> None:
            super().__init__()
            with patch.object(embeddings, "get_2d_sincos_pos_embed", positions):
                self.transformer = SD3Transformer2DModel.from_config(dict(config))  # type: ignore[no-untyped-call]

        def forward(
            self,
            sample: torch.Tensor,
            timestep: torch.Tensor,
            encoder_hidden_states: torch.Tensor,
            pooled_projections: torch.Tensor,
        ) -> Any:
            return self.transformer(sample, encoder_hidden_states, pooled_projections, timestep, return_dict=False)[0]

    return Denoiser().eval()
