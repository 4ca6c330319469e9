"""What several test files share."""

import json
import shutil
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tiny


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """A folder of all test processes."""
    root = tmp_path_factory.getbasetemp()
    return root.parent if root.name.startswith("popen") else root


@pytest.fixture(scope="session")
def new_cache(tmp_path_factory, shared_folder):
    """`new_cache()` makes a cache folder; graphs, which are the costliest to make, are those of all tests."""
    graphs = shared_folder / "graphs"
    graphs.mkdir(exist_ok=True)

    def make() -> str:
        folder = tmp_path_factory.mktemp("cache")
        (folder / "graphs").symlink_to(graphs)
        return str(folder)

    return make


@pytest.fixture(scope="session", autouse=True)
def cache_of_session_fixtures(new_cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTDIFF_CACHE", new_cache())
        yield


@pytest.fixture(autouse=True)
def own_cache(new_cache, monkeypatch):
    """Every test remembers digests in a folder of its own."""
    monkeypatch.setenv("TRTDIFF_CACHE", new_cache())


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


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A random Stable Diffusion checkpoint that exports, compiles and runs in seconds."""
    return tiny.make("sd1", tmp_path_factory.mktemp("checkpoints") / "tiny")


TINY_SCHEDULERS = ("ddim", "euler", "euler_a", "dpmpp_2m")
TINY_STEPS = (1, 2, 6)


def compile_export(
    export: Path, out: Path, *, schedulers: tuple[str, ...], steps: tuple[int, ...], profile: str, target: str = "cpu",
    precision: str = "fp32",
):  # fmt: skip
    """Build an export in this process, without a range scan."""
    from trtdiff import build, worker
    from trtdiff.export import schedulers as compiled
    from trtdiff.export.manifest import EXPORT_FILE, EXPORT_SCHEMA, ExportManifest
    from trtdiff.lowering import named
    from trtdiff.plan import make_plan
    from trtdiff.records import read_record
    from trtdiff.store import Store

    def in_this_process(task, arguments, **_):
        return worker.Outcome(named(task)(**arguments, progress=lambda done, total: None), 0.0, 0)

    manifest = read_record(export / EXPORT_FILE, ExportManifest, schema=EXPORT_SCHEMA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "run", in_this_process)
        patch.setattr(compiled, "compile_samplers", partial(compiled.compile_samplers, steps=steps))
        plan = make_plan(
            manifest, name=out.name, precision=precision, targets=[target], schedulers=schedulers, profile=profile,
            range_scan=False,
        )  # fmt: skip
        build.build(plan, export, out, Store(out.parent / "store"))


def make_tiny_bundle(checkpoint: Path, folder: Path, dtype: str = "stored") -> Path:
    """Export and build a checkpoint in this process: 1 to 4 images, 32 to 96 pixels."""
    from trtdiff.checkpoint import Checkpoint
    from trtdiff.export.export import export_checkpoint

    exported = export_checkpoint(
        Checkpoint.open(str(checkpoint)), folder / "exports/tiny", dtype=dtype, check=False
    ).folder
    profile = "batch=1:1:4,height=32:64:96,width=32:64:96"
    compile_export(exported, folder / "engines/tiny", schedulers=TINY_SCHEDULERS, steps=TINY_STEPS, profile=profile)
    return folder / "engines/tiny"


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint, tmp_path_factory):
    """The tiny checkpoint as a bundle for ONNX Runtime. Tests copy it before they change it."""
    return make_tiny_bundle(tiny_checkpoint, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def bundle_maker():
    """`bundle_maker(checkpoint, folder, dtype="float16")` exports and builds a checkpoint into the folder."""
    return make_tiny_bundle


@pytest.fixture(scope="session")
def compiler():
    """`compiler(export, out, schedulers=…, steps=…, profile=…)` builds an export."""
    return compile_export


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
