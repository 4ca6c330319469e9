"""One bundle, engines for several targets: what is built in which precision, what is refused, what runs."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import trtdiff
from trtdiff import worker
from trtdiff.backends.onnxruntime import OnnxRuntime
from trtdiff.backends.options import BuilderOptions
from trtdiff.backends.tensorrt_rtx import TensorRtRtx
from trtdiff.bundle import Bundle
from trtdiff.cli.build import build as command
from trtdiff.engines import runnable_backend
from trtdiff.errors import ArtefactError, MissingDependency, TrtdiffError, UsageError
from trtdiff.lowering import named
from trtdiff.worker import Outcome

pytest.importorskip("tensorrt_rtx")
BOTH = ("--target", "rtx:sm89", "--target", "cpu", "--precision", "fp16", "--no-range-scan")


def in_process(task, arguments, **_):
    """No process for each engine; and a few bytes in place of tables that take a minute."""
    if task == "trtdiff.lowering:compile_samplers":
        Path(arguments["out"], "samplers.safetensors").write_bytes(b"tables")
        return Outcome({"realised": {"samplers": arguments["names"], "refused": {}}}, 0.1, 1)
    value = named(task)(**arguments, progress=lambda done, total: None)
    return Outcome(json.loads(json.dumps(value)), 0.1, 1)


def call(*arguments):
    result = CliRunner().invoke(command, list(arguments))
    if isinstance(result.exception, TrtdiffError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def first(tmp_path_factory, export_maker):
    """The toy export, built for two backends: what was said, and the folder."""
    folder = tmp_path_factory.mktemp("first")
    export_maker(folder / "exports/toy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "run", in_process)
        patch.chdir(folder)
        return call(*BOTH), folder


@pytest.fixture
def workspace(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker, "run", in_process)
    shutil.copytree(first[1] / "exports", tmp_path / "exports")
    return tmp_path


@pytest.fixture
def both(first, workspace):
    shutil.copytree(first[1] / "engines", workspace / "engines")
    return Bundle.open(workspace / "engines/toy")


def test_a_bundle_has_engines_of_both_and_says_which_precision_each_has(first, both):
    assert "target cpu has no fp16; its engines are fp32" in first[0].stderr
    assert both.manifest.precision == {"tensorrt-rtx": "fp16", "onnxruntime": "fp32"}
    for backend, device in (("tensorrt-rtx", "sm89"), ("onnxruntime", "cpu")):
        assert set(both.components(backend)) == {"text_encoder", "denoiser", "vae_decoder", "vae_encoder"}
        assert both.engine_manifest(backend, "denoiser").spec["device"] == device
    both.verify(fresh=True)
    assert "up to date" in call(*BOTH).stdout


def test_what_the_family_knows_stays_in_float32(both):
    made = both.engine_manifest("tensorrt-rtx", "denoiser")
    assert "float32" in made.spec["islands"]["time_proj"]
    assert "1 node" in made.realised["islands"]["time_proj"]
    assert both.engine_manifest("onnxruntime", "denoiser").spec["islands"] == {}


def test_leaving_a_target_out_keeps_the_other_s_engines(both):
    said = call("--target", "cpu")
    assert "stale: tensorrt-rtx: no longer built" in said.stdout.splitlines()
    assert "made" not in said.stdout
    assert list(Bundle.open(both.path).manifest.engines) == ["onnxruntime"]
    assert "stale: tensorrt-rtx: new" in call(*BOTH).stdout.splitlines()


def test_what_this_machine_can_run_is_picked(both):
    assert runnable_backend(both) == "onnxruntime"
    with pytest.raises(MissingDependency, match="engines for tensorrt-rtx do not run here") as caught:
        trtdiff.load(both.path, "tensorrt-rtx")
    assert "--backend" in caught.value.hint


def test_the_best_that_runs_is_picked(both, monkeypatch):
    monkeypatch.setattr(TensorRtRtx, "runnable", lambda self: "")
    assert runnable_backend(both) == "tensorrt-rtx"


def test_engines_of_another_version_are_passed_over_and_refused_when_asked_for(both, monkeypatch):
    monkeypatch.setattr(TensorRtRtx, "runnable", lambda self: "")
    monkeypatch.setattr(TensorRtRtx, "mismatch", lambda self, spec: f"it was built with {spec['backend_version']}")
    assert runnable_backend(both) == "onnxruntime"
    with pytest.raises(ArtefactError, match="does not run here: it was built with 1"):
        trtdiff.load(both.path, "tensorrt-rtx")


def test_a_machine_that_runs_none_of_them_says_why_for_each(both, monkeypatch):
    monkeypatch.setattr(OnnxRuntime, "runnable", lambda self: "onnxruntime is not installed")
    with pytest.raises(MissingDependency, match="can run none") as caught:
        runnable_backend(both)
    assert "tensorrt-rtx" in caught.value.message
    assert "onnxruntime is not installed" in caught.value.message


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        (["--target", "rtx:sm86", "--target", "rtx:sm89"], "rtx:sm86 and rtx:sm89 are two", "rtx:sm86,sm89"),
        (["--target", "cpu", "--target", "rtx", "--precision", "fp32"], "target rtx is not built in fp32", "fp16"),
        (["--target", "cpu", "--precision", "fp16"], "target cpu is not built in fp16", "rtx"),
        (["--target", "cpu", "--workspace", "4GB"], "--workspace cannot be had: cpu: ONNX Runtime", "leave it out"),
        (["--target", "cpu", "--optimization-level", "9"], "no optimization level 9", "0 "),
        (["--target", "rtx", "--optimization-level", "0"], "--optimization-level cannot be had: rtx", "leave it out"),
        (["--target", "cpu", "--workspace", "much"], "'much' is not a size", "4GB"),
        (["--target", "cpu", "--keep", "mid_block.*"], "everything stays in float32", "leave --keep out"),
        (["--target", "rtx", "--keep", "unet:mid_block.*"], "there is no component 'unet'", "denoiser"),
        (["--target", "rtx", "--keep", "denoiser:"], "names no modules", "denoiser:mid_block"),
        (["--target", "rtx", "--keep", "time_porj", "--dry-run"], "no module matches time_porj", "time_proj"),
        (["--target", "rtx:sm89,sm99", "--dry-run"], "does not build for sm99, only for .*sm89", "leave that GPU out"),
        (["--target", "rtx:sm75", "--precision", "bf16", "--dry-run"], "sm75 has no bfloat16", "another --precision"),
        (["--target", "rtx:sm89,", "--dry-run"], "'' is not a compute capability", "rtx:sm89"),
    ],
)
def test_what_cannot_be_had(workspace, arguments, says, hint):
    with pytest.raises(UsageError, match=says) as caught:
        call(*arguments)
    assert hint in caught.value.hint
    assert not (workspace / "engines").exists()


def test_a_foreign_timing_cache_is_refused_before_anything_is_compiled(workspace, monkeypatch):
    monkeypatch.setattr(TensorRtRtx, "refusal", lambda self, option: "")
    (workspace / "times").write_text("somebody else's")
    with pytest.raises(ArtefactError, match="no timing cache of trtdiff"):
        call("--target", "rtx", "--no-range-scan", "--timing-cache", "times", "--dry-run")


def test_what_the_compiler_leaves_unproven_is_said(workspace, monkeypatch):
    def doubtful(task, arguments, **_):
        outcome = in_process(task, arguments)
        if task == "trtdiff.lowering:build_engine":
            outcome.value["realised"]["remarks"] = ["nothing is proven"]
        return outcome

    monkeypatch.setattr(worker, "run", doubtful)
    assert "warning: denoiser (onnxruntime): nothing is proven" in call("--target", "cpu").stderr


def test_what_was_asked_for_is_in_the_key_and_reaches_the_worker():
    asked = BuilderOptions(optimization_level=0, weight_streaming=True)
    assert asked.content() == {"optimization_level": 0, "weight_streaming": True}
    assert BuilderOptions.of(json.loads(json.dumps(asked.json()))) == asked
    assert asked.only({"optimization_level"}) == BuilderOptions(optimization_level=0)


def test_a_dry_run_says_what_it_will_take(workspace):
    said = call(*BOTH, "--dry-run").stdout
    line = next(line for line in said.splitlines() if line.startswith("denoiser (tensorrt-rtx)"))
    assert "to make, about" in line
    assert "memory" in line
    assert "in all about" in said
    pieces = json.loads(call(*BOTH, "--dry-run", "--json").stdout)["pieces"]
    assert all(piece["expected"]["memory"] > 0 for piece in pieces)
    assert not (workspace / "engines").exists()
