"""Random checkpoints of every family, made with diffusers' own classes: real configs scaled down to a few kilobytes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = (
    "a", "an", "the", "red", "green", "blue", "small", "large", "photo", "picture", "of", "on", "in", "with", "cat",
    "dog", "house", "tree", "ship", "seven", "three", "blurry",
)  # fmt: skip
TOKENS = 16
"""Row length of the tiny CLIP encoders."""


# --- tokenizers -------------------------------------------------------------------------------------------------------


def clip_tokenizer(folder: Path, *, pad: str = "<|endoftext|>") -> Any:
    """Make a CLIP tokenizer of letters and a few whole words."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    vocabulary, merges = [*letters, *(letter + "</w>" for letter in letters)], []
    for word in WORDS:
        left = word[0]
        for place, letter in enumerate(word[1:], start=1):
            right = letter + "</w>" if place == len(word) - 1 else letter
            if (pair := f"{left} {right}") not in merges:
                merges.append(pair)
            left += right
            if left not in vocabulary:
                vocabulary.append(left)
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return CLIPTokenizer.from_pretrained(folder, model_max_length=TOKENS, pad_token=pad)


def t5_tokenizer() -> Any:
    """Make a T5 tokenizer of letters and a few whole words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(f"▁{word}", -2.0) for word in WORDS] + [("▁", -3.0)]
    pieces += [(chr(code), -5.0) for code in range(33, 127)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return T5TokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_ids=0,
        model_max_length=64,
    )


# --- components -------------------------------------------------------------------------------------------------------


def clip_encoder(size: int, *, width: int = 32, layers: int = 3, projection: int = 0, act: str = "quick_gelu") -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=size, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=2, max_position_embeddings=TOKENS, bos_token_id=size - 2, eos_token_id=size - 1,
        pad_token_id=size - 1,
        projection_dim=projection or 32, hidden_act=act,
    )  # fmt: skip
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)


def t5_encoder(size: int, *, width: int = 32) -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(
            vocab_size=size,
            d_model=width,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            is_encoder_decoder=False,
            use_cache=False,
        )
    )


def vae(*, channels: int = 4, levels: int = 4, **config: Any) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16,) + (32,) * (levels - 1), layers_per_block=1, norm_num_groups=16,
        latent_channels=channels, down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels, sample_size=64, **config,
    )  # fmt: skip


def unet(**config: Any) -> Any:
    from diffusers import UNet2DConditionModel

    base = {
        "sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 16,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 32, "attention_head_dim": (2, 4),
    }  # fmt: skip
    return UNet2DConditionModel(**{**base, **config})


def ddim(**config: Any) -> Any:
    from diffusers import DDIMScheduler

    base = {
        "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False,
        "set_alpha_to_one": False, "steps_offset": 1,
    }  # fmt: skip
    return DDIMScheduler(**{**base, **config})


def euler(**config: Any) -> Any:
    from diffusers import EulerDiscreteScheduler

    return EulerDiscreteScheduler(
        **{"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1,
           "timestep_spacing": "leading", **config}
    )  # fmt: skip


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _stable_diffusion(folder: Path, *, scheduler: Any = None, pad: str = "<|endoftext|>", act: str = "quick_gelu",
                      pipeline: str = "StableDiffusionPipeline", **config: Any) -> Any:  # fmt: skip
    import diffusers

    tokenizer = clip_tokenizer(folder.parent / f"{folder.name}-tokenizer", pad=pad)
    return getattr(diffusers, pipeline)(
        vae=vae(), text_encoder=clip_encoder(len(tokenizer), act=act), tokenizer=tokenizer, unet=unet(**config),
        scheduler=scheduler or ddim(), safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def sd1(folder: Path) -> Any:
    """Stable Diffusion 1.x, with three levels of the UNet."""
    return _stable_diffusion(
        folder, block_out_channels=(32, 48, 64), attention_head_dim=(2, 3, 4),  # heads, of 16 channels each
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def sd2(folder: Path) -> Any:
    """2.x at 768 pixels: v-prediction, linear projections, upcast attention, gelu, `!` as padding."""
    return _stable_diffusion(
        folder, scheduler=ddim(prediction_type="v_prediction"), pad="!", act="gelu", use_linear_projection=True,
        upcast_attention=True,
    )  # fmt: skip


def sd_inpaint(folder: Path) -> Any:
    """The 9-channel UNet of 1.x inpainting."""
    return _stable_diffusion(folder, pipeline="StableDiffusionInpaintPipeline", in_channels=9)


def lcm(folder: Path) -> Any:
    """Latent consistency model: the guidance scale is embedded."""
    from diffusers import LCMScheduler

    return _stable_diffusion(
        folder, pipeline="LatentConsistencyModelPipeline", time_cond_proj_dim=24,
        scheduler=LCMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False),
    )  # fmt: skip


def _sdxl_parts(folder: Path, numbers: int, width: int, **config: Any) -> dict[str, Any]:
    tokenizer = clip_tokenizer(folder.parent / f"{folder.name}-tokenizer")
    return {
        "vae": vae(scaling_factor=0.13025, force_upcast=True),
        "text_encoder_2": clip_encoder(len(tokenizer), width=48, layers=4, projection=40, act="gelu"),
        "tokenizer_2": clip_tokenizer(folder.parent / f"{folder.name}-tokenizer_2", pad="!"),
        "unet": unet(
            cross_attention_dim=width, addition_embed_type="text_time", addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=8 * numbers + 40, use_linear_projection=True,
            transformer_layers_per_block=(1, 2), **config,
        ),
        "scheduler": euler(),
        "tokenizer": tokenizer,
        "text_encoder": clip_encoder(len(tokenizer)),
    }  # fmt: skip


def sdxl(folder: Path) -> Any:
    """The base model."""
    from diffusers import StableDiffusionXLPipeline

    return StableDiffusionXLPipeline(**_sdxl_parts(folder, 6, 80), force_zeros_for_empty_prompt=True)


def sdxl_refiner(folder: Path) -> Any:
    """The refiner: one text encoder, an aesthetic score in place of the target size."""
    from diffusers import StableDiffusionXLImg2ImgPipeline

    parts = {**_sdxl_parts(folder, 5, 48), "tokenizer": None, "text_encoder": None}
    return StableDiffusionXLImg2ImgPipeline(**parts, requires_aesthetics_score=True, force_zeros_for_empty_prompt=False)


def _sd3(folder: Path, *, t5: bool, **config: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    tokenizer = clip_tokenizer(folder.parent / f"{folder.name}-tokenizer")
    words = t5_tokenizer() if t5 else None
    transformer = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=16, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=96, caption_projection_dim=32, pooled_projection_dim=72, out_channels=16,
        pos_embed_max_size=24, **config,
    )  # fmt: skip
    return StableDiffusion3Pipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(
            channels=16, scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False
        ),
        text_encoder=clip_encoder(len(tokenizer), projection=32), tokenizer=tokenizer,
        text_encoder_2=clip_encoder(len(tokenizer), width=48, projection=40, act="gelu"),
        tokenizer_2=clip_tokenizer(folder.parent / f"{folder.name}-tokenizer_2", pad="!"),
        text_encoder_3=t5_encoder(len(words), width=96) if words else None, tokenizer_3=words,
    )  # fmt: skip


def sd3(folder: Path) -> Any:
    """Stable Diffusion 3 medium, with T5."""
    return _sd3(folder, t5=True)


def sd35_without_t5(folder: Path) -> Any:
    """3.5: normalized queries and keys, a second attention in the first block; T5 left out."""
    return _sd3(folder, t5=False, qk_norm="rms_norm", dual_attention_layers=(0,))


def _flux(folder: Path, *, guided: bool, **schedule: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    tokenizer, words = clip_tokenizer(folder.parent / f"{folder.name}-tokenizer"), t5_tokenizer()
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=guided, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return FluxPipeline(
        transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(**schedule),
        vae=vae(scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=clip_encoder(len(tokenizer)), tokenizer=tokenizer,
        text_encoder_2=t5_encoder(len(words)), tokenizer_2=words,
    )  # fmt: skip


def flux_dev(folder: Path) -> Any:
    """FLUX.1 dev: embedded guidance, a schedule that shifts with the picture's size."""
    return _flux(folder, guided=True, shift=3.0, use_dynamic_shifting=True)


def flux_schnell(folder: Path) -> Any:
    """FLUX.1 schnell: no guidance, a fixed schedule."""
    return _flux(folder, guided=False, shift=1.0)


def _pixart(size: int) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        from diffusers import DPMSolverMultistepScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel

        words = t5_tokenizer()
        return PixArtAlphaPipeline(
            tokenizer=words, text_encoder=t5_encoder(len(words)), vae=vae(levels=2),
            transformer=PixArtTransformer2DModel(
                sample_size=size, patch_size=2, in_channels=4, out_channels=8, num_layers=2, attention_head_dim=8,
                num_attention_heads=6, cross_attention_dim=48, caption_channels=32, norm_type="ada_norm_single",
                interpolation_scale=size // 32,
            ),
            scheduler=DPMSolverMultistepScheduler(
                algorithm_type="dpmsolver++", solver_order=2, beta_schedule="linear", beta_start=0.0001, beta_end=0.02
            ),
        )  # fmt: skip

    return make


KINDS: dict[str, Callable[[Path], Any]] = {
    "sd1": sd1,
    "sd2": sd2,
    "sd-inpaint": sd_inpaint,
    "lcm": lcm,
    "sdxl": sdxl,
    "sdxl-refiner": sdxl_refiner,
    "sd3": sd3,
    "sd35-without-t5": sd35_without_t5,
    "flux-dev": flux_dev,
    "flux-schnell": flux_schnell,
    "pixart": _pixart(128),
}
"""Kind of checkpoint → what makes its pipeline."""


def make(kind: str, folder: Path) -> Path:
    """Save a random checkpoint of this kind."""
    import torch

    torch.manual_seed(0)
    pipeline = KINDS[kind](folder)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            _liven(part)
    pipeline.save_pretrained(folder)
    return folder


def _liven(module: Any) -> None:
    """Let parameters that a class begins with as zeros (the last layers of transformers) do something."""
    import torch

    for parameter in module.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
