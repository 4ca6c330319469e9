"""From an export to a bundle: what is made, reused, up to date, stale; and what a user is told."""

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from trtdiff import build as building
from trtdiff import worker
from trtdiff.backends import backend
from trtdiff.bundle import Bundle
from trtdiff.cli.build import build as command
from trtdiff.digest import code_digest, file_digest, remember
from trtdiff.errors import ArtefactError, BuildError, StorageError, TrtdiffError, UsageError
from trtdiff.lowering import named
from trtdiff.worker import Outcome

SAMPLERS = b"tables of coefficients"


REAL = worker.run


def compile_nothing(arguments):
    """Compiling schedulers takes a minute and has its own tests: here a few bytes stand for the tables."""
    Path(arguments["out"], "samplers.safetensors").write_bytes(SAMPLERS + json.dumps(arguments["names"]).encode())
    names = [*arguments["names"], *arguments["optional"]]
    return Outcome({"realised": {"samplers": names, "refused": {}}}, 0.1, 1)


def in_worker(task, arguments, **options):
    if task == "trtdiff.lowering:compile_samplers":
        return compile_nothing(arguments)
    return REAL(task, arguments, **options)


def in_process(task, arguments, **_):
    """A process for each engine of each test would take minutes; `test_worker.py` is about processes."""
    if task == "trtdiff.lowering:compile_samplers":
        return compile_nothing(arguments)
    value = named(task)(**arguments, progress=lambda done, total: None)
    return Outcome(json.loads(json.dumps(value)), 0.1, 1)


@pytest.fixture(scope="module")
def first(tmp_path_factory, export_maker):
    """The toy export and a first build of it, in real workers: what the command said, and the folder."""
    folder = tmp_path_factory.mktemp("first")
    export_maker(folder / "exports/toy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "run", in_worker)
        patch.chdir(folder)
        return call(), folder


@pytest.fixture
def workspace(first, tmp_path, monkeypatch):
    """A folder with the toy export and nothing else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker, "run", in_process)
    shutil.copytree(first[1] / "exports", tmp_path / "exports")
    return tmp_path


@pytest.fixture
def built(first, workspace):
    """The bundle of the first build, in a folder where a test may change it."""
    shutil.copytree(first[1] / "engines", workspace / "engines")
    return workspace / "engines/toy"


def call(*arguments):
    """Run the command; its standard output, or the error it raised."""
    result = CliRunner().invoke(command, list(arguments), catch_exceptions=True)
    if isinstance(result.exception, TrtdiffError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


SIZES = {"window": 3, "branches": 2, "batch": 2, "height": 64, "width": 32, "context": 9, "tokens": 9}


def test_files_that_somebody_put_into_a_bundle_are_not_lost(built):
    call("exports/toy")  # nothing to do, nothing to say
    (built / "pictures").mkdir()
    (built / "pictures/best.png").write_bytes(b"PNG")
    with pytest.raises(UsageError, match=r"not its own: pictures/best\.png"):
        call("exports/toy", "--profile", "batch=1:1:2,height=64:64:64,width=64:64:64")
    assert (built / "pictures/best.png").read_bytes() == b"PNG"
    Bundle.open(built).verify(fresh=True)


# --- the first build -------------------------------------------------------------------------------------------------


def test_defaults_are_said_and_a_bundle_that_runs_is_made(first):
    result, workspace = first
    for said in (
        "export exports/toy (the only one",
        "bundle engines/toy",
        "target cpu (default",
        "precision fp32 (default for target cpu)",
    ):
        assert said in result.stderr
    assert "memory" in result.stderr
    for name in ("text_encoder", "denoiser", "vae_decoder", "vae_encoder", "samplers"):
        assert any(line.startswith(name) and "made" in line for line in result.stdout.splitlines())
    bundle = Bundle.open(workspace / "engines/toy")
    bundle.verify(fresh=True)
    assert bundle.manifest.samplers[0] == "default"
    assert len(bundle.manifest.samplers) >= 8
    for component in bundle.components("onnxruntime"):
        manifest = bundle.engine_manifest("onnxruntime", component)
        assert manifest.peak_memory > 20 << 20
        with backend("onnxruntime").load(bundle.engine("onnxruntime", component), threads=1) as session:
            assert (session.inputs, session.outputs) == (manifest.inputs, manifest.outputs)


def test_the_denoiser_engine_equals_its_graph_in_float64(built):
    from safetensors.numpy import load_file

    bundle = Bundle.open(built)
    weights = {
        name: array.astype(np.float64) for name, array in load_file("exports/toy/weights/unet.safetensors").items()
    }
    rng = np.random.default_rng(0)
    with backend("onnxruntime").load(bundle.engine("onnxruntime", "denoiser"), threads=1) as session:
        feeds = {spec.name: rng.standard_normal(spec.shape(SIZES)).astype(np.float32) for spec in session.inputs}
        feeds["mask"] = (feeds["mask"] > 0).astype(np.float32)
        got = session.run(feeds)
    exact = {name: array.astype(np.float64) for name, array in feeds.items()}
    stepped = np.einsum("kb,kbchw->bchw", exact["coefficients"], exact["window"])
    kept = np.einsum("jb,jbchw->bchw", exact["known_coefficients"], exact["known"])
    latent = np.where(exact["mask"] > 0, stepped, kept)
    sample = np.pad(latent * exact["scale"][:, None, None, None], ((0, 0), (0, 0), (1, 1), (1, 1)))
    patches = np.lib.stride_tricks.sliding_window_view(sample, (3, 3), axis=(2, 3))  # [B, C, h, w, 3, 3]
    drawn = np.einsum("bchwij,ocij->bohw", patches, weights["unet_conv"])
    mood = exact["encoder_hidden_states"].mean(2) @ weights["unet_mix"] + exact["timestep"][:, None] / 1000  # [G, B, 4]
    branches = np.tanh(drawn[None] + mood[..., None, None])
    guided = np.einsum("gb,gbchw->bchw", exact["guidance"], branches)
    ratio = branches[-1].std((1, 2, 3)) / guided.std((1, 2, 3))
    prediction = guided * (1 + exact["rescale"] * (ratio - 1))[:, None, None, None]
    for name, want in {"latent": latent, "prediction": prediction}.items():
        assert np.abs(got[name] - want).max() <= 2e-6 * np.abs(want).max(), name  # measured 3e-7


def test_store_and_bundle_stand_beside_each_other(built):
    bundle = Bundle.open(built)
    keys = set(bundle.manifest.engines["onnxruntime"].values())
    assert keys < {path.name for path in built.parent.iterdir()}
    for key in keys:
        ours, stored = built / f"engines/{key}/engine/model.onnx", built.parent / f"{key}/engine/model.onnx"
        assert ours.read_bytes() == stored.read_bytes()
        assert ours.stat().st_ino != stored.stat().st_ino


# --- nothing to do ---------------------------------------------------------------------------------------------------


def test_an_unchanged_rebuild_does_nothing_and_says_why(built, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in built.parent.rglob("*")}
    monkeypatch.setattr(worker, "run", lambda *_, **__: pytest.fail("nothing is to be made"))
    said = call().stdout
    assert "up to date: export, profile, precision, compiler, schedulers and trtdiff's own code" in said
    assert before == {path: path.stat().st_mtime_ns for path in built.parent.rglob("*")}
    assert json.loads(call("--json").stdout)["up_to_date"] is True


def test_an_unchanged_rebuild_imports_no_compiler(built):
    program = """
import sys
from trtdiff.cli import exit_code as run
assert run(["build"]) == 0
heavy = {"torch", "diffusers", "transformers", "onnx", "onnx_ir", "onnxruntime", "tokenizers"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "up to date" in done.stdout


# --- stale -----------------------------------------------------------------------------------------------------------


def test_a_stale_field_is_named_with_both_values_and_only_what_it_touches_is_made(built):
    said = call("--profile", "height=32:64:256").stdout
    assert "stale: profile.height: 32:64:128 → 32:64:256" in said
    states = {
        line.split()[0]: "made" if "  made" in line else "reused" if "  reused" in line else line
        for line in said.splitlines()
        if line.split()[0] in STATES
    }
    assert states == {
        "text_encoder": "reused",  # it has no height
        "samplers": "reused",
        "denoiser": "made",
        "vae_decoder": "made",
        "vae_encoder": "made",
    }
    assert "text_encoder" not in next(line for line in said.splitlines() if line.startswith("stale"))


STATES = ("text_encoder", "denoiser", "vae_decoder", "vae_encoder", "samplers")


def test_going_back_reuses_the_store(built):
    call("--profile", "batch=1:2:4")
    said = call().stdout
    assert "profile.batch: 1:2:4 → 1:1:4" in said
    assert "made" not in said


def test_new_weights_are_noticed_by_their_digest(built, workspace):
    file = workspace / "exports/toy/export.json"
    manifest = json.loads(file.read_text())
    weights = workspace / "exports/toy/weights/unet.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ArtefactError, match=r"weights/unet.safetensors was changed after the export"):
        call()
    from trtdiff.digest import file_digest

    new = file_digest(weights)
    for component in manifest["components"]:
        if component["folder"] == "unet":
            old = component["weights"]["weights/unet.safetensors"]
            component["weights"]["weights/unet.safetensors"] = new
    file.write_text(json.dumps(manifest))
    said = call().stdout
    assert f"stale: weights.weights/unet.safetensors: {old[:12]}… → {new[:12]}… (denoiser)" in said
    assert said.count(" made") == 1


def test_a_new_compiler_and_new_code_are_noticed(built, monkeypatch):
    monkeypatch.setattr("trtdiff.backends.onnxruntime.metadata.version", lambda name: "1.99.0")
    said = call("--dry-run").stdout
    assert "stale: backend_version:" in said
    assert "→ 1.99.0 (text_encoder, denoiser, vae_decoder, vae_encoder)" in said
    monkeypatch.setattr("trtdiff.plan.code_digest", lambda modules: code_digest([*modules, "trtdiff.cli"]))
    assert "stale: trtdiff_code:" in call("--dry-run").stdout


def test_force_makes_everything_anew(built):
    said = call("--force").stdout
    assert all(f"{name} " in said for name in STATES)
    assert said.count(" made") >= 4
    assert "reused" not in said


# --- dry run ---------------------------------------------------------------------------------------------------------


def test_a_dry_run_changes_nothing(workspace):
    said = call("--dry-run").stdout
    assert "there is no such bundle yet" in said
    assert said.count("to make") == 5
    assert not (workspace / "engines").exists()


def test_a_dry_run_after_a_build(built):
    shutil.rmtree(built)
    assert call("--dry-run").stdout.count("in store") == 5
    found = json.loads(call("--dry-run", "--json").stdout)
    assert found["up_to_date"] is False
    assert {piece["state"] for piece in found["pieces"]} == {"in store"}


# --- damage ----------------------------------------------------------------------------------------------------------


def damage(path, *, unseen=False):
    known = file_digest(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    time.sleep(0.01)
    path.write_bytes(data)
    if unseen:
        remember(path, known)  # a failing disk changes bytes, and no time


def engine_file(root, built, component="denoiser"):
    return root / Bundle.open(built).manifest.engines["onnxruntime"][component] / "engine/model.onnx"


def test_a_damaged_bundle_is_mended_from_the_store(built):
    damage(engine_file(built / "engines", built))
    said = call().stdout
    assert "engine/model.onnx is damaged" in said
    assert "made" not in said
    Bundle.open(built).verify(fresh=True)


def test_a_damaged_entry_of_the_store_is_made_again_with_a_warning(built):
    damage(engine_file(built.parent, built))
    shutil.rmtree(built)
    result = call()
    assert "warning: the stored denoiser (onnxruntime) is damaged and is made again" in result.stderr
    assert result.stdout.count(" made") == 1
    Bundle.open(built).verify(fresh=True)


def test_damage_without_a_new_time_is_found_by_verify(built):
    call()  # reads every byte once, and remembers
    damage(engine_file(built / "engines", built), unseen=True)
    assert "up to date" in call().stdout
    assert "is damaged" in call("--verify").stdout
    assert "every byte of both read again" in call("--verify").stdout


def test_verify_reads_the_export_and_the_store_again_too(built, workspace):
    call()
    damage(engine_file(built.parent, built), unseen=True)
    shutil.rmtree(built)
    said = call("--verify")
    assert "warning: the stored denoiser (onnxruntime) is damaged and is made again" in said.stderr
    damage(workspace / "exports/toy/weights/unet.safetensors", unseen=True)
    assert "up to date" in call().stdout
    with pytest.raises(ArtefactError, match="was changed after the export"):
        call("--verify")


def test_a_bundle_whose_store_was_deleted_gives_what_it_has(built):
    for path in built.parent.iterdir():
        if path != built and path.is_dir():
            shutil.rmtree(path)
    said = call("--profile", "height=32:64:256").stdout
    assert next(line for line in said.splitlines() if line.startswith("text_encoder")).endswith("reused")
    Bundle.open(built).verify(fresh=True)


def test_an_export_that_changes_while_it_is_built_is_an_error_and_nothing_is_kept(workspace, monkeypatch):
    def changing(task, arguments, **options):
        outcome = in_process(task, arguments, **options)
        if str(arguments.get("graph", "")).endswith("denoiser.onnx"):
            damage(workspace / "exports/toy/denoiser.onnx")
        return outcome

    monkeypatch.setattr(worker, "run", changing)
    with pytest.raises(ArtefactError, match=r"denoiser.onnx was changed after the export"):
        call()
    assert not (workspace / "engines/toy").exists()
    made = [json.loads(path.read_text())["spec"] for path in (workspace / "engines").glob("*/manifest.json")]
    assert "denoiser" not in [spec.get("component") for spec in made]


def test_a_store_inside_of_the_bundle_is_refused(workspace):
    for store in ("engines/toy", "engines/toy/store"):
        with pytest.raises(UsageError, match="lies in the bundle"):
            call("-o", "engines/toy", "--store", store)


def test_half_made_folders_are_no_exports(workspace):
    shutil.copytree(workspace / "exports/toy", workspace / "exports/.toy.part")
    assert "toy (the only one" in call("--dry-run").stderr
    (workspace / "exports/toy/export.json").unlink()
    with pytest.raises(UsageError, match="there is no export"):
        call("--dry-run")


# --- precisions and targets -------------------------------------------------------------------------------------------


def test_a_precision_that_a_target_is_not_built_in_says_which_are(workspace):
    with pytest.raises(UsageError, match="target cpu is not built in fp16") as caught:
        call("--precision", "fp16", "--target", "cpu")
    assert caught.value.hint == "for this target: fp32; fp16 is built for: rtx, tensorrt, rounded"
    for target, words in (
        ("gpu", "no target is called 'gpu'"),
        ("cpu:sm89", "takes no device"),
        ("rtx:89", "'89' is not"),
    ):
        with pytest.raises(UsageError, match=words):
            call("--target", target)


def test_a_device_is_part_of_the_key(workspace):
    keys = {}
    for target in ("rtx", "rtx:sm89", "rtx:sm89,sm120", "rtx:SM120,sm89"):
        found = json.loads(call("--target", target, "--precision", "fp16", "--dry-run", "--json").stdout)
        keys[target] = next(piece["key"] for piece in found["pieces"] if piece["name"] == "denoiser")
    assert len(set(keys.values())) == 3
    assert keys["rtx:sm89,sm120"] == keys["rtx:SM120,sm89"]


# --- requests that cannot be meant -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        (["--precision", "fp9"], "no precision is called 'fp9'", "fp32"),
        (["--target", "gpu"], "no target is called 'gpu'", "cpu"),
        (["--profile", "heigth=64"], "no dimension is called heigth", "height"),
        (["--profile", "height=60:64:100"], "height 60 is not a multiple of 8", "nearest"),
        (["--schedulers", "eulr"], "no scheduler is called eulr", "euler"),
        (["nowhere"], "nowhere is not an export", "trtdiff export"),
        (["-o", "exports"], "exports is there and is not a bundle", "another"),
    ],
)
def test_requests_that_cannot_be_meant(workspace, arguments, says, hint):
    with pytest.raises(UsageError, match=says) as caught:
        call(*arguments)
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2
    assert not (workspace / "engines").exists()


def test_none_and_several_exports(workspace):
    shutil.copytree(workspace / "exports/toy", workspace / "exports/other")
    with pytest.raises(UsageError, match="there are 2 exports: exports/other, exports/toy"):
        call()
    shutil.rmtree(workspace / "exports")
    with pytest.raises(UsageError, match="there is no export under exports/"):
        call()


# --- failures --------------------------------------------------------------------------------------------------------


def test_too_little_memory_is_refused_before_anything_is_begun(workspace, monkeypatch):
    monkeypatch.setattr("trtdiff.estimate.available_memory", lambda: 50 << 20)
    with pytest.raises(
        BuildError, match=r"text_encoder \(onnxruntime\) needs about 189 MB of memory, 52.4 MB are available"
    ):
        call()
    assert not list((workspace / "engines").glob("[0-9a-z]*"))


def test_too_little_disk_is_refused_before_anything_is_begun(workspace, monkeypatch):
    usage = shutil.disk_usage(workspace)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StorageError, match=r"the build writes about .* kB, the disk has 1.0 kB free"):
        call()


def test_a_compiler_that_fails_keeps_what_was_made_and_the_old_bundle(built, monkeypatch):
    manifest = (built / "bundle.json").read_text()
    real = in_process

    denoiser_done = threading.Event()

    def run(task, arguments, **options):
        if options["what"].startswith("vae_decoder"):
            assert denoiser_done.wait(30)
            raise BuildError("vae_decoder: the process crashed (SIGSEGV)")
        outcome = real(task, arguments, **options)
        if options["what"].startswith("denoiser"):
            denoiser_done.set()
        return outcome

    monkeypatch.setattr(worker, "run", run)
    with pytest.raises(BuildError, match="SIGSEGV"):
        call("--profile", "height=32:64:256")
    monkeypatch.setattr(worker, "run", real)
    assert (built / "bundle.json").read_text() == manifest
    assert not list(built.parent.glob(".*.part"))
    said = call("--profile", "height=32:64:256").stdout
    assert next(line for line in said.splitlines() if line.startswith("denoiser")).endswith("reused")


def test_a_disk_that_fills_up_while_the_bundle_is_written_leaves_the_old_one(built, monkeypatch):
    manifest = (built / "bundle.json").read_text()

    def refuse(source, target, **_):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(building, "copy_file", refuse)
    with pytest.raises(StorageError, match="No space left on device") as caught:
        call("--profile", "height=32:64:256")
    assert "nothing was changed" in caught.value.hint
    assert (built / "bundle.json").read_text() == manifest
    Bundle.open(built).verify(fresh=True)
    assert not list(built.parent.glob(".*.part"))


def test_a_graph_that_cannot_be_read_names_it(workspace):
    from trtdiff.digest import file_digest

    file = workspace / "exports/toy/export.json"
    graph = workspace / "exports/toy/denoiser.onnx"
    graph.write_bytes(b"\xff" * 100)
    manifest = json.loads(file.read_text())
    next(c for c in manifest["components"] if c["name"] == "denoiser")["graph_sha256"] = file_digest(graph)
    file.write_text(json.dumps(manifest))
    with pytest.raises(BuildError, match="the graph cannot be read") as caught:
        call()
    assert caught.value.where.endswith("denoiser.onnx")


def test_a_profile_name_with_spaces_is_the_same_name():
    from trtdiff.types import ShapeProfile

    with pytest.raises(UsageError, match="twice"):
        ShapeProfile.parse("batch=1, batch =2")
