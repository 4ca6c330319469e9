"""PixArt-alpha: T5 with a mask, a transformer that learns the noise's variance too, and the VAE of Stable Diffusion."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trtdiff.errors import CheckpointError
from trtdiff.families import t5
from trtdiff.families.autoencoder import latent_facts, vae_components
from trtdiff.families.base import (
    ComponentSpec,
    Config,
    Integers,
    ModelFacts,
    ModelFamily,
    Reading,
    Uniform,
    Wish,
    field_of,
    require_class,
)
from trtdiff.families.transformer import denoiser
from trtdiff.types import Array, TensorSpec

if TYPE_CHECKING:
    import torch

    from trtdiff.export.schedule_call import ScheduleCall

T5_TOKENS = 120
"""Of a prompt: the pipeline's own `max_sequence_length`."""
HIDDEN = -10000.0
"""Added to the score of a token that is padding: diffusers' number."""
LARGE = 128
"""Native latent rows of the checkpoints that take sizes as conditions."""


class PixArt(ModelFamily):
    """`PixArtAlphaPipeline` checkpoints, 256 to 1024 pixels. Prompts are put into lower case, as the pipeline does."""

    name = "pixart"
    pipelines = ("PixArtAlphaPipeline",)

    def facts(self, configs: Mapping[str, Config]) -> ModelFacts:
        """Read the latent space from the VAE's config, the rest from the transformer's."""
        require_class(configs, "transformer", "PixArtTransformer2DModel", "Transformer2DModel")
        size = configs["transformer"].get("sample_size")
        latent = latent_facts(configs, size, where="transformer/config.json: sample_size")
        width = field_of(configs, "text_encoder", "d_model", int)
        taken = field_of(configs, "transformer", "caption_channels", int)
        if taken != width or configs["transformer"].get("in_channels", 4) != latent.channels:
            raise CheckpointError(
                f"the transformer takes captions of width {taken}, T5 has {width}; it takes "
                f"{configs['transformer'].get('in_channels', 4)} channels, the VAE makes {latent.channels}",
                where="transformer/config.json: caption_channels, in_channels",
                hint="use the text encoder and VAE that this transformer was trained with",
            )
        sizes = (TensorSpec("resolution", "float32", ("batch", 2)), TensorSpec("aspect_ratio", "float32", ("batch", 1)))
        return ModelFacts(
            latent=latent,
            conditions=(
                TensorSpec("encoder_hidden_states", "float32", ("batch", "context", width)),
                TensorSpec("attention_mask", "float32", ("batch", "context")),
                *(sizes if size == LARGE else ()),
            ),
            tokens={"tokenizer": t5.token_facts(configs, "tokenizer", T5_TOKENS)},
            guidance=4.5,
            sizes_multiple_of=latent.downscale * field_of(configs, "transformer", "patch_size", int, 2),
            lengths={t5.TOKENS: T5_TOKENS, "context": T5_TOKENS},
            modes=("text",),
        )

    def components(self, configs: Mapping[str, Config]) -> tuple[ComponentSpec, ...]:
        """Text encoder, transformer, VAE decoder and VAE encoder."""
        facts = self.facts(configs)
        transformer = denoiser(
            facts,
            partial(_denoiser, sized=len(facts.conditions) > 2),
            waves=["adaln_single.emb.time_proj", "adaln_single.emb.additional_condition_proj"],
            values={
                "attention_mask": Integers(2),
                "resolution": Uniform(256, 1024),
                "aspect_ratio": Uniform(0.5, 2),
            },
        )
        return (
            t5.text_encoder(configs, "text_encoder", masked=True),
            transformer,
            *vae_components(configs, facts.latent)[:1],
        )

    def schedule_call(self, pipeline: str, image_tokens: int) -> "ScheduleCall":  # noqa: ARG002 - all call alike
        """Give the call of PixArt's pipeline."""
        from trtdiff.export.schedule_call import PixArtCall

        return PixArtCall()

    def diffusers_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Say the callback in the pipeline's old words, and keep the size and the prompt as they were asked for."""
        found = {**arguments, "use_resolution_binning": False, "clean_caption": False}
        keep = found.pop("callback_on_step_end")
        found["callback"] = lambda step, timestep, latents: keep(None, step, timestep, {"latents": latents})
        return found

    def encode(self, texts: Sequence[str | None], reading: Reading) -> dict[str, Array]:
        """Give T5's words and which of them are padding."""
        tokenizer = reading.tokenizers["tokenizer"]
        pairs = [tokenizer.encode_with_mask((text or "").lower().strip()) for text in texts]
        ids, mask = (np.stack(rows) for rows in zip(*pairs, strict=True))
        made = reading.sessions["text_encoder"].run({"input_ids": ids, "attention_mask": mask})
        return {**made, "attention_mask": mask.astype(np.float32)}

    def conditions(self, wish: Wish, facts: ModelFacts) -> dict[str, Array]:
        """Give the size to checkpoints of 1024 pixels."""
        if len(facts.conditions) == 2:
            return {}
        one = np.ones((wish.branches, 1), np.float32)
        return {
            "resolution": one * np.array([wish.height, wish.width], np.float32),
            "aspect_ratio": one * np.float32(wish.height / wish.width),
        }


def _denoiser(config: Config, *, sized: bool) -> "torch.nn.Module":
    import torch
    from diffusers import PixArtTransformer2DModel

    class Denoiser(torch.nn.Module):
        transformer: Any

        def __init__(self) -> None:
            super().__init__()
            self.transformer = PixArtTransformer2DModel.from_config(dict(config))  # type: ignore[no-untyped-call]

        def forward(
            self,
            sample: torch.Tensor,
            timestep: torch.Tensor,
            text: torch.Tensor,
            mask: torch.Tensor,
            *sizes: torch.Tensor,
        ) -> Any:
            resolution, aspect_ratio = sizes if sized else (None, None)
            patch = self.transformer.config.patch_size
            queries = (sample.shape[2] // patch) * (sample.shape[3] // patch)
            bias = ((1 - mask) * HIDDEN)[:, None].expand(-1, queries, -1)  # ONNX Runtime wants a row for every query
            made = self.transformer(
                sample,
                encoder_hidden_states=text,
                encoder_attention_mask=bias,
                timestep=timestep,
                added_cond_kwargs={"resolution": resolution, "aspect_ratio": aspect_ratio},
                return_dict=False,
            )[0]
            return made.chunk(2, dim=1)[0] if made.shape[1] == 2 * sample.shape[1] else made

    return Denoiser().eval()
