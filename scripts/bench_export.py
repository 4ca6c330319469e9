"""Time and memory of exports at full size, on random weights that it makes itself.

    python scripts/bench_export.py [--only sd15-unet|sd15|sdxl-unet] [--folder FOLDER] [--dtype stored]

Checkpoints (fp16: SD1.5 2.1 GB, SDXL's UNet 5.1 GB) are written tensor by tensor and kept in FOLDER for the next time.
Each export runs in a process of its own, without the check against PyTorch, which takes the weights in float32. Wall
and processor time include starting Python and imports; the peak is of resident memory. `again` is the same command
once more: nothing has changed, and it should take no time.
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
    "scaling_factor": 0.18215,
}  # fmt: skip

_BLOCK = 16_777_213
"""Numbers in a block of noise: a prime, so that tensors begin at different places. Compilers store equal ones once."""
CASES = ("sd15-unet", "sd15", "sdxl-unet")


# --- random checkpoints ----------------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, parts: dict[str, dict[str, Any]]) -> None:
    """Write configs and random fp16 weights of the components' own shapes."""
    if (folder / "model_index.json").exists():
        return
    for name, config in parts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=2))
        stem = "model" if name == "text_encoder" else "diffusion_pytorch_model"
        write_random(folder / name / f"{stem}.safetensors", shapes_of(name, config))
    (folder / "scheduler").mkdir(exist_ok=True)
    (folder / "scheduler" / "scheduler_config.json").write_text(
        json.dumps({"_class_name": "DDIMScheduler", "clip_sample": False})
    )
    write_tokenizer(folder / "tokenizer")
    index = {"_class_name": "StableDiffusionPipeline", "scheduler": ["diffusers", "DDIMScheduler"],
             "tokenizer": ["transformers", "CLIPTokenizer"]}  # fmt: skip
    for name, config in parts.items():
        library = "transformers" if name == "text_encoder" else "diffusers"
        index[name] = [library, config.get("_class_name", "CLIPTextModel")]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))


def shapes_of(name: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a component's parameters, from a module without bytes."""
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.device("meta"):
        if name == "text_encoder":
            module = CLIPTextModel(CLIPTextConfig(**config))
        else:
            module = {"unet": UNet2DConditionModel, "vae": AutoencoderKL}[name].from_config(config)
    return {key: tuple(value.shape) for key, value in module.named_parameters()}


def write_random(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write fp16 noise, one tensor at a time: one block of it over and over, and no two tensors alike."""
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

    letters = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    folder.mkdir(parents=True, exist_ok=True)
    Tokenizer(models.BPE(letters, [])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer"}))


# --- SDXL's UNet, which no family describes yet ----------------------------------------------------------------------


def export_sdxl_unet(checkpoint: Path, out: Path, dtype: str) -> None:
    import torch
    from diffusers import UNet2DConditionModel

    from trtdiff.checkpoint import Checkpoint
    from trtdiff.export.export import export_components
    from trtdiff.families.base import ComponentSpec
    from trtdiff.families.stable_diffusion import ALWAYS_PASS_SIZES
    from trtdiff.types import TensorSpec

    class Denoiser(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.unet = UNet2DConditionModel.from_config(dict(config))
            self.unet.num_upsamplers = ALWAYS_PASS_SIZES

        def forward(self, sample: Any, timestep: Any, states: Any, text_embeds: Any, time_ids: Any) -> Any:
            added = {"text_embeds": text_embeds, "time_ids": time_ids}
            return self.unet(sample, timestep, states, added_cond_kwargs=added, return_dict=False)[0]

    latents = ("batch", 4, "height/8", "width/8")
    spec = ComponentSpec(
        name="denoiser",
        folder="unet",
        inputs=(
            TensorSpec("sample", "float32", latents),
            TensorSpec("timestep", "float32", ("batch",)),
            TensorSpec("encoder_hidden_states", "float32", ("batch", "tokens", 2048)),
            TensorSpec("text_embeds", "float32", ("batch", 1280)),
            TensorSpec("time_ids", "float32", ("batch", 6)),
        ),
        outputs=(TensorSpec("prediction", "float32", latents),),
        build=Denoiser,
        prefix="unet",
    )
    opened = Checkpoint.open(str(checkpoint))
    out.mkdir(parents=True, exist_ok=True)
    for _, component, report in export_components(
        [spec], opened.configs["unet"], opened.tensors("unet"), out, dtype=dtype, check=False
    ):
        print(component.graph, report)


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(name: str, command: list[str]) -> None:
    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    words = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.monotonic() - began
    if status:
        sys.exit(words)
    cpu = usage.ru_utime + usage.ru_stime
    print(f"{name:20} {wall:8.1f} {cpu:8.1f} {usage.ru_maxrss / 1e6:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--folder", type=Path, default=Path("build/bench_export"))
    parser.add_argument("--dtype", default="stored")
    parser.add_argument("--child", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        export_sdxl_unet(*arguments.child, arguments.dtype)
        return
    print(f"{'export':20} {'wall s':>8} {'cpu s':>8} {'peak GB':>8}")
    for case in CASES if arguments.only is None else (arguments.only,):
        out = arguments.folder / "exports" / case
        if case == "sdxl-unet":
            checkpoint = arguments.folder / "sdxl"
            make_checkpoint(checkpoint, {"unet": SDXL})
            command = [sys.executable, __file__, "--dtype", arguments.dtype, "--child", str(checkpoint), str(out)]
            measure(case, command)
        else:
            checkpoint = arguments.folder / "sd15"
            make_checkpoint(checkpoint, {"unet": SD15, "vae": VAE, "text_encoder": TEXT})
            command = [sys.executable, "-c", "from trtdiff.cli import main; main()", "export", str(checkpoint)]
            command += ["-o", str(out), "--dtype", arguments.dtype, "--no-check"]
            if case == "sd15-unet":
                command += ["--components", "denoiser"]
            measure(case, [*command, "--force"])
            measure(f"{case}, again", command)
        for graph in sorted(out.glob("*.onnx")):
            print(f"    {graph.name}: {graph.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
