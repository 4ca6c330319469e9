"""The published models at their real size: headers over sparse files, modules without memory."""

import json

import pytest

from trtdiff.checkpoint import Checkpoint
from trtdiff.export.weights import find_needed
from trtdiff.single_file.published import PUBLISHED

pytest.importorskip("diffusers")
PARAMETERS = {
    "sd1": {"text_encoder": 123_060_480, "unet": 859_520_964, "vae": 83_653_863},
    "sd2": {"text_encoder": 340_387_840, "unet": 865_910_724, "vae": 83_653_863},
    "sdxl": {
        "text_encoder": 123_060_480, "text_encoder_2": 694_659_840, "unet": 2_567_463_684, "vae": 83_653_863,
    },
}  # fmt: skip
"""As the models' own pages and papers count them."""
FILES = {"sd1": 2_132_000_000, "sdxl": 6_938_000_000, "sdxl-refiner": 6_076_000_000}
"""Bytes of the files that Stability AI and Runway published, in float16."""
PREFIXES = {"sdxl": "conditioner.embedders.1.model.", "sdxl-refiner": "conditioner.embedders.0.model."}


def modules(kind):
    import torch
    import transformers
    from diffusers import AutoencoderKL, UNet2DConditionModel

    made = {}
    with torch.device("meta"):
        for folder, config in PUBLISHED[kind].configs.items():
            if folder.startswith("text"):
                cls = getattr(transformers, config["architectures"][0])
                made[folder] = cls(transformers.CLIPTextConfig(**config))
            elif folder in {"unet", "vae"}:
                cls = {"unet": UNet2DConditionModel, "vae": AutoencoderKL}[folder]
                made[folder] = cls.from_config(dict(config))
    return made


def write_sparse(tensors, path):
    """Write a header for these tensors in float16, over no data."""
    end, header = 0, {}
    for name, value in sorted(tensors.items()):
        header[name] = {"dtype": "F16", "shape": list(value.shape), "data_offsets": [end, end + 2 * value.numel()]}
        end += 2 * value.numel()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize("kind", ["sd1", "sd2", "sdxl", "sdxl-refiner"])
def test_configs_are_those_of_the_published_model(kind, tmp_path, original):
    made = modules(kind)
    counted = {folder: sum(value.numel() for value in module.parameters()) for folder, module in made.items()}
    assert counted == PARAMETERS.get(kind, counted)
    blocks = PUBLISHED[kind].configs["unet"]["down_block_types"]
    stored = original.unet(
        made["unet"].state_dict(), layers=2, attends=[block.startswith("CrossAttn") for block in blocks]
    ) | original.vae(made["vae"].state_dict(), levels=4)
    if kind == "sd2":
        stored |= original.open_clip(made["text_encoder"].state_dict(), "cond_stage_model.model.")
    elif kind == "sd1":
        stored |= original.clip(made["text_encoder"].state_dict())
    else:
        stored |= original.open_clip(made["text_encoder_2"].state_dict(), PREFIXES[kind])
        if kind == "sdxl":
            prefix = "conditioner.embedders.0.transformer.text_model."
            stored |= original.clip(made["text_encoder"].state_dict(), prefix)
    path = tmp_path / "model.safetensors"
    write_sparse(stored, path)
    assert path.stat().st_size == pytest.approx(FILES.get(kind, path.stat().st_size), rel=1e-3)
    opened = Checkpoint.open(str(path))
    measured = {folder: config for folder, config in opened.configs.items() if folder in PUBLISHED[kind].configs}
    assert opened.configs["model_index"] == PUBLISHED[kind].model_index
    assert measured == {folder: PUBLISHED[kind].configs[folder] for folder in measured}
    turned = []
    for folder, module in made.items():
        needed = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        found = find_needed(opened.tensors(folder), needed)
        turned += [name for name, ref in found.items() if not ref.aligned]
    assert turned == (["text_projection.weight"] if kind.startswith("sdxl") else [])
