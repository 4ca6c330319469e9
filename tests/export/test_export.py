"""Export of a real, tiny pipeline: what is in the folder, and that it computes what diffusers computes."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from trtdiff.checkpoint import Checkpoint
from trtdiff.digest import file_digest
from trtdiff.errors import CheckpointError, StorageError, UsageError
from trtdiff.export import export as module
from trtdiff.export.check import BOUND, relative_l2
from trtdiff.export.export import export_checkpoint
from trtdiff.export.manifest import EXPORT_SCHEMA, ExportManifest
from trtdiff.records import read_record

pytest.importorskip("diffusers")
COMPONENTS = ("text_encoder", "denoiser", "vae_decoder", "vae_encoder")


def load(folder, name):
    import onnx

    return onnx.load(str(folder / f"{name}.onnx"), load_external_data=False)


def run(folder, name, feeds):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / f"{name}.onnx"), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


# --- the folder ------------------------------------------------------------------------------------------------------


def test_manifest_says_what_is_there(tiny_export):
    manifest = read_record(tiny_export.folder / "export.json", ExportManifest, schema=EXPORT_SCHEMA)
    assert tuple(component.name for component in manifest.components) == COMPONENTS
    assert manifest.checkpoint.name == "tiny"
    assert manifest.dtype == "stored"
    for component in manifest.components:
        assert file_digest(tiny_export.folder / component.graph, fresh=True) == component.graph_sha256
        for file, sha256 in component.weights.items():
            assert file_digest(tiny_export.folder / file, fresh=True) == sha256
    assert manifest.components[2].weights == manifest.components[3].weights  # one VAE file serves both
    points = manifest.checks["denoiser"]
    assert [point["sizes"]["batch"] for point in points] == [1, 3]
    assert all(
        error < 1e-5
        for name in COMPONENTS
        for point in manifest.checks[name]
        for error in point["relative_l2"].values()
    )


def test_graphs_name_no_machine_and_no_stack(tiny_export, tiny_checkpoint):
    for file in tiny_export.folder.rglob("*"):
        if file.suffix in {".onnx", ".json"} and "tokenizers" not in file.parts:
            text = file.read_bytes()
            for word in (
                str(tiny_export.folder),
                str(tiny_checkpoint),
                sys.prefix,
                "site-packages",
                ".py",
                "stack_trace",
            ):
                assert word.encode() not in text, (file.name, word)


def test_nodes_keep_their_module(tiny_export, tiny_checkpoint):
    from diffusers import UNet2DConditionModel

    modules = dict(UNet2DConditionModel.from_pretrained(tiny_checkpoint / "unet").named_modules())
    for node in load(tiny_export.folder, "denoiser").graph.node:
        ((key, value),) = [(item.key, item.value) for item in node.metadata_props]
        assert key == "module"
        assert value in modules
        assert node.name.startswith(value)


def test_operators_stay_whole(tiny_export):
    kinds = [node.op_type for node in load(tiny_export.folder, "denoiser").graph.node]
    blocks = 4  # one transformer down, one in the middle, two up
    assert kinds.count("Attention") == 2 * blocks
    assert kinds.count("LayerNormalization") == 3 * blocks
    assert "GroupNormalization" in kinds
    assert kinds.count("Gelu") == kinds.count("Split") == blocks
    assert not {"Identity", "Dropout", "Constant", "CastLike", "SplitToSequence", "InstanceNormalization"} & set(kinds)


def test_weights_are_references_under_their_own_names(tiny_export, tiny_checkpoint):
    stored = Checkpoint.open(str(tiny_checkpoint)).tensors("unet")
    references = {t.name: t for t in load(tiny_export.folder, "denoiser").graph.initializer if t.external_data}
    assert references.keys() == stored.keys()
    embedded = [t.ByteSize() for t in load(tiny_export.folder, "denoiser").graph.initializer if not t.external_data]
    assert sum(embedded) < 2000


def test_types_and_ranks_of_every_value_are_known(tiny_export):
    for name in COMPONENTS:
        graph = load(tiny_export.folder, name).graph
        known = {info.name: info.type.tensor_type for info in (*graph.value_info, *graph.output)}
        for node in graph.node:
            for output in node.output:
                assert known[output].elem_type, output
                assert known[output].HasField("shape"), output


# --- what it computes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "height", "width", "tokens"),
    [(1, 600, 800, 16), (2, 64, 64, 16), (3, 40, 200, 3), (1, 8, 8, 1)],
)
def test_denoiser_is_diffusers_own_at_every_multiple_of_8(tiny_export, tiny_checkpoint, batch, height, width, tokens):
    import torch
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(tiny_checkpoint / "unet").eval()
    sample, states = normal(batch, 4, height // 8, width // 8), normal(batch, tokens, 32)
    timestep = np.linspace(1, 999, batch, dtype=np.float32)
    with torch.inference_mode():
        expected = unet(*map(torch.from_numpy, (sample, timestep, states))).sample.numpy()
    feeds = {"sample": sample, "timestep": timestep, "encoder_hidden_states": states}
    (got,) = run(tiny_export.folder, "denoiser", feeds)
    assert relative_l2(got, expected) < BOUND


@pytest.mark.parametrize(("batch", "height", "width"), [(1, 296, 408), (2, 64, 64), (3, 8, 24)])
def test_vae_is_diffusers_own_at_every_multiple_of_8(tiny_export, tiny_checkpoint, batch, height, width):
    import torch
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(tiny_checkpoint / "vae").eval()
    scaling = vae.config.scaling_factor
    image, latent = normal(batch, 3, height, width), normal(batch, 4, height // 8, width // 8)
    with torch.inference_mode():
        posterior = vae.encode(torch.from_numpy(image)).latent_dist
        pixels = vae.decode(torch.from_numpy(latent) / scaling).sample.numpy()
    mean, std = run(tiny_export.folder, "vae_encoder", {"image": image})
    (decoded,) = run(tiny_export.folder, "vae_decoder", {"latent": latent})
    assert relative_l2(decoded, pixels) < BOUND
    assert relative_l2(mean, posterior.mean.numpy() * scaling) < BOUND
    assert relative_l2(std, posterior.std.numpy() * scaling) < BOUND


def test_text_encoder_is_transformers_own_from_the_prompt_on(tiny_export, tiny_checkpoint):
    import torch
    from transformers import CLIPTextModel, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(tiny_checkpoint / "tokenizer")
    prompts = ["a red cat on a ship", "three small houses, photo of a tree in the green", ""]
    ids = tokenizer(prompts, padding="max_length", max_length=16, truncation=True, return_tensors="pt").input_ids
    with torch.inference_mode():
        expected = CLIPTextModel.from_pretrained(tiny_checkpoint / "text_encoder").eval()(ids)[0].numpy()
    (got,) = run(tiny_export.folder, "text_encoder", {"input_ids": ids.numpy(), "clip_skip": np.zeros(1, np.int64)})
    assert relative_l2(got, expected) < BOUND


# --- again, otherwise, interrupted -----------------------------------------------------------------------------------


def in_new_process(*arguments, **environment):
    import os

    code = (
        "import sys; from trtdiff.cli import exit_code; code = exit_code(sys.argv[1:]);"
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "export", *map(str, arguments)],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def test_another_process_writes_the_same_bytes(tiny_export, tiny_checkpoint, tmp_path):
    arguments = (tiny_checkpoint, "-o", tmp_path / "again", "--components", "text_encoder", "--no-check", "--json")
    first = in_new_process(*arguments, PYTHONHASHSEED="7", TRTDIFF_CACHE=tmp_path / "nothing traced before")
    assert first.returncode == 0, first.stderr
    manifest = json.loads(first.stdout)["manifest"]
    assert manifest["components"][0]["graph_sha256"] == tiny_export.manifest.components[0].graph_sha256
    second = in_new_process(*arguments)
    assert json.loads(second.stdout)["up_to_date"]
    assert second.stderr.splitlines()[-1] == "False"  # torch was not imported


def test_an_unchanged_export_is_recognised_and_a_damaged_one_is_not(copied, tiny_export, tiny_checkpoint):
    from trtdiff.export.folder import current

    checkpoint = Checkpoint.open(str(tiny_checkpoint))
    code = tiny_export.manifest.code
    state = {"dtype": "stored", "components": COMPONENTS, "code": code, "checked": True}
    assert current(copied, checkpoint.origin(), **state)[0] is not None
    assert current(copied, checkpoint.origin(), **{**state, "dtype": "float16"})[1] == "dtype was stored, is float16"
    assert "components" in current(copied, checkpoint.origin(), **{**state, "components": COMPONENTS[:2]})[1]
    assert "trtdiff_code was" in current(copied, checkpoint.origin(), **{**state, "code": "f" * 64})[1]
    with (copied / "vae_decoder.onnx").open("ab") as file:
        file.write(b"\0")
    assert current(copied, checkpoint.origin(), **state) == (None, "vae_decoder.onnx is missing or changed")


def test_weights_stored_in_half_precision_are_cast_once(tiny_checkpoint, tmp_path):
    import onnx

    made = export_checkpoint(Checkpoint.open(str(tiny_checkpoint)), tmp_path / "half", dtype="float16",
                             components=["text_encoder"])  # fmt: skip
    graph = load(made.folder, "text_encoder").graph
    weights = [tensor for tensor in graph.initializer if tensor.external_data]
    assert {tensor.data_type for tensor in weights} == {onnx.TensorProto.FLOAT16}
    casts = [node for node in graph.node if node.op_type == "Cast" and node.input[0] in {t.name for t in weights}]
    assert sorted(node.input[0] for node in casts) == sorted(tensor.name for tensor in weights)
    assert all(error < 1e-5 for point in made.reports["text_encoder"].checks for error in point.relative_l2.values())


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_export_that_fails_leaves_everything_as_it_was(tiny_checkpoint, copied, monkeypatch, problem):
    def fail(*arguments, **options):
        raise problem

    monkeypatch.setattr(module, "export_components", fail)
    before = {file: file.stat().st_mtime_ns for file in copied.rglob("*")}
    with pytest.raises(StorageError if isinstance(problem, OSError) else KeyboardInterrupt):
        export_checkpoint(Checkpoint.open(str(tiny_checkpoint)), copied, force=True)
    assert {file: file.stat().st_mtime_ns for file in copied.rglob("*")} == before
    assert [path for path in copied.parent.iterdir() if path.name != ".locks"] == [copied]


def test_what_a_killed_export_left_goes_away_with_the_next(tiny_checkpoint, copied):
    (copied.parent / ".copy.part/weights").mkdir(parents=True)
    export_checkpoint(
        Checkpoint.open(str(tiny_checkpoint)), copied, components=["text_encoder"], check=False, force=True
    )
    assert [path for path in copied.parent.iterdir() if path.name != ".locks"] == [copied]


def test_a_second_export_waits_for_the_first_and_says_so(tiny_checkpoint, copied):
    from filelock import FileLock

    (copied.parent / ".locks").mkdir()
    lock = FileLock(copied.parent / ".locks" / copied.name)
    lock.acquire()

    class Hearer(module.Silence):
        said = ""

        def note(self, text):
            self.said = text
            lock.release()

    hearer = Hearer()
    export_checkpoint(
        Checkpoint.open(str(tiny_checkpoint)), copied, components=["text_encoder"], check=False, reporter=hearer
    )
    assert hearer.said.startswith("somebody else is making")


def test_a_folder_that_is_no_export_is_left_alone(tiny_checkpoint, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="not an export"):
        export_checkpoint(Checkpoint.open(str(tiny_checkpoint)), tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_files_that_somebody_put_into_an_export_are_not_lost(tiny_checkpoint, copied):
    (copied / "weights/notes.txt").write_text("years of work")
    for force in (True, False):
        with pytest.raises(UsageError, match=r"not its own: weights/notes\.txt"):
            export_checkpoint(Checkpoint.open(str(tiny_checkpoint)), copied, check=False, force=force)
    assert (copied / "weights/notes.txt").read_text() == "years of work"
    assert (copied / "denoiser.onnx").is_file()


@pytest.mark.parametrize("asked", ["", ",", " , ,"])
def test_an_export_of_no_component_is_refused(asked, tiny_checkpoint, tmp_path, capsys):
    from trtdiff.cli import exit_code as cli

    assert cli(["export", str(tiny_checkpoint), "-o", str(tmp_path / "x"), "--components", asked]) == 2
    assert "no component is asked for" in capsys.readouterr().err


def test_unknown_components_are_named(tiny_checkpoint, tmp_path):
    with pytest.raises(UsageError, match="unett") as caught:
        export_checkpoint(Checkpoint.open(str(tiny_checkpoint)), tmp_path / "x", components=["unett"])
    assert "denoiser" in caught.value.hint


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_command_says_that_nothing_changed(copied, tiny_checkpoint, capsys):
    from trtdiff.cli import exit_code as cli

    assert cli(["export", str(tiny_checkpoint), "-o", str(copied)]) == 0
    said = capsys.readouterr()
    assert "is up to date" in said.out
    assert "weights: as they are stored" in said.err
    assert cli(["export", str(tiny_checkpoint), "-o", str(tiny_checkpoint)]) == UsageError.exit_code


def test_the_command_ends_with_a_table(tiny_export, capsys, monkeypatch):
    from trtdiff.cli.export import _print_table

    monkeypatch.setenv("COLUMNS", "200")
    _print_table(tiny_export)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == list(COMPONENTS)
    assert lines[-1] == str(tiny_export.folder)


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("unet", "sample_size", "32"), ("unet", "sample_size", None), ("vae", "block_out_channels", None),
        ("vae", "scaling_factor", "x"), ("vae", "scaling_factor", 0), ("text_encoder", "hidden_size", "32"),
        ("text_encoder", "max_position_embeddings", None), ("vae", "latent_channels", True),
    ],
)  # fmt: skip
def test_a_config_value_of_the_wrong_kind_names_file_and_field_at_once(tiny_checkpoint, tmp_path, part, field, value):
    copied = shutil.copytree(tiny_checkpoint, tmp_path / "c")
    config = json.loads((copied / part / "config.json").read_text())
    (copied / part / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(Checkpoint.open(str(copied)), tmp_path / "out")
    assert caught.value.where == f"{part}/config.json: {field}"
