"""A file that is no whole known model is refused by what it is; names as they stand in files that people share."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from trtdiff.checkpoint import Checkpoint
from trtdiff.describe import describe
from trtdiff.errors import CheckpointError

UNET = "model.diffusion_model."
FILES = {
    "a LoRA": [
        "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight",
        "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight",
        "unet.up_blocks.0.attentions.0.transformer_blocks.0.attn1.processor.to_q_lora.down.weight",
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.hada_w1_a",
        "diffusion_model.double_blocks.0.img_attn.qkv.lora_up.weight",
    ],
    "a model in 8 or 4 bits": [
        "scaled_fp8", f"{UNET}output_blocks.0.0.emb_layers.1.scale_weight", f"{UNET}out.2.weight.absmax",
    ],
    "a ControlNet": ["control_model.input_blocks.0.0.weight", "controlnet_cond_embedding.conv_in.weight"],
    "an IP-Adapter": ["image_proj.proj.weight", "ip_adapter.1.to_k_ip.weight"],
    "a textual inversion": ["emb_params", "clip_l"],
    "an AnimateDiff": ["down_blocks.0.motion_modules.0.temporal_transformer.norm.weight"],
    "Stable Diffusion 3": [f"{UNET}joint_blocks.0.context_block.attn.qkv.weight"],
    "a model of the FLUX kind": [
        f"{UNET}double_blocks.0.img_attn.norm.key_norm.scale", "double_blocks.0.img_attn.qkv.weight"
    ],
    "a UNet alone, in diffusers' names": ["down_blocks.0.resnets.0.conv1.weight", "mid_block.resnets.0.conv1.bias"],
    "a UNet alone": ["input_blocks.0.0.weight", "diffusion_model.input_blocks.0.0.weight"],
    "a VAE alone": ["first_stage_model.decoder.conv_in.weight", "encoder.down.0.block.0.conv1.weight",
                    "decoder.up_blocks.0.resnets.0.conv1.weight"],
    "a text encoder alone": ["text_model.embeddings.token_embedding.weight", "transformer.resblocks.0.ln_1.weight"],
    "nothing known: it has model.0.weight": ["model.0.weight"],
}  # fmt: skip


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, names in FILES.items() for name in names])
def test_a_file_is_refused_by_what_it_looks_like(tmp_path, what, name):
    path = tmp_path / "shared.safetensors"
    save_file({name: np.zeros((2, 2), np.float16)}, path)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(str(path))
    assert f"shared.safetensors looks like {what}" in caught.value.message
    assert caught.value.where == str(path)
    assert caught.value.hint
    seems = describe(path).facts.get("looks like", "nothing known")
    assert seems.startswith(what.partition(":")[0])


def changed(made, tmp_path, drop=(), add=(), channels=None):
    stored = {name: value for name, value in made.stored.items() if not name.startswith(tuple(drop) or "-")}
    arrays = {name: np.ascontiguousarray(value.numpy()) for name, value in stored.items()}
    arrays |= {name: np.float32([1]) for name in add}
    if channels:
        arrays[f"{UNET}input_blocks.0.0.weight"] = np.zeros((32, channels, 3, 3), np.float32)
    save_file(arrays, tmp_path / "shared.safetensors")
    return tmp_path / "shared.safetensors"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("sd1", {"drop": ["first_stage_model."]}, "has a UNet and no VAE"),
        ("sd1", {"drop": ["cond_stage_model."]}, "has a UNet and no text encoder"),
        ("sdxl", {"drop": ["conditioner."]}, "has a UNet and no text encoder"),
        ("sd1", {"drop": ["cond_stage_model.", "first_stage_model."]}, "has a UNet and no text encoder and VAE"),
        ("sd1", {"channels": 8}, "looks like InstructPix2Pix"),
        ("sd2", {"channels": 5}, "looks like Stable Diffusion 2 depth-to-image"),
        ("sd1", {"channels": 12}, "looks like no known model: Stable Diffusion 1.x with a UNet that takes 12 channels"),
        ("sdxl", {"add": ["edm_mean", "edm_std"]}, "looks like Playground 2.5"),
        ("sdxl", {"add": ["edm_vpred.sigma_max"]}, "such as CosXL"),
        ("sd2", {"add": [f"{UNET}label_emb.0.0.weight"]}, "unCLIP, or an upscaler"),
        ("sd1", {"add": ["control_model.time_embed.0.weight"]}, "looks like a ControlNet"),
        ("sd1", {"drop": [f"{UNET}out.2."]}, "lacks 'out.2.weight'"),
        ("sd1", {"drop": [f"{UNET}input_blocks.3."]}, "a UNet with levels of unlike blocks"),
        ("sd1", {"drop": [f"{UNET}middle_block.1."]}, "lacks 'middle_block.1.proj_in.weight'"),
        ("sdxl", {"drop": [f"{UNET}middle_block.1.transformer_blocks.1."]}, "2 transformer blocks in the last level"),
    ],
)
def test_a_model_that_is_not_whole_or_not_known_is_refused(single_file, tmp_path, kind, changes, message):
    path = changed(single_file(kind), tmp_path, **changes)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(str(path), tokenizer=single_file(kind).tokenizer)
    assert message in caught.value.message
    assert caught.value.hint


def test_a_missing_tensor_is_named_when_the_component_is_read(single_file, tmp_path):
    path = changed(single_file("sdxl"), tmp_path, drop=[f"{UNET}label_emb.0.2.weight"])
    with pytest.raises(CheckpointError, match=r"unet lacks the tensor 'label_emb\.0\.2\.weight'"):
        Checkpoint.open(str(path)).tensors("unet")


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no file of weights that is known"):
        Checkpoint.open(str(tmp_path / "model.onnx"))


def test_a_whole_model_is_described_as_one(single_file):
    described = describe(single_file("sdxl").path)
    assert described.kind == "checkpoint in one file"
    assert described.facts["pipeline"] == "StableDiffusionXLPipeline"
    assert [row[0] for row in described.tables[0].rows if row[2]] == ["text_encoder", "text_encoder_2", "unet", "vae"]
