"""FLUX.1 dev and schnell: CLIP for a pooled text, T5 for its words, a transformer over packed latents, flow matching.

The graph takes and gives latents [B, C, h, w], as every family's does: packing 2 by 2 pixels into a token, and the
positions of tokens, which follow from the size alone, are computed inside it.
"""

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
    Uniform,
    Wish,
    field_of,
    require_class,
)
from trtdiff.families.transformer import FlowFamily, denoiser
from trtdiff.types import Array, TensorSpec

if TYPE_CHECKING:
    import torch

    from trtdiff.export.schedule_call import ScheduleCall

PATCH = 2
"""Latent rows and columns of a token."""
SAMPLE_SIZE = 128
"""Native size in latent rows; the pipeline's own, for no config has it."""
T5_TOKENS = 512
"""Of a prompt for T5: the pipeline's own `max_sequence_length`."""
EMBEDDED = "guidance_scale"
THETA = 10000


class Flux(FlowFamily):
    """`FluxPipeline` checkpoints."""

    name = "flux"
    pipelines = ("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline")

    def facts(self, configs: Mapping[str, Config]) -> ModelFacts:
        """Read the latent space from the VAE's config, the rest from the transformer's."""
        require_class(configs, "transformer", "FluxTransformer2DModel")
        latent = latent_facts(configs, SAMPLE_SIZE, where="transformer/config.json")
        width = field_of(configs, "transformer", "joint_attention_dim", int, 4096)
        pooled = field_of(configs, "transformer", "pooled_projection_dim", int, 768)
        packed = field_of(configs, "transformer", "in_channels", int, 64)
        t5_width = field_of(configs, "text_encoder_2", "d_model", int)
        clip_width = field_of(configs, "text_encoder", "hidden_size", int)
        if (t5_width, clip_width) != (width, pooled):
            raise CheckpointError(
                f"the transformer attends to width {width} and a pooled text of {pooled}; T5 has {t5_width}, CLIP "
                f"{clip_width}",
                where="transformer/config.json: joint_attention_dim, pooled_projection_dim",
                hint="use the text encoders that this transformer was trained with",
            )
        if packed != latent.channels * PATCH**2:
            raise CheckpointError(
                f"the transformer takes tokens of {packed} numbers; {PATCH} by {PATCH} of the VAE's {latent.channels} "
                f"channels are {latent.channels * PATCH**2}",
                where="transformer/config.json: in_channels, vae/config.json: latent_channels",
                hint="FLUX checkpoints that take more (fill, depth, canny, kontext) are not supported by this version",
            )
        tokens = {
            "tokenizer": clip.token_facts(configs, "tokenizer", "text_encoder"),
            "tokenizer_2": t5.token_facts(configs, "tokenizer_2", T5_TOKENS),
        }
        embedded = bool(configs["transformer"].get("guidance_embeds"))
        scale = (TensorSpec(EMBEDDED, "float32", ("batch",)),) if embedded else ()
        return ModelFacts(
            latent=latent,
            conditions=(
                TensorSpec("encoder_hidden_states", "float32", ("batch", "context", width)),
                TensorSpec("pooled_projections", "float32", ("batch", pooled)),
                *scale,
            ),
            tokens=tokens,
            guidance=3.5 if embedded else 1.0,
            sizes_multiple_of=latent.downscale * PATCH,
            lengths={"tokens": tokens["tokenizer"].limit, t5.TOKENS: T5_TOKENS, "context": T5_TOKENS},
            guided_by="embedded, branches" if embedded else "branches",
            skips="fewer",
            strengths=(0.6, 0.6),
        )

    def components(self, configs: Mapping[str, Config]) -> tuple[ComponentSpec, ...]:
        """Text encoders, transformer, VAE decoder and VAE encoder."""
        facts = self.facts(configs)
        transformer = denoiser(facts, _denoiser, waves=["time_text_embed.time_proj"], values={EMBEDDED: Uniform(1, 5)})
        return (
            clip.text_encoder(configs, "text_encoder", reads="pooled"),
            t5.text_encoder(configs, "text_encoder_2"),
            transformer,
            *vae_components(configs, facts.latent),
        )

    def schedule_call(self, pipeline: str, image_tokens: int) -> "ScheduleCall":  # noqa: ARG002 - all call alike
        """Give the call of this family's pipelines, whose schedule may depend on the size."""
        from trtdiff.export.flow_calls import FluxCall

        return FluxCall(image_tokens)

    def encode(self, texts: Sequence[str | None], reading: Reading) -> dict[str, Array]:
        """Give T5's words and CLIP's pooled text."""
        pooled = clip.run_clip(texts, reading, "tokenizer", "text_encoder", skips=False)["pooled"]
        words = t5.run_t5(texts, reading, "tokenizer_2", "text_encoder_2")
        return {"encoder_hidden_states": words, "pooled_projections": pooled}

    def conditions(self, wish: Wish, facts: ModelFacts) -> dict[str, Array]:
        """Give the guidance scale to models that embed it."""
        if facts.guided_by == "branches":
            return {}
        return {EMBEDDED: np.full(wish.branches, wish.guidance, np.float32)}

    def diffusers_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Leave out the negative prompt, which the pipeline takes with a `true_cfg_scale` only."""
        return {name: value for name, value in arguments.items() if name != "negative_prompt"}

    def unpacked(self, latents: Array, height: int, width: int) -> Array:
        """Undo the pipeline's packing of [B, C, h, w] into tokens [B, h/2 · w/2, C · 4]."""
        batch, tokens, packed = latents.shape
        pixels = round((height * width / tokens) ** 0.5)  # of a token's side
        rows, columns = height // pixels, width // pixels
        apart = latents.reshape(batch, rows, columns, packed // PATCH**2, PATCH, PATCH)
        return apart.transpose(0, 3, 1, 4, 2, 5).reshape(batch, -1, rows * PATCH, columns * PATCH)


def _denoiser(config: Config) -> "torch.nn.Module":
    import torch
    from diffusers import FluxTransformer2DModel

    class Positions(torch.nn.Module):
        """Angles of each token's position, an axis after the other, as pairs of equal numbers.

        diffusers' own takes float64, which compilers do not have; positions of a few hundred lose 1e-5 in float32.
        """

        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [tokens, axes] → [tokens, head]
            angles = []
            for axis, size in enumerate(config.get("axes_dims_rope", (16, 56, 56))):
                exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
                rates = (THETA**-exponents).to(torch.float32)
                angles.append((ids[:, axis, None] * rates).repeat_interleave(2, dim=1))
            every = torch.cat(angles, dim=1)
            return every.cos(), every.sin()

    class Denoiser(torch.nn.Module):
        transformer: Any

        def __init__(self) -> None:
            super().__init__()
            self.transformer = FluxTransformer2DModel.from_config(dict(config))  # type: ignore[no-untyped-call]
            self.transformer.pos_embed = Positions()

        def forward(
            self,
            sample: torch.Tensor,
            timestep: torch.Tensor,
            encoder_hidden_states: torch.Tensor,
            pooled_projections: torch.Tensor,
            guidance_scale: torch.Tensor | None = None,
        ) -> Any:
            rows, columns = sample.shape[2] // PATCH, sample.shape[3] // PATCH
            tokens = torch.nn.functional.pixel_unshuffle(sample, PATCH).flatten(2).transpose(1, 2)
            row = torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, columns).flatten()
            column = torch.arange(columns, dtype=torch.float32)[None].expand(rows, columns).flatten()
            places = torch.stack([torch.zeros_like(row), row, column], dim=1)  # [tokens, 3]
            made = self.transformer(
                hidden_states=tokens,
                encoder_hidden_states=encoder_hidden_states,
                pooled_projections=pooled_projections,
                timestep=timestep / 1000,
                img_ids=places,
                txt_ids=torch.zeros(encoder_hidden_states.shape[1], 3),
                guidance=guidance_scale,
                return_dict=False,
            )[0]
            packed = made.transpose(1, 2).unflatten(2, (rows, columns))
            return torch.nn.functional.pixel_shuffle(packed, PATCH)

    return Denoiser().eval()
