"""What several test files share."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def own_digest_memo(tmp_path_factory, monkeypatch):
    """Every test remembers digests in a folder of its own."""
    monkeypatch.setenv("TRTDIFF_CACHE", str(tmp_path_factory.mktemp("cache")))


GRAPHS = {
    "text_encoder": """text_encoder (int64[batch, tokens] input_ids) => (float[batch, tokens, 16] encoder_hidden_states)
        { table = Cast <to = 1> (text_embedding)
          encoder_hidden_states = Gather (table, input_ids) }""",
    "denoiser": """denoiser (float[batch, 4, "height/8", "width/8"] sample, float[batch] timestep,
                             float[batch, tokens, 16] encoder_hidden_states)
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

    text, weights = GRAPHS[component], f"weights/{FOLDERS[component]}.safetensors"
    model = ir.from_onnx_text(f'<ir_version: 11, opset_import: ["": 23]>\n{text}')
    for value in [value for node in model.graph for value in node.inputs]:
        if value.name in arrays:
            array = arrays[value.name]
            value.const_value = ir.ExternalTensor(
                weights, offsets[value.name], array.nbytes, ir.DataType.FLOAT16, shape=ir.Shape(array.shape),
                name=value.name, base_dir=folder,
            )  # fmt: skip
            model.graph.register_initializer(value)
    ir.save(model, folder / f"{component}.onnx")


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


@pytest.fixture
def toy_export(tmp_path):
    """An export folder that a test may change."""
    return make_export(tmp_path / "exports/toy")
