"""Facts of the published models: the configs that a file in the original layout does not carry.

They are what the models' own diffusers repositories say, less the fields that have the classes' default value.
Whatever shapes tell (widths, depths, vocabularies) is measured in the file and put over these, in `measured`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Published:
    """One kind of model."""

    title: str
    pipeline: str
    """The diffusers pipeline class."""
    configs: Mapping[str, Config]
    """Component folder → config."""
    model_index: Config
    """What else the pipeline's model_index.json says."""


_TRAINED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
_PNDM = {
    "_class_name": "PNDMScheduler", **_TRAINED, "prediction_type": "epsilon", "set_alpha_to_one": False,
    "skip_prk_steps": True, "steps_offset": 1, "clip_sample": False, "timestep_spacing": "leading",
}  # fmt: skip
_DDIM = {
    "_class_name": "DDIMScheduler", **_TRAINED, "prediction_type": "v_prediction", "set_alpha_to_one": False,
    "steps_offset": 1, "clip_sample": False, "timestep_spacing": "leading",
}  # fmt: skip
_EULER = {
    "_class_name": "EulerDiscreteScheduler", **_TRAINED, "prediction_type": "epsilon", "interpolation_type": "linear",
    "steps_offset": 1, "timestep_spacing": "leading", "use_karras_sigmas": False,
}  # fmt: skip

ZERO_SNR = {"_class_name": "DDIMScheduler", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
"""What a model trained down to a signal of zero needs, over a scheduler's config; PNDM and others cannot do it.

The last timestep, which alone has no signal, must be sampled: hence `trailing` (https://arxiv.org/abs/2305.08891)."""

_WORDS = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
_TOKENIZER = {
    "tokenizer_class": "CLIPTokenizer", "model_max_length": 77, **_WORDS, "pad_token": "<|endoftext|>"
}  # fmt: skip
_OPEN_TOKENIZER = {**_TOKENIZER, "pad_token": "!"}

_CLIP = {
    "architectures": ["CLIPTextModel"], "model_type": "clip_text_model", "vocab_size": 49408, "hidden_size": 768,
    "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 77,
    "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "projection_dim": 768,
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
_OPEN_CLIP_H = {
    **_CLIP, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23, "num_attention_heads": 16,
    "hidden_act": "gelu", "projection_dim": 512,
}  # fmt: skip
_OPEN_CLIP_G = {
    **_CLIP, "architectures": ["CLIPTextModelWithProjection"], "hidden_size": 1280, "intermediate_size": 5120,
    "num_hidden_layers": 32, "num_attention_heads": 20, "hidden_act": "gelu", "projection_dim": 1280,
}  # fmt: skip

_VAE = {
    "_class_name": "AutoencoderKL", "in_channels": 3, "out_channels": 3, "latent_channels": 4, "sample_size": 512,
    "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32, "act_fn": "silu",
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    "scaling_factor": 0.18215,
}  # fmt: skip
_XL_VAE = {**_VAE, "sample_size": 1024, "scaling_factor": 0.13025, "force_upcast": True}

_UNET = {
    "_class_name": "UNet2DConditionModel", "sample_size": 64, "in_channels": 4, "out_channels": 4,
    "block_out_channels": [320, 640, 1280, 1280], "layers_per_block": 2, "cross_attention_dim": 768,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    "attention_head_dim": 8, "transformer_layers_per_block": 1, "use_linear_projection": False,
    "act_fn": "silu", "norm_num_groups": 32, "norm_eps": 1e-5, "flip_sin_to_cos": True, "freq_shift": 0,
    "center_input_sample": False, "downsample_padding": 1, "mid_block_scale_factor": 1,
}  # fmt: skip
_V2_UNET = {
    **_UNET, "cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20], "use_linear_projection": True,
    "upcast_attention": True,
}  # fmt: skip
_XL_UNET = {
    **_UNET, "sample_size": 128, "block_out_channels": [320, 640, 1280], "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D"] + ["CrossAttnDownBlock2D"] * 2,
    "up_block_types": ["CrossAttnUpBlock2D"] * 2 + ["UpBlock2D"],
    "attention_head_dim": [5, 10, 20], "transformer_layers_per_block": [1, 2, 10], "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
_REFINER_UNET = {
    **_XL_UNET, "block_out_channels": [384, 768, 1536, 1536], "cross_attention_dim": 1280,
    "down_block_types": ["DownBlock2D"] + ["CrossAttnDownBlock2D"] * 2 + ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 2 + ["UpBlock2D"],
    "attention_head_dim": [6, 12, 24, 24], "transformer_layers_per_block": 4,
    "projection_class_embeddings_input_dim": 2560,
}  # fmt: skip

_V1 = {"scheduler": _PNDM, "text_encoder": _CLIP, "tokenizer": _TOKENIZER, "unet": _UNET, "vae": _VAE}
_V2 = {
    "scheduler": _DDIM, "text_encoder": _OPEN_CLIP_H, "tokenizer": _OPEN_TOKENIZER,
    "unet": {**_V2_UNET, "sample_size": 96}, "vae": {**_VAE, "sample_size": 768},
}  # fmt: skip
_V2_BASE = {**_V2, "scheduler": _PNDM, "unet": _V2_UNET, "vae": _VAE}
_XL = {
    "scheduler": _EULER, "text_encoder": _CLIP, "text_encoder_2": _OPEN_CLIP_G, "tokenizer": _TOKENIZER,
    "tokenizer_2": _OPEN_TOKENIZER, "unet": _XL_UNET, "vae": _XL_VAE,
}  # fmt: skip
_REFINER = {name: _XL[name] for name in ("scheduler", "text_encoder_2", "tokenizer_2", "vae")} | {"unet": _REFINER_UNET}


def _inpainting(configs: Mapping[str, Config]) -> dict[str, Config]:
    """Give a model's configs with the nine channels of an inpainting UNet: latent, mask, masked latent."""
    return {**configs, "unet": {**configs["unet"], "in_channels": 9}}


_SAFETY = {
    "safety_checker": [None, None], "feature_extractor": [None, None], "image_encoder": [None, None],
    "requires_safety_checker": False,
}  # fmt: skip
_EMPTY_PROMPT = {"force_zeros_for_empty_prompt": True}
_AESTHETIC = {
    "force_zeros_for_empty_prompt": False, "requires_aesthetics_score": True,
    "text_encoder": [None, None], "tokenizer": [None, None],
}  # fmt: skip

PUBLISHED: Mapping[str, Published] = {
    "sd1": Published("Stable Diffusion 1.x", "StableDiffusionPipeline", _V1, _SAFETY),
    "sd1-inpainting": Published(
        "Stable Diffusion 1.x inpainting", "StableDiffusionInpaintPipeline", _inpainting(_V1), _SAFETY
    ),
    "sd2": Published("Stable Diffusion 2.x", "StableDiffusionPipeline", _V2, _SAFETY),
    "sd2-base": Published("Stable Diffusion 2.x base", "StableDiffusionPipeline", _V2_BASE, _SAFETY),
    "sd2-inpainting": Published(
        "Stable Diffusion 2.x inpainting", "StableDiffusionInpaintPipeline", _inpainting(_V2_BASE), _SAFETY
    ),
    "sdxl": Published("Stable Diffusion XL", "StableDiffusionXLPipeline", _XL, _EMPTY_PROMPT),
    "sdxl-inpainting": Published(
        "Stable Diffusion XL inpainting", "StableDiffusionXLInpaintPipeline", _inpainting(_XL), _EMPTY_PROMPT
    ),
    "sdxl-refiner": Published(
        "Stable Diffusion XL refiner", "StableDiffusionXLImg2ImgPipeline", _REFINER, _AESTHETIC
    ),
}  # fmt: skip
"""Kind → its facts."""
