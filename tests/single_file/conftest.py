"""Files in the original layout, written from diffusers' own modules by renames that are written here, backwards."""

import json
import re
from types import SimpleNamespace

import pytest

RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "norm2": "out_layers.0", "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1", "conv_shortcut": "skip_connection",
}  # fmt: skip
UNET = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
}  # fmt: skip
VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
OPEN_CLIP = {
    "layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}  # fmt: skip


def renamed(name, table):
    """Replace the leading words of a name, the weight or bias at its end left."""
    stem, _, kind = name.rpartition(".")
    return f"{table[stem]}.{kind}"


def unet_name(name, layers, attends):
    """One UNet tensor's original name; `attends` says of every level, from the outermost, whether it has attention."""
    if not (match := re.match(r"(down|up|mid)_block", name)):
        return renamed(name, UNET)
    where, rest = match[1], name.split(".")
    if where == "mid":
        kind, index, inner = rest[1], int(rest[2]), ".".join(rest[3:])
        return f"middle_block.1.{inner}" if kind == "attentions" else f"middle_block.{2 * index}.{resnet(inner)}"
    level, kind, index, inner = int(rest[1]), rest[2], int(rest[3]), ".".join(rest[4:])
    if where == "down":
        if kind == "downsamplers":
            return f"input_blocks.{(level + 1) * (layers + 1)}.0.op.{rest[-1]}"
        block = f"input_blocks.{1 + level * (layers + 1) + index}"
    else:
        if kind == "upsamplers":
            slot = 2 if attends[::-1][level] else 1
            return f"output_blocks.{level * (layers + 1) + layers}.{slot}.conv.{rest[-1]}"
        block = f"output_blocks.{level * (layers + 1) + index}"
    return f"{block}.1.{inner}" if kind == "attentions" else f"{block}.0.{resnet(inner)}"


def resnet(inner):
    return renamed(inner, RESNET)


def unet(state, *, layers, attends):
    return {f"model.diffusion_model.{unet_name(name, layers, attends)}": value for name, value in state.items()}


def vae(state, *, levels, prefix="first_stage_model."):
    made = {}
    for name, tensor in state.items():
        half, _, rest = name.partition(".")
        value = tensor
        if attention := re.match(r"mid_block\.attentions\.0\.(.+)\.(weight|bias)", rest):
            rest = f"mid.attn_1.{VAE_ATTENTION[attention[1]]}.{attention[2]}"
            if attention[1] != "group_norm" and attention[2] == "weight":
                value = tensor[:, :, None, None]  # a convolution of one pixel
        elif middle := re.match(r"mid_block\.resnets\.(\d)\.(.+)", rest):
            rest = f"mid.block_{int(middle[1]) + 1}.{middle[2]}"
        elif block := re.match(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)", rest):
            level = int(block[2]) if block[1] == "down" else levels - 1 - int(block[2])
            inner = f"block.{block[4]}" if block[3] == "resnets" else f"{block[1]}sample"
            rest = f"{block[1]}.{level}.{inner}.{block[5]}"
        rest = rest.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
        made[f"{prefix}{half}.{rest}" if rest else f"{prefix}{half}"] = value
    return made


def clip(state, prefix="cond_stage_model.transformer.text_model."):
    return {prefix + name.removeprefix("text_model."): value for name, value in state.items()}


def open_clip(state, prefix):
    import torch

    made = {f"{prefix}logit_scale": torch.tensor(4.6)}
    for long_name, value in state.items():
        name = long_name.removeprefix("text_model.")
        if name == "text_projection.weight":
            made[f"{prefix}text_projection"] = value.T.contiguous()
        elif name.startswith("embeddings.token"):
            made[f"{prefix}token_embedding.weight"] = value
        elif name.startswith("embeddings.position"):
            made[f"{prefix}positional_embedding"] = value
        elif name.startswith("final_layer_norm"):
            made[prefix + name.replace("final_layer_norm", "ln_final")] = value
        elif parts := re.match(r"encoder\.layers\.(\d+)\.self_attn\.q_proj\.(weight|bias)", name):
            joined = [state[long_name.replace("q_proj", f"{which}_proj")] for which in "qkv"]
            made[f"{prefix}transformer.resblocks.{parts[1]}.attn.in_proj_{parts[2]}"] = torch.cat(joined)
        elif not re.search(r"self_attn\.[kv]_proj", name):
            number, inner = re.match(r"encoder\.layers\.(\d+)\.(.+)", name).groups()
            made[f"{prefix}transformer.resblocks.{number}.{renamed(inner, OPEN_CLIP)}"] = value
    return made


# --- tiny models -----------------------------------------------------------------------------------------------------


def tiny_unet(*, widths, attends, heads, context, depth=1, channels=4, **more):
    from diffusers import UNet2DConditionModel

    down = tuple("CrossAttnDownBlock2D" if cross else "DownBlock2D" for cross in attends)
    up = tuple("CrossAttnUpBlock2D" if cross else "UpBlock2D" for cross in reversed(attends))
    return UNet2DConditionModel(
        sample_size=64, in_channels=channels, block_out_channels=widths, layers_per_block=1, down_block_types=down,
        up_block_types=up, attention_head_dim=heads, cross_attention_dim=context, transformer_layers_per_block=depth,
        **more,
    )  # fmt: skip


def tiny_vae():
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(32, 64, 64, 64), layers_per_block=1, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, sample_size=512,
    )  # fmt: skip


def tiny_text(words, kind="CLIPTextModel", act="quick_gelu", layers=2, width=64, **more):
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=words, hidden_size=width, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=16, hidden_act=act, bos_token_id=0, eos_token_id=2, pad_token_id=1, **more,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def models(kind, words):
    """Tiny modules of a kind of model, and their tensors in the original layout: (modules, file)."""
    import torch

    torch.manual_seed(0)
    channels = 9 if "inpainting" in kind else 4
    made = {"vae": tiny_vae()}
    stored = vae(made["vae"].state_dict(), levels=4)
    if kind.startswith("sd"):
        attends = (True, False)
    if kind.startswith("sd1"):
        made["unet"] = tiny_unet(widths=(32, 64), attends=attends, heads=8, context=64, channels=channels)
        made["text_encoder"] = tiny_text(words)
        stored |= clip(made["text_encoder"].state_dict())
    elif kind.startswith("sd2"):
        made["unet"] = tiny_unet(
            widths=(64, 128), attends=attends, heads=(1, 2), context=64, channels=channels,
            use_linear_projection=True, upcast_attention=True,
        )  # fmt: skip
        made["text_encoder"] = tiny_text(words, act="gelu", projection_dim=32)
        stored |= open_clip(made["text_encoder"].state_dict(), "cond_stage_model.model.")
    if kind.startswith("sdxl"):
        refiner = kind == "sdxl-refiner"
        attends = (False, True, False) if refiner else (False, True)
        made["unet"] = tiny_unet(
            widths=(64, 128, 128)[: len(attends)], attends=attends, heads=(1, 2, 2)[: len(attends)],
            context=128 if refiner else 192, depth=2 if refiner else [1, 2], channels=channels,
            use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=128 + (5 if refiner else 6) * 256,
        )  # fmt: skip
        made["text_encoder_2"] = tiny_text(words, "CLIPTextModelWithProjection", "gelu", width=128, projection_dim=128)
        number = 0 if refiner else 1
        stored = stored | open_clip(made["text_encoder_2"].state_dict(), f"conditioner.embedders.{number}.model.")
        if not refiner:
            made["text_encoder"] = tiny_text(words, layers=3)
            stored |= clip(made["text_encoder"].state_dict(), "conditioner.embedders.0.transformer.text_model.")
    stored |= unet(made["unet"].state_dict(), layers=1, attends=attends)
    stored["model_ema.decay"] = torch.tensor(0.9999)
    return {name: module.eval() for name, module in made.items()}, stored


@pytest.fixture(scope="session")
def vocabulary(tiny_checkpoint):
    """A checkpoint's folder with a tokenizer in it, and how many words that has."""
    config = json.loads((tiny_checkpoint / "text_encoder/config.json").read_text())
    return SimpleNamespace(folder=tiny_checkpoint, words=config["vocab_size"])


@pytest.fixture(scope="session")
def single_file(vocabulary, tmp_path_factory):
    """`single_file(kind)` gives a tiny file of a kind of model with the modules it was written from."""
    from safetensors.torch import save_file

    made = {}

    def make(kind):
        if kind not in made:
            modules, stored = models(kind, vocabulary.words)
            path = tmp_path_factory.mktemp("files") / f"{kind}.safetensors"
            save_file({name: value.contiguous() for name, value in stored.items()}, path)
            made[kind] = SimpleNamespace(path=path, modules=modules, stored=stored, tokenizer=str(vocabulary.folder))
        return made[kind]

    return make


@pytest.fixture(autouse=True)
def empty_hub_cache(tmp_path, monkeypatch):
    """No test finds what this machine happens to have."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture(scope="session")
def original():
    """The writers of the original layout: from a module's state dict to the names in a file."""
    return SimpleNamespace(unet=unet, vae=vae, clip=clip, open_clip=open_clip)
