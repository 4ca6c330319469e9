"""What shapes tell of a model in the original layout: widths, depths, channels, vocabularies.

A UNet is written as one list of blocks, input and output, levels following one another:

    input_blocks.0.0                   the first convolution
    input_blocks.N.0.in_layers.2 …     a residual block; .1.transformer_blocks.M … the attention after it
    input_blocks.N.0.op                the convolution that ends a level

How many heads attend is not in the shapes: 8 in Stable Diffusion 1.x, one for every 64 channels in all later models.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trtdiff.errors import CheckpointError
from trtdiff.export.safetensors_index import TensorRef
from trtdiff.single_file.kinds import CLIP, OPEN_CLIP, UNET, model_of, vae_prefix
from trtdiff.single_file.published import PUBLISHED

HEAD = 64
"""Channels of a head, in every text encoder and in the UNets from Stable Diffusion 2 on."""

Shapes = Mapping[str, tuple[int, ...]]


def measured_configs(tensors: Mapping[str, TensorRef], kind: str, path: Path) -> dict[str, dict[str, Any]]:
    """Give the published configs of this kind with what the file's shapes say put over them.

    Raises CheckpointError for a file that lacks a tensor which every such model has, or whose levels are not uniform.
    """
    published = PUBLISHED[kind].configs
    model = model_of(kind)
    try:
        found = {
            "unet": _unet(_under(UNET, tensors), published["unet"]),
            "vae": _vae(_under(vae_prefix(tensors) or "", tensors)),
        }
        if model in CLIP:
            found["text_encoder"] = _clip(_under(CLIP[model], tensors))
        if model in OPEN_CLIP:
            folder = "text_encoder" if model == "sd2" else "text_encoder_2"
            found[folder] = _open_clip(_under(OPEN_CLIP[model], tensors), published[folder])
    except KeyError as error:
        raise CheckpointError(
            f"{path.name} looks like {PUBLISHED[kind].title}, and lacks {error}",
            where=str(path),
            hint="download it again; the copy is incomplete or damaged",
        ) from None
    except (ValueError, IndexError) as error:
        raise CheckpointError(
            f"{path.name} looks like {PUBLISHED[kind].title} of a form that is not known: {error}",
            where=str(path),
            hint="load it with what made it, save it as a diffusers folder, and give that",
        ) from None
    for folder in published:
        if folder.startswith("tokenizer"):
            positions = found[folder.replace("tokenizer", "text_encoder")]["max_position_embeddings"]
            found[folder] = {"model_max_length": positions}
    return {folder: {**config, **found.get(folder, {})} for folder, config in published.items()}


def changed_fields(configs: Mapping[str, Mapping[str, Any]], kind: str) -> dict[str, list[str]]:
    """Name, by folder, the fields that the file's shapes made other than they are published."""
    published = PUBLISHED[kind].configs
    changes = {
        folder: [name for name, value in config.items() if value != published[folder].get(name)]
        for folder, config in configs.items()
        if folder not in {"scheduler", "model_index"}
    }
    return {folder: fields for folder, fields in changes.items() if fields}


# --- UNet -------------------------------------------------------------------------------------------------------------


def _unet(shapes: Shapes, published: Mapping[str, Any]) -> dict[str, Any]:
    levels: list[list[tuple[int, int]]] = [[]]  # by level, of every residual block: channels, transformer blocks after
    for number in range(1, 1 + _highest(r"input_blocks\.(\d+)\.", shapes)):
        block = f"input_blocks.{number}"
        if f"{block}.0.op.weight" in shapes:
            levels.append([])
        else:
            channels = shapes[f"{block}.0.out_layers.3.weight"][0]
            levels[-1].append((channels, 1 + _highest(rf"{block}\.1\.transformer_blocks\.(\d+)\.", shapes)))
    if len({len(level) for level in levels}) != 1 or any(len(set(level)) != 1 for level in levels):
        raise ValueError(f"it has a UNet with levels of unlike blocks: (channels, transformers) {levels}")
    widths, depths = [level[0][0] for level in levels], [level[0][1] for level in levels]
    attends = [depth > 0 for depth in depths]
    linear = len(shapes["middle_block.1.proj_in.weight"]) == 2
    found: dict[str, Any] = {
        "in_channels": shapes["input_blocks.0.0.weight"][1],
        "out_channels": shapes["out.2.weight"][0],
        "block_out_channels": widths,
        "layers_per_block": len(levels[0]),
        "down_block_types": ["CrossAttnDownBlock2D" if cross else "DownBlock2D" for cross in attends],
        "up_block_types": ["CrossAttnUpBlock2D" if cross else "UpBlock2D" for cross in reversed(attends)],
        "cross_attention_dim": shapes["middle_block.1.transformer_blocks.0.attn2.to_k.weight"][1],
        "use_linear_projection": linear,
    }
    middle = 1 + _highest(r"middle_block\.1\.transformer_blocks\.(\d+)\.", shapes)
    found["transformer_layers_per_block"] = _depths(depths, middle, published["transformer_layers_per_block"])
    if isinstance(published["attention_head_dim"], list):
        found["attention_head_dim"] = [width // HEAD for width in widths]
    if "projection_class_embeddings_input_dim" in published:
        found["projection_class_embeddings_input_dim"] = shapes["label_emb.0.0.weight"][1]
    return found


def _depths(depths: list[int], middle: int, published: int | list[int]) -> int | list[int]:
    """Give the transformer blocks of every level as a config says them: the last level's are also the middle's."""
    if depths[-1] not in {0, middle}:
        raise ValueError(f"its UNet has {depths[-1]} transformer blocks in the last level and {middle} in the middle")
    expected = [published] * len(depths) if isinstance(published, int) else published
    there = [depth or None for depth in depths[:-1]] + [middle]
    if len(expected) == len(there) and all(n in {None, usual} for n, usual in zip(there, expected, strict=True)):
        return published
    return [depth or 1 for depth in there]


# --- the others -------------------------------------------------------------------------------------------------------


def _vae(shapes: Shapes) -> dict[str, Any]:
    levels = 1 + _highest(r"encoder\.down\.(\d+)\.block\.", shapes)
    widths = [shapes[f"encoder.down.{level}.block.0.conv2.weight"][0] for level in range(levels)]
    return {
        "block_out_channels": widths,
        "layers_per_block": 1 + _highest(r"encoder\.down\.0\.block\.(\d+)\.", shapes),
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "down_block_types": ["DownEncoderBlock2D"] * levels,
        "up_block_types": ["UpDecoderBlock2D"] * levels,
    }


def _clip(shapes: Shapes) -> dict[str, Any]:
    """Measure an encoder in transformers' layout; files of before its `text_model` lack that word."""
    shapes = {name.removeprefix("text_model."): shape for name, shape in shapes.items()}
    layers = 1 + _highest(r"encoder\.layers\.(\d+)\.", shapes)
    words = shapes["embeddings.token_embedding.weight"]
    positions = shapes["embeddings.position_embedding.weight"][0]
    return _text(words, positions, layers, shapes["encoder.layers.0.mlp.fc1.weight"][0])


def _open_clip(shapes: Shapes, published: Mapping[str, Any]) -> dict[str, Any]:
    """Measure an encoder in OpenCLIP's layout.

    Stable Diffusion 2 reads the state before the last of 24 blocks, and diffusers builds only 23.
    """
    layers = 1 + _highest(r"transformer\.resblocks\.(\d+)\.", shapes)
    words, positions = shapes["token_embedding.weight"], shapes["positional_embedding"][0]
    found = _text(words, positions, layers, shapes["transformer.resblocks.0.mlp.c_fc.weight"][0])
    if published["architectures"] == ["CLIPTextModelWithProjection"]:
        return found | {"projection_dim": shapes["text_projection"][1]}
    return found | {"num_hidden_layers": min(layers, published["num_hidden_layers"])}


def _text(words: tuple[int, ...], positions: int, layers: int, inner: int) -> dict[str, Any]:
    vocabulary, width = words
    if width % HEAD:
        raise ValueError(f"its text encoder's width, {width}, is no multiple of {HEAD}")
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": width // HEAD,
        "max_position_embeddings": positions,
    }


def _under(prefix: str, tensors: Mapping[str, TensorRef]) -> Shapes:
    return {name.removeprefix(prefix): ref.shape for name, ref in tensors.items() if name.startswith(prefix)}


def _highest(pattern: str, names: Iterable[str]) -> int:
    """Give the highest number that stands in the names; -1 where there is none."""
    known = re.compile(pattern)
    return max((int(match[1]) for match in map(known.match, names) if match), default=-1)
