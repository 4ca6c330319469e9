"""Stable Diffusion 1.x and 2.x, and what was distilled from them: one CLIP text encoder, a UNet, an AutoencoderKL."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trtdiff.errors import CheckpointError
from trtdiff.families.autoencoder import latent_facts, vae_components
from trtdiff.families.base import ComponentSpec, Config, ModelFacts, ModelFamily, Reading, Wish, field_of, require_class
from trtdiff.families.clip import run_clip, text_encoder, token_facts
from trtdiff.families.unet import condition_specs, denoiser, embedded_guidance, modes_of
from trtdiff.types import Array


class StableDiffusion(ModelFamily):
    """ε or v prediction (the scheduler's table knows which), inpainting UNets, LCM and turbo among them.

    Image-to-image of a latent consistency model goes as StableDiffusionImg2ImgPipeline does it, skipping steps; the
    pipeline of LCM itself in diffusers spreads all steps over what the strength leaves instead. With schedulers other
    than LCM's, that pipeline would scale no model input, and decode the last estimate of the clean latent.
    """

    name = "stable-diffusion"
    pipelines = (
        "StableDiffusionPipeline",
        "StableDiffusionImg2ImgPipeline",
        "StableDiffusionInpaintPipeline",
        "LatentConsistencyModelPipeline",
        "LatentConsistencyModelImg2ImgPipeline",
    )

    def facts(self, configs: Mapping[str, Config]) -> ModelFacts:
        """Read the latent space from the VAE's config, the native size from the UNet's."""
        require_class(configs, "unet", "UNet2DConditionModel")
        latent = latent_facts(configs, _sample_size(configs["unet"]), where="unet/config.json: sample_size")
        width = field_of(configs, "text_encoder", "hidden_size", int)
        attends = field_of(configs, "unet", "cross_attention_dim", int, 1280)
        if attends != width:
            raise CheckpointError(
                f"the UNet attends to width {attends}, the text encoder has {width}",
                where="unet/config.json: cross_attention_dim, text_encoder/config.json: hidden_size",
                hint="use the text encoder that this UNet was trained with",
            )
        if configs["text_encoder"].get("use_attention_mask"):
            raise CheckpointError(
                "the text encoder hides padding from attention, which is not supported by this version",
                where="text_encoder/config.json: use_attention_mask",
                hint="checkpoints of Stability and their fine-tunes do not",
            )
        tokens = token_facts(configs, "tokenizer", "text_encoder")
        embedded = bool(configs["unet"].get("time_cond_proj_dim"))
        return ModelFacts(
            latent=latent,
            conditions=condition_specs(configs, latent),
            tokens={"tokenizer": tokens},
            guidance=8.5 if embedded else 7.5,
            sizes_multiple_of=max(8, latent.downscale),
            lengths={"tokens": tokens.limit, "context": tokens.limit},
            guided_by="embedded" if embedded else "branches",
            modes=modes_of(configs, latent),
            weighted=True,
            clip_layers=field_of(configs, "text_encoder", "num_hidden_layers", int, 12),
        )

    def components(self, configs: Mapping[str, Config]) -> tuple[ComponentSpec, ...]:
        """Text encoder, denoiser, VAE decoder and VAE encoder."""
        facts = self.facts(configs)
        return (
            text_encoder(configs, "text_encoder", reads="last"),
            denoiser(configs, facts.latent, facts.conditions),
            *vae_components(configs, facts.latent),
        )

    def encode(self, texts: Sequence[str | None], reading: Reading) -> dict[str, Array]:
        """Run the text encoder over padded token ids; its last layer, or one before it, is the condition."""
        made = run_clip(texts, reading, "tokenizer", "text_encoder")
        return {"encoder_hidden_states": made["encoder_hidden_states"]}

    def conditions(self, wish: Wish, facts: ModelFacts) -> dict[str, Array]:
        """Embed the guidance scale for models that were distilled with it."""
        sizes = {spec.name: spec.dims[-1] for spec in facts.conditions}
        if "timestep_cond" not in sizes:
            return {}
        return {
            "timestep_cond": np.stack([embedded_guidance(wish.guidance, int(sizes["timestep_cond"]))] * wish.branches)
        }


def _sample_size(unet: Config) -> Any:
    """Give the native size in latent rows. diffusers' pipelines take less than 64 of their first year for a slip."""
    from packaging.version import InvalidVersion, Version

    size, version = unet.get("sample_size"), unet.get("_diffusers_version")
    try:
        old = version is not None and Version(Version(str(version)).base_version) < Version("0.9.0.dev0")
    except InvalidVersion:
        old = False
    return 64 if old and isinstance(size, int) and size < 64 else size
