"""Which model a file holds, from the names and shapes of its tensors alone; what is none is refused by what it is.

A whole model has a UNet, a VAE and its text encoders under these names:

    UNet           model.diffusion_model.
    VAE            first_stage_model., in some files vae.
    text encoders  cond_stage_model.transformer.       CLIP: Stable Diffusion 1.x
                   cond_stage_model.model.             OpenCLIP: 2.x
                   conditioner.embedders.0.transformer. and conditioner.embedders.1.model.   both: XL
                   conditioner.embedders.0.model.      OpenCLIP: XL refiner
"""

import re
from collections.abc import Mapping
from pathlib import Path

from trtdiff.errors import CheckpointError
from trtdiff.export.safetensors_index import TensorRef
from trtdiff.single_file.published import PUBLISHED
from trtdiff.types import names

UNET = "model.diffusion_model."
VAES = ("first_stage_model.", "vae.")
CLIP = {"sd1": "cond_stage_model.transformer.", "sdxl": "conditioner.embedders.0.transformer."}
"""Model → prefix of its text encoder in transformers' layout."""
OPEN_CLIP = {
    "sd2": "cond_stage_model.model.",
    "sdxl": "conditioner.embedders.1.model.",
    "sdxl-refiner": "conditioner.embedders.0.model.",
}
"""Model → prefix of its text encoder in OpenCLIP's layout."""

_WHOLE = f"give a whole model: {', '.join(published.title for published in PUBLISHED.values())}"
_SAVED = "load it with diffusers, save_pretrained it, and give that folder"
_ADDED = "fuse it into the model it was trained for with diffusers, save_pretrained that, and give the folder"
_UNET_ALONE = "a UNet alone"

LOOKS: tuple[tuple[str, str, str], ...] = (
    # a name in the file matches                                             it looks like          what to do
    (r"lora_(up|down|mid|A|B)\b|_lora\.|\.lora\.|^lora_|\.(hada|lokr)_w1|\.oft_|\.dora_scale",
     "a LoRA: changes to a model's weights", _ADDED),
    (r"\.scale_(weight|input)$|^scaled_fp8$|\.(absmax|quant_map|comfy_quant)$|\.quant_state\.",
     "a model in 8 or 4 bits, with scales of its own", "get the same model's file in 16 bits"),
    (r"^control_model\.|^control_net|^controlnet_|^input_hint_block\.|^lllite_", "a ControlNet", _WHOLE),
    (r"^(image_proj|ip_adapter)\.", "an IP-Adapter", _WHOLE),
    (r"^(emb_params|string_to_param.*|clip_[lg]|<.*>)$", "a textual inversion: a word's embedding", _WHOLE),
    (r"\bmotion_modules\.", "an AnimateDiff motion module", _WHOLE),
    (r"\bjoint_blocks\.", "Stable Diffusion 3", _WHOLE),
    (r"\b(double_blocks|double_stream_blocks|distilled_guidance_layer)\.", "a model of the FLUX kind", _WHOLE),
    (r"\b(clip_txt_mapper|clip_txt_pooled_mapper|channelwise)\.", "Stable Cascade", _WHOLE),
    (r"^(model\.diffusion_model\.)?(patchify_proj|cap_embedder|blocks|layers|transformer_blocks)\.",
     "a diffusion transformer", _WHOLE),
    (rf"^({re.escape(UNET)}|diffusion_model\.)?input_blocks\.", _UNET_ALONE, _WHOLE),
    (r"^(unet\.)?(down_blocks|mid_block|up_blocks)\.", "a UNet alone, in diffusers' names",
     "put it into a diffusers folder as unet/diffusion_pytorch_model.safetensors, and give that folder"),
    (r"^(first_stage_model\.|vae\.)?(encoder|decoder)\.(conv_in|mid|down|up|down_blocks|up_blocks|mid_block)\b",
     "a VAE alone", _WHOLE),
    (r"\btext_model\.|\bresblocks\.", "a text encoder alone", _WHOLE),
)  # fmt: skip
"""What a file that is no whole model looks like; the first row that any of its names matches."""

_OTHERS = {
    ("sd1", 8): "InstructPix2Pix, whose UNet takes 8 channels",
    ("sd2", 5): "Stable Diffusion 2 depth-to-image, whose UNet takes 5 channels",
    ("sd2", 7): "the Stable Diffusion x4 upscaler, whose UNet takes 7 channels",
    ("sdxl", 8): "an XL model that edits pictures, whose UNet takes 8 channels",
}
_KINDS = {
    ("sd1", 4): "sd1", ("sd1", 9): "sd1-inpainting", ("sd2", 4): "sd2", ("sd2", 9): "sd2-inpainting",
    ("sdxl", 4): "sdxl", ("sdxl", 9): "sdxl-inpainting", ("sdxl-refiner", 4): "sdxl-refiner",
}  # fmt: skip
_EMBEDDING = re.compile(r"(text_model\.)?(embeddings\.)?token_embedding\.weight")


def recognise(tensors: Mapping[str, TensorRef], path: Path) -> str:
    """Give the kind of model that a file holds, a key of `PUBLISHED`.

    Raises CheckpointError that says what the file looks like, for everything that is not a whole known model.
    """
    first, other = tensors.get(f"{UNET}input_blocks.0.0.weight"), looks_like(tensors)
    if first is None or len(first.shape) != 4 or other is None or other[0] != _UNET_ALONE:
        what, hint = other or (f"nothing known: it has {names(list(tensors), 3)}", _WHOLE)
        raise CheckpointError(f"{path.name} looks like {what}", where=str(path), hint=hint)
    text = _text_encoders(tensors)
    if text is None or vae_prefix(tensors) is None:
        lacks = " and ".join(
            part for part, there in (("text encoder", text), ("VAE", vae_prefix(tensors))) if there is None
        )
        raise CheckpointError(f"{path.name} has a UNet and no {lacks}", where=str(path), hint=_WHOLE)
    channels = first.shape[1]
    special = _special(tensors, text) or _OTHERS.get((text, channels))
    if special or (text, channels) not in _KINDS:
        what = special or f"no known model: {PUBLISHED[text].title} with a UNet that takes {channels} channels"
        raise CheckpointError(f"{path.name} looks like {what}", where=str(path), hint=f"{_WHOLE}; or {_SAVED}")
    return _KINDS[text, channels]


def is_whole(tensors: Mapping[str, TensorRef]) -> bool:
    """Whether these are the tensors of a model that `recognise` knows."""
    try:
        recognise(tensors, Path())
    except CheckpointError:
        return False
    return True


def looks_like(tensors: Mapping[str, TensorRef]) -> tuple[str, str] | None:
    """Say what the names in a file look like, and what to do with such a file; None for nothing known.

    A whole model looks like its UNet here.
    """
    for pattern, what, hint in LOOKS:
        known = re.compile(pattern)
        if any(known.search(name) for name in tensors):
            return what, hint
    return None


def model_of(kind: str) -> str:
    """Give the model that a kind is built like: a key of `CLIP` or `OPEN_CLIP`."""
    return kind.removesuffix("-inpainting").removesuffix("-base")


def vae_prefix(tensors: Mapping[str, TensorRef]) -> str | None:
    """Give the prefix of the VAE's tensors."""
    return next((prefix for prefix in VAES if f"{prefix}decoder.conv_in.weight" in tensors), None)


def _text_encoders(tensors: Mapping[str, TensorRef]) -> str | None:
    """Give the model whose text encoders the file has."""
    there = {
        prefix
        for prefix in (*CLIP.values(), *OPEN_CLIP.values())
        if any(name.startswith(prefix) and _EMBEDDING.fullmatch(name.removeprefix(prefix)) for name in tensors)
    }
    wanted = {
        model: {prefix for prefix in (CLIP.get(model), OPEN_CLIP.get(model)) if prefix} for model in (*CLIP, *OPEN_CLIP)
    }
    return next((model for model, prefixes in wanted.items() if prefixes <= there), None)


def _special(tensors: Mapping[str, TensorRef], text: str) -> str | None:
    """Name models that have a known one's tensors and something of their own."""
    if "edm_mean" in tensors:
        return "Playground 2.5, which denoises in a space of its own (EDM)"
    if "edm_vpred.sigma_max" in tensors:
        return "an XL model trained with EDM's noise and v prediction, such as CosXL"
    if text in {"sd1", "sd2"} and any(name.startswith(f"{UNET}label_emb.") for name in tensors):
        return "Stable Diffusion with a condition besides the prompt (unCLIP, or an upscaler)"
    return None
