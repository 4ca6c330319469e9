"""What several test files share."""

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def own_digest_memo(tmp_path_factory, monkeypatch):
    """Every test remembers digests in a folder of its own."""
    monkeypatch.setenv("TRTDIFF_CACHE", str(tmp_path_factory.mktemp("cache")))


GRAPHS = {
    "text_encoder": """text_encoder (int64[batch, tokens] input_ids, int64[1] clip_skip)
                          => (float[batch, tokens, 16] encoder_hidden_states)
        { table = Cast <to = 1> (text_embedding)
          whole = Gather (table, input_ids)
          skipped = Cast <to = 1> (clip_skip)
          encoder_hidden_states = Add (whole, skipped) }""",
    "denoiser": """denoiser (float[batch, 4, "height/8", "width/8"] sample, float[batch] timestep,
                             float[batch, context, 16] encoder_hidden_states)
                          => (float[batch, 4, "height/8", "width/8"] prediction)
        <int64[2] last = {2, 3}, int64[1] middle = {1}, float thousand = {1000}>
        { kernel = Cast <to = 1> (unet_conv)
          mixed = Cast <to = 1> (unet_mix)
          drawn = Conv <pads = [1, 1, 1, 1]> (sample, kernel)
          mood = ReduceMean <keepdims = 0> (encoder_hidden_states, middle)
          colour = MatMul (mood, mixed)
          time = Div (timestep, thousand)
          late = Unsqueeze (time, middle)
          both = Add (colour, late)
          spread = Unsqueeze (both, last)
          sum = Add (drawn, spread)
          prediction = Tanh (sum) }""",
    "vae_decoder": """vae_decoder (float[batch, 4, "height/8", "width/8"] latent)
                          => (float[batch, 3, height, width] image)
        { kernel = Cast <to = 1> (vae_up)
          grown = ConvTranspose <strides = [8, 8]> (latent, kernel)
          image = Tanh (grown) }""",
    "vae_encoder": """vae_encoder (float[batch, 3, height, width] image)
                          => (float[batch, 4, "height/8", "width/8"] mean, float[batch, 4, "height/8", "width/8"] std)
        { kernel = Cast <to = 1> (vae_down)
          mean = Conv <strides = [8, 8]> (image, kernel)
          std = Exp (mean) }""",
}
WEIGHTS = {
    "text_encoder": {"text_embedding": (64, 16)},
    "unet": {"unet_conv": (4, 4, 3, 3), "unet_mix": (16, 4)},
    "vae": {"vae_up": (4, 3, 8, 8), "vae_down": (4, 3, 8, 8)},
}
FOLDERS = {"text_encoder": "text_encoder", "denoiser": "unet", "vae_decoder": "vae", "vae_encoder": "vae"}


def _safetensors(path, arrays):
    """Write a file by hand: whoever reads it must not depend on who wrote it. Gives the offsets."""
    header, end = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": "F16", "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in arrays.values()))
    return {name: 8 + len(text) + facts["data_offsets"][0] for name, facts in header.items()}


def _graph(folder, component, arrays, offsets):
    import onnx_ir as ir

    from trtdiff.export.graph import write_graph

    text, weights = GRAPHS[component], f"weights/{FOLDERS[component]}.safetensors"
    model = ir.from_onnx_text(f'<ir_version: 11, opset_import: ["": 23]>\n{text}')
    for node in model.graph:
        if node.op_type == "Div":
            node.metadata_props["module"] = "time_proj"
    for value in [value for node in model.graph for value in node.inputs]:
        if value.name in arrays:
            array = arrays[value.name]
            value.const_value = ir.ExternalTensor(
                weights, offsets[value.name], array.nbytes, ir.DataType.FLOAT16, shape=ir.Shape(array.shape),
                name=value.name, base_dir=folder,
            )  # fmt: skip
            model.graph.register_initializer(value)
    write_graph(model, folder / f"{component}.onnx")


def make_export(folder: Path, *, seed: int = 0) -> Path:
    """Write an export of a toy Stable Diffusion: the shapes, names and files of a real one, in 20 kB and 20 nodes."""
    from trtdiff.digest import digest, file_digest
    from trtdiff.export.manifest import EXPORT_SCHEMA, CheckpointOrigin, ExportedComponent, ExportManifest
    from trtdiff.families import family
    from trtdiff.records import write_record

    configs = {
        "unet": {"in_channels": 4, "sample_size": 8, "cross_attention_dim": 16, "down_block_types": ["DownBlock2D"]},
        "vae": {"latent_channels": 4, "block_out_channels": [8, 8, 8, 8], "scaling_factor": 0.5},
        "text_encoder": {"hidden_size": 16, "max_position_embeddings": 9, "vocab_size": 64},
        "tokenizer": {"pad_token": "!"},
    }
    rng = np.random.default_rng(seed)
    (folder / "weights").mkdir(parents=True)
    (folder / "tokenizers").mkdir()
    (folder / "tokenizers/tokenizer.json").write_text('{"version": "1.0"}')
    for part, shapes in WEIGHTS.items():
        arrays = {name: (rng.standard_normal(shape) * 0.2).astype(np.float16) for name, shape in shapes.items()}
        offsets = _safetensors(folder / f"weights/{part}.safetensors", arrays)
        for component in (name for name, owner in FOLDERS.items() if owner == part):
            _graph(folder, component, arrays, offsets)
    known = family("stable-diffusion")
    specs = {spec.name: spec for spec in known.components(configs)}
    weights = {part: f"weights/{part}.safetensors" for part in WEIGHTS}
    components = tuple(
        ExportedComponent(
            name=name, folder=part, graph=f"{name}.onnx", graph_sha256=file_digest(folder / f"{name}.onnx"),
            weights={weights[part]: file_digest(folder / weights[part])}, inputs=specs[name].inputs,
            outputs=specs[name].outputs,
        )
        for name, part in FOLDERS.items()
    )  # fmt: skip
    manifest = ExportManifest(
        schema=EXPORT_SCHEMA, trtdiff="0.1.0", name=folder.name, family="stable-diffusion",
        checkpoint=CheckpointOrigin(folder.name, None, digest(seed), "StableDiffusionPipeline"),
        facts=known.facts(configs), components=components, tokenizers={"tokenizer": "tokenizers/tokenizer.json"},
        tokenizer_sha256={"tokenizer": file_digest(folder / "tokenizers/tokenizer.json")},
        scheduler={
            "_class_name": "DDIMScheduler", "beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085,
            "clip_sample": False, "num_train_timesteps": 1000, "prediction_type": "epsilon", "set_alpha_to_one": False,
            "steps_offset": 1, "timestep_spacing": "leading",
        },
        configs=configs, checks={}, versions={},
    )  # fmt: skip
    write_record(folder / "export.json", manifest)
    assert msgspec.json.decode((folder / "export.json").read_bytes())["name"] == folder.name
    return folder


@pytest.fixture(scope="session")
def export_maker():
    """`export_maker(folder)` writes a toy export there."""
    return make_export


# --- a whole pipeline, random and tiny, made by the real tools --------------------------------------------------------

WORDS = (
    "a", "an", "the", "red", "green", "blue", "small", "large", "photo", "picture", "of", "on", "in", "with", "cat",
    "dog", "house", "tree", "ship", "seven", "three",
)  # fmt: skip


def write_tokenizer(folder: Path) -> int:
    """Write a CLIP tokenizer over a few words: byte pairs that build them letter by letter. Gives its size."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    vocabulary = [*letters, *(letter + "</w>" for letter in letters)]
    merges = []
    for word in WORDS:
        left = word[0]
        for position, letter in enumerate(word[1:], start=1):
            right = letter + "</w>" if position == len(word) - 1 else letter
            if (pair := f"{left} {right}") not in merges:
                merges.append(pair)
            left += right
            if left not in vocabulary:
                vocabulary.append(left)
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return len(vocabulary)


def make_tiny_checkpoint(folder: Path) -> Path:
    """Save a random Stable Diffusion pipeline with diffusers' own classes: 3 UNet levels, 4 VAE levels, 64 pixels."""
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    size = write_tokenizer(folder.parent / "tokenizer-parts")
    tokenizer = CLIPTokenizer.from_pretrained(folder.parent / "tokenizer-parts", model_max_length=16)
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 48, 64),
        layers_per_block=1,
        norm_num_groups=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=(2, 3, 4),  # heads, in spite of the name: 16 channels each
    )
    vae = AutoencoderKL(
        block_out_channels=(16, 32, 32, 32),
        layers_per_block=1,
        norm_num_groups=16,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        sample_size=64,
    )
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            bos_token_id=size - 2,
            eos_token_id=size - 1,
            pad_token_id=size - 1,
        )
    )
    StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
            set_alpha_to_one=False, steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A random Stable Diffusion checkpoint that exports, compiles and runs in seconds."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


TINY_SCHEDULERS = ("ddim", "euler", "euler_a", "dpmpp_2m")
TINY_STEPS = (1, 2, 6)


def make_tiny_bundle(checkpoint: Path, folder: Path, dtype: str = "stored") -> Path:
    """Export and build a checkpoint in this process: 1 to 4 images, 32 to 96 pixels, few schedulers and steps."""
    from functools import partial

    from trtdiff import build, worker
    from trtdiff.checkpoint import Checkpoint
    from trtdiff.export import schedulers
    from trtdiff.export.export import export_checkpoint
    from trtdiff.lowering import named
    from trtdiff.plan import make_plan
    from trtdiff.store import Store

    def in_this_process(task, arguments, **_):
        return worker.Outcome(named(task)(**arguments, progress=lambda done, total: None), 0.0, 0)

    opened = Checkpoint.open(str(checkpoint))
    exported = export_checkpoint(opened, folder / "exports/tiny", dtype=dtype, check=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "run", in_this_process)
        patch.setattr(schedulers, "compile_samplers", partial(schedulers.compile_samplers, steps=TINY_STEPS))
        plan = make_plan(
            exported.manifest, name="tiny", precision="fp32", targets=["cpu"], schedulers=TINY_SCHEDULERS,
            profile="batch=1:1:4,height=32:64:96,width=32:64:96",
        )  # fmt: skip
        build.build(plan, exported.folder, folder / "engines/tiny", Store(folder / "store"))
    return folder / "engines/tiny"


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint, tmp_path_factory):
    """The tiny checkpoint as a bundle for ONNX Runtime. Tests copy it before they change it."""
    return make_tiny_bundle(tiny_checkpoint, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def bundle_maker():
    """`bundle_maker(checkpoint, folder, dtype="float16")` exports and builds a checkpoint into the folder."""
    return make_tiny_bundle


@pytest.fixture
def changed_bundle(tiny_bundle, tmp_path):
    """Copy the tiny bundle and change what its bundle.json says: `changed_bundle(lambda about: …)` gives the copy."""

    def change(edit) -> Path:
        copied = tmp_path / "changed"
        shutil.copytree(tiny_bundle, copied)
        about = json.loads((copied / "bundle.json").read_text())
        edit(about)
        (copied / "bundle.json").write_text(json.dumps(about))
        return copied

    return change
