"""Time and memory of exports at full size, on weights that it makes itself.

    python scripts/bench_export.py [--only sdxl --only …] [--folder FOLDER] [--dtype stored]

Checkpoints in 16 bits are kept in FOLDER for the next time: SD1.5 2.1 GB, SDXL 6.9 GB, SD3 medium 5.9 GB and a T5 of
9.5 GB, FLUX 34 GB. T5 and FLUX are files of holes, which take no room; the others are noise, written tensor by tensor.
Each export runs in a process of its own, without the check against PyTorch, which takes the weights in float32. Wall
and processor time include starting Python and imports; the peak is of resident memory, `largest` the component's
largest tensor. `again` is the same command once more: nothing has changed, and it should take no time.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

TEXT = {
    "architectures": ["CLIPTextModel"], "attention_dropout": 0.0, "bos_token_id": 49406, "eos_token_id": 49407,
    "hidden_act": "quick_gelu", "hidden_size": 768, "initializer_factor": 1.0, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 77, "model_type": "clip_text_model",
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1, "projection_dim": 768, "vocab_size": 49408,
}  # fmt: skip
SD15 = {
    "_class_name": "UNet2DConditionModel", "sample_size": 64, "in_channels": 4, "out_channels": 4,
    "center_input_sample": False, "flip_sin_to_cos": True, "freq_shift": 0, "layers_per_block": 2,
    "block_out_channels": [320, 640, 1280, 1280],
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
    "attention_head_dim": 8, "cross_attention_dim": 768, "norm_num_groups": 32, "norm_eps": 1e-05, "act_fn": "silu",
}  # fmt: skip
SDXL = {
    "_class_name": "UNet2DConditionModel", "sample_size": 128, "in_channels": 4, "out_channels": 4,
    "center_input_sample": False, "flip_sin_to_cos": True, "freq_shift": 0, "layers_per_block": 2,
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "attention_head_dim": [5, 10, 20], "cross_attention_dim": 2048, "transformer_layers_per_block": [1, 2, 10],
    "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816, "norm_num_groups": 32, "norm_eps": 1e-05, "act_fn": "silu",
}  # fmt: skip
VAE = {
    "_class_name": "AutoencoderKL", "sample_size": 512, "in_channels": 3, "out_channels": 3, "latent_channels": 4,
    "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32, "act_fn": "silu",
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    "scaling_factor": 0.18215, "force_upcast": True,
}  # fmt: skip
VAE_16 = VAE | {
    "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False, "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
}  # fmt: skip
PROJECTED = {"architectures": ["CLIPTextModelWithProjection"]}
TEXT_2 = TEXT | PROJECTED | {
    "hidden_act": "gelu", "hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 20,
    "num_hidden_layers": 32, "projection_dim": 1280,
}  # fmt: skip
T5_XXL = {
    "architectures": ["T5EncoderModel"], "model_type": "t5", "d_model": 4096, "d_kv": 64, "d_ff": 10240,
    "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu", "vocab_size": 32128,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "is_encoder_decoder": False,
    "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip
SD3_MEDIUM = {
    "_class_name": "SD3Transformer2DModel", "sample_size": 128, "patch_size": 2, "in_channels": 16, "out_channels": 16,
    "num_layers": 24, "attention_head_dim": 64, "num_attention_heads": 24, "joint_attention_dim": 4096,
    "caption_projection_dim": 1536, "pooled_projection_dim": 2048, "pos_embed_max_size": 192,
}  # fmt: skip
FLUX_DEV = {
    "_class_name": "FluxTransformer2DModel", "patch_size": 1, "in_channels": 64, "num_layers": 19,
    "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 4096,
    "pooled_projection_dim": 768, "guidance_embeds": True, "axes_dims_rope": [16, 56, 56],
}  # fmt: skip
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
CHECKPOINTS = {
    "sd15": ("StableDiffusionPipeline", {"unet": SD15, "vae": VAE, "text_encoder": TEXT}),
    "sdxl": (
        "StableDiffusionXLPipeline", {"unet": SDXL, "vae": VAE, "text_encoder": TEXT, "text_encoder_2": TEXT_2}
    ),
    "sd3": (
        "StableDiffusion3Pipeline",
        {"transformer": SD3_MEDIUM, "vae": VAE_16, "text_encoder": TEXT | PROJECTED, "text_encoder_2": TEXT_2,
         "text_encoder_3": T5_XXL},
    ),
    "flux": ("FluxPipeline", {"transformer": FLUX_DEV, "vae": VAE_16, "text_encoder": TEXT, "text_encoder_2": T5_XXL}),
}  # fmt: skip
"""Name → pipeline class and configs of its components."""
HOLLOW = {("flux", "transformer"), ("flux", "text_encoder_2"), ("sd3", "text_encoder_3")}
"""Components whose weights are a file of holes."""

_BLOCK = 16_777_213
"""Numbers in a block of noise: a prime, so that tensors begin at different places. Compilers store equal ones once."""


# --- checkpoints -----------------------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, name: str) -> None:
    """Write configs, and 16-bit weights of the components' own shapes."""
    pipeline, parts = CHECKPOINTS[name]
    if (folder / "model_index.json").exists():
        return
    index: dict[str, Any] = {"_class_name": pipeline}
    for part, config in parts.items():
        library, kind = library_of(config)
        index[part] = [library, kind]
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "config.json").write_text(json.dumps(config, indent=2))
        stem = "model" if library == "transformers" else "diffusion_pytorch_model"
        write_weights(folder / part / f"{stem}.safetensors", shapes_of(config), hollow=(name, part) in HOLLOW)
        if part.startswith("text_encoder"):
            tokenizer = part.replace("text_encoder", "tokenizer")
            write_tokenizer(folder / tokenizer)
            index[tokenizer] = ["transformers", "PreTrainedTokenizerFast"]
    scheduler = {"_class_name": "DDIMScheduler", "clip_sample": False} if "unet" in parts else FLOW
    index["scheduler"] = ["diffusers", scheduler["_class_name"]]
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))


def library_of(config: dict[str, Any]) -> tuple[str, str]:
    """Give library and class of a component."""
    if "_class_name" in config:
        return "diffusers", config["_class_name"]
    return "transformers", config["architectures"][0]


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of what a component stores, from a module without bytes."""
    import importlib

    import torch

    library, kind = library_of(config)
    made = getattr(importlib.import_module(library), kind)
    with torch.device("meta"):
        module = made.from_config(config) if library == "diffusers" else made(made.config_class(**config))
    return {key: tuple(value.shape) for key, value in module.state_dict().items()}


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]], *, hollow: bool = False) -> None:
    """Write fp16 noise, one tensor at a time: one block of it over and over, and no two tensors alike. Or holes."""
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = (0.02 * np.random.default_rng(0).standard_normal(_BLOCK)).astype(np.float16)
    place = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if hollow:
            file.truncate(8 + len(text) + offset)
            return
        for shape in shapes.values():
            left = int(np.prod(shape))
            while left:
                piece = block[place : place + left]
                file.write(piece.tobytes())
                left -= piece.size
                place = (place + piece.size) % block.size


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single letters: its size does not matter here."""
    from tokenizers import Tokenizer, models

    letters = {
        letter: number for number, letter in enumerate(["<|endoftext|>", "<pad>", *"abcdefghijklmnopqrstuvwxyz "])
    }
    folder.mkdir(parents=True, exist_ok=True)
    Tokenizer(models.BPE(letters, [])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer"}))


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(name: str, command: list[str], largest: float) -> None:
    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    words = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.monotonic() - began
    if status:
        sys.exit(words)
    cpu = usage.ru_utime + usage.ru_stime
    print(f"{name:24} {wall:8.1f} {cpu:8.1f} {usage.ru_maxrss / 1e6:8.2f} {largest:8.2f}", flush=True)


def largest_tensor(folder: Path, part: str) -> float:
    """Gigabytes of a component's largest tensor."""
    from trtdiff.export.safetensors_index import read_index

    (path,) = (folder / part).glob("*.safetensors")
    return max(ref.nbytes for ref in read_index(path).values()) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CHECKPOINTS, action="append")
    parser.add_argument("--components", help="Only these.")
    parser.add_argument("--folder", type=Path, default=Path("build/bench_export"))
    parser.add_argument("--dtype", default="stored")
    arguments = parser.parse_args()
    print(f"{'export':24} {'wall s':>8} {'cpu s':>8} {'peak GB':>8} {'largest':>8}")
    for name in arguments.only or CHECKPOINTS:
        checkpoint = arguments.folder / name
        make_checkpoint(checkpoint, name)
        folders = components_of(checkpoint)
        chosen = arguments.components.split(",") if arguments.components else list(folders)
        for component in chosen:
            out = arguments.folder / "exports" / f"{name}-{component}"
            command = [sys.executable, "-c", "from trtdiff.cli import main; main()", "export", str(checkpoint)]
            command += ["-o", str(out), "--dtype", arguments.dtype, "--no-check", "--components", component]
            largest = largest_tensor(checkpoint, folders[component])
            measure(f"{name}-{component}", [*command, "--force"], largest)
            measure("    again", command, largest)
            print(f"    {(out / f'{component}.onnx').stat().st_size / 1e6:.2f} MB of graph", flush=True)


def components_of(checkpoint: Path) -> dict[str, str]:
    """Give component → folder."""
    from trtdiff.checkpoint import Checkpoint
    from trtdiff.families import family_of_pipeline

    opened = Checkpoint.open(str(checkpoint))
    specs = family_of_pipeline(opened.pipeline, where=str(checkpoint)).components(opened.configs)
    return {spec.name: spec.folder for spec in specs}


if __name__ == "__main__":
    main()
