"""Stable Diffusion XL, base and refiner: two CLIP text encoders, sizes as conditions, a UNet, an AutoencoderKL."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trtdiff.errors import CheckpointError
from trtdiff.families.autoencoder import latent_facts, vae_components
from trtdiff.families.base import ComponentSpec, Config, ModelFacts, ModelFamily, Reading, Wish, field_of, require_class
from trtdiff.families.clip import run_clip, text_encoder, token_facts
from trtdiff.families.unet import condition_specs, denoiser, embedded_guidance, modes_of
from trtdiff.types import Array, TensorSpec

if TYPE_CHECKING:
    from trtdiff.export.schedule_call import ScheduleCall

TOKENIZERS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2"}
WITH_TARGET, WITH_SCORE = 6, 5
"""Numbers in `time_ids`: original size, crop, target size; a refiner has an aesthetic score for the target size."""


class StableDiffusionXL(ModelFamily):
    """Base, refiner (which has the second text encoder only), inpainting UNets, turbo and lightning."""

    name = "stable-diffusion-xl"
    pipelines = (
        "StableDiffusionXLPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline",
    )

    def facts(self, configs: Mapping[str, Config]) -> ModelFacts:
        """Read the latent space from the VAE's config, all else from the UNet's and the text encoders'."""
        require_class(configs, "unet", "UNet2DConditionModel")
        unet = configs["unet"]
        latent = latent_facts(configs, unet.get("sample_size"), where="unet/config.json: sample_size")
        encoders = _encoders(configs)
        widths = [field_of(configs, encoder, "hidden_size", int) for encoder in encoders]
        attends = field_of(configs, "unet", "cross_attention_dim", int, 1280)
        if attends != sum(widths):
            raise CheckpointError(
                f"the UNet attends to width {attends}, the text encoders have {' + '.join(map(str, widths))}",
                where=f"unet/config.json: cross_attention_dim, {encoders[-1]}/config.json: hidden_size",
                hint="use the text encoders that this UNet was trained with",
            )
        if unet.get("addition_embed_type") != "text_time":
            raise CheckpointError(
                f"the UNet's additional conditions are {unet.get('addition_embed_type')!r}, not 'text_time'",
                where="unet/config.json: addition_embed_type",
                hint="this is no UNet of Stable Diffusion XL",
            )
        pooled = field_of(configs, "text_encoder_2", "projection_dim", int, 512)
        tokens = {TOKENIZERS[encoder]: token_facts(configs, TOKENIZERS[encoder], encoder) for encoder in encoders}
        limit = min(facts.limit for facts in tokens.values())
        embedded, numbers = bool(unet.get("time_cond_proj_dim")), _time_ids(configs, pooled)
        added = (
            TensorSpec("text_embeds", "float32", ("batch", pooled)),
            TensorSpec("time_ids", "float32", ("batch", numbers)),
        )
        return ModelFacts(
            latent=latent,
            conditions=condition_specs(configs, latent, *added),
            tokens=tokens,
            guidance=5.0,
            sizes_multiple_of=max(8, latent.downscale),
            lengths={"tokens": limit, "context": limit},
            guided_by="embedded" if embedded else "branches",
            modes=modes_of(configs, latent),
            weighted=True,
            framed=("original_size", "crop", *(("target_size",) if numbers == WITH_TARGET else ())),
            strengths=(0.3, 0.9999),
            clip_layers=min(field_of(configs, encoder, "num_hidden_layers", int, 12) for encoder in encoders) - 1,
            own={"zeros": bool(configs["model_index"].get("force_zeros_for_empty_prompt", True))},
        )

    def components(self, configs: Mapping[str, Config]) -> tuple[ComponentSpec, ...]:
        """Text encoders, denoiser, VAE decoder and VAE encoder."""
        facts = self.facts(configs)
        encoders = (
            text_encoder(configs, encoder, reads="penultimate", projected=encoder == "text_encoder_2")
            for encoder in _encoders(configs)
        )
        return (
            *encoders,
            denoiser(configs, facts.latent, facts.conditions),
            *vae_components(configs, facts.latent),
        )

    def schedule_call(self, pipeline: str, image_tokens: int) -> "ScheduleCall":  # noqa: ARG002 - all call alike
        """Give the call of the pipelines of Stable Diffusion XL."""
        from trtdiff.export.schedule_call import StableDiffusionXLCall

        return StableDiffusionXLCall()

    def encode(self, texts: Sequence[str | None], reading: Reading) -> dict[str, Array]:
        """Lay the encoders' penultimate layers side by side; the pooled output is the second encoder's.

        Where nobody gave a negative prompt, both are zeros, if the checkpoint says so (`force_zeros_for_empty_prompt`).
        """
        made = [
            run_clip(texts, reading, tokenizer, encoder)
            for encoder, tokenizer in TOKENIZERS.items()
            if tokenizer in reading.facts.tokens
        ]
        states = np.concatenate([one["encoder_hidden_states"] for one in made], axis=-1)
        pooled = made[-1]["pooled"].copy()
        if reading.facts.own["zeros"]:
            absent = [number for number, text in enumerate(texts) if text is None]
            states[absent], pooled[absent] = 0, 0
        return {"encoder_hidden_states": states, "text_embeds": pooled}

    def conditions(self, wish: Wish, facts: ModelFacts) -> dict[str, Array]:
        """Give sizes and crop, the negative branch first.

        A refiner has an aesthetic score in place of the target, and no crop in the negative branch, as in diffusers.
        """
        sizes = {spec.name: spec.dims[-1] for spec in facts.conditions}
        framing = wish.framing
        if sizes["time_ids"] == WITH_SCORE:
            good, bad = framing.score
            rows: list[tuple[float, ...]] = [(*framing.original, 0, 0, bad), (*framing.original, *framing.crop, good)]
        else:
            rows = [(*framing.original, *framing.crop, *framing.target)] * 2
        found = {"time_ids": np.array(rows[-wish.branches :], np.float32)}
        if "timestep_cond" in sizes:
            embedded = embedded_guidance(wish.guidance, int(sizes["timestep_cond"]))
            found["timestep_cond"] = np.stack([embedded] * wish.branches)
        return found


def _encoders(configs: Mapping[str, Config]) -> tuple[str, ...]:
    """Name the text encoders; a refiner has the second one only."""
    return ("text_encoder", "text_encoder_2") if "text_encoder" in configs else ("text_encoder_2",)


def _time_ids(configs: Mapping[str, Config], pooled: int) -> int:
    """Give how many numbers the UNet embeds beside the pooled text."""
    whole = field_of(configs, "unet", "projection_class_embeddings_input_dim", int)
    each = field_of(configs, "unet", "addition_time_embed_dim", int)
    count, rest = divmod(whole - pooled, each)
    if rest or count not in {WITH_TARGET, WITH_SCORE}:
        raise CheckpointError(
            f"the UNet's additional conditions have {whole} numbers: {pooled} are the pooled text's, and "
            f"{whole - pooled} are not {WITH_TARGET} sizes (or {WITH_SCORE}, of a refiner) of {each} numbers each",
            where="unet/config.json: projection_class_embeddings_input_dim; text_encoder_2/config.json: projection_dim",
            hint="use the text encoder that this UNet was trained with",
        )
    return count
