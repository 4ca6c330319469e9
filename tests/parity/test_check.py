import json
import shutil

import numpy as np
import pytest

from trtdiff.checkpoint import Checkpoint
from trtdiff.cli import exit_code as run
from trtdiff.errors import ArtefactError, UsageError
from trtdiff.parity import check as parity_check
from trtdiff.parity.check import Check, parse_points
from trtdiff.parity.reference import Reference

PROMPTS = ["--prompt", "a small red house", "--prompt", "the cat"]


@pytest.mark.parametrize("scheduler", ["default", "euler_a", "dpmpp_2m"])
def test_a_bundle_equals_the_checkpoint_it_was_made_from(tiny_bundle, tiny_checkpoint, scheduler, capsys):
    shapes = "min,opt,max" if scheduler == "default" else "opt"
    command = ["check", str(tiny_bundle), "--against", str(tiny_checkpoint), "--steps", "6", "--json", *PROMPTS]
    assert run([*command, "--scheduler", scheduler, "--shapes", shapes]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"]
    assert report["shapes"] == shapes.split(",")
    compared = {row["name"] for row in report["results"]}
    assert compared >= {
        "text_encoder.encoder_hidden_states", "denoiser.prediction", "denoiser.latent", "vae_decoder.image",
        "vae_encoder.mean", "vae_encoder.std", "text to image.latents", "text to image.picture",
        "image to image.latents", "image to image.picture",
    }  # fmt: skip
    assert all(row["needed"] <= row["tolerance"] for row in report["results"])
    assert ("only (min, max not checked)" in report["verdict"]) == (shapes == "opt")


def test_a_wrong_module_fails_with_exit_code_3_and_is_named(tiny_bundle, tiny_checkpoint, monkeypatch, capsys):
    real = Reference.component

    def wrong(self, spec, feeds):
        made = real(self, spec, feeds)
        return {name: value * 1.001 if spec.name == "vae_decoder" else value for name, value in made.items()}

    monkeypatch.setattr(Reference, "component", wrong)
    command = [
        "check",
        str(tiny_bundle),
        "--against",
        str(tiny_checkpoint),
        "--steps",
        "2",
        "--shapes",
        "opt",
        "--json",
    ]
    assert run(command) == 3
    report = json.loads(capsys.readouterr().out)
    failed = [row["name"] for row in report["results"] if not row["passed"]]
    assert failed == ["vae_decoder.image"]
    assert "FAILED" in report["verdict"]


def test_a_result_that_is_not_finite_fails_and_has_no_number(tiny_bundle, tiny_checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(Reference, "component", lambda _self, spec, _feeds: _nan(spec))
    command = [
        "check",
        str(tiny_bundle),
        "--against",
        str(tiny_checkpoint),
        "--steps",
        "2",
        "--shapes",
        "opt",
        "--json",
    ]
    assert run(command) == 3
    rows = json.loads(capsys.readouterr().out)["results"]
    encoder = next(row for row in rows if row["name"].startswith("text_encoder"))
    assert encoder["needed"] is None
    assert encoder["problem"]


def _nan(spec):
    sizes = {"batch": 1, "height": 64, "width": 64, "tokens": 16}
    return {item.name: np.full(item.shape(sizes), np.nan, np.float32) for item in spec.outputs}


def test_another_checkpoint_is_refused_before_anything_runs(tiny_bundle, tiny_checkpoint, tmp_path):
    other = shutil.copytree(tiny_checkpoint, tmp_path / "other")
    config = json.loads((other / "scheduler/scheduler_config.json").read_text())
    (other / "scheduler/scheduler_config.json").write_text(json.dumps({**config, "beta_end": 0.02}))
    with pytest.raises(ArtefactError, match="another checkpoint") as caught:
        Check(tiny_bundle, Checkpoint.open(str(other)))
    assert "checkpoint.digest" in caught.value.where


def test_a_shape_beyond_the_memory_is_refused_with_the_number(tiny_bundle, tiny_checkpoint, monkeypatch):
    monkeypatch.setattr(parity_check, "available_memory", lambda: 1 << 20)
    with Check(tiny_bundle, Checkpoint.open(str(tiny_checkpoint))) as work:
        planned = work.plan(("max",))
        assert all(item.cost.flops > 0 for item in planned)
        with pytest.raises(UsageError, match=r"takes about .* GB") as caught:
            work.refuse_beyond_memory(planned, work.request(steps=6))
    assert "--shapes opt" in caught.value.hint


@pytest.mark.parametrize("text", ["", "largest", "min,,huge"])
def test_unknown_shapes_are_refused(text):
    with pytest.raises(UsageError, match="no shape"):
        parse_points(text)
    assert parse_points("max, min") == ("min", "max")


@pytest.mark.parametrize("options", [["--scheduler", "eulr"], ["--steps", "101"], ["--steps", "0"]])
def test_a_request_that_cannot_run_is_refused_before_anything_does(tiny_bundle, tiny_checkpoint, options, monkeypatch):
    monkeypatch.setattr(Reference, "__init__", lambda *_: pytest.fail("the reference was loaded"))
    assert run(["check", str(tiny_bundle), "--against", str(tiny_checkpoint), *options]) == 2


def test_one_step_leaves_image_to_image_out_and_says_so(tiny_bundle, tiny_checkpoint, capsys):
    command = [
        "check",
        str(tiny_bundle),
        "--against",
        str(tiny_checkpoint),
        "--steps",
        "1",
        "--shapes",
        "opt",
        "--json",
    ]
    assert run(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert not any(row["name"].startswith("image to image") for row in report["results"])
    assert "image to image not checked" in report["verdict"]


def test_weights_that_were_asked_for_in_half_precision_are_compared_with_the_same_rounding(
    tiny_checkpoint, bundle_maker, tmp_path, monkeypatch, capsys
):
    """The tiny checkpoint is fp32: rounded to fp16 it differs from itself by more than the tolerance."""
    made = bundle_maker(tiny_checkpoint, tmp_path, dtype="float16")
    command = ["check", str(made), "--against", str(tiny_checkpoint), "--steps", "2", "--shapes", "opt", "--json"]
    assert run(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["weights"] == "float16"
    assert "PyTorch's weights rounded to float16" in report["verdict"]
    real = Reference.__init__
    monkeypatch.setattr(Reference, "__init__", lambda self, checkpoint, _dtype: real(self, checkpoint))
    assert run(command) == 3


def test_mixed_variants_are_compared_with_the_files_that_were_compiled(tiny_checkpoint, bundle_maker, tmp_path, capsys):
    """The UNet has plain and fp16 files, which differ, and is compiled from the plain ones; the VAE only has fp16."""
    import torch
    from safetensors.torch import load_file, save_file

    mixed = shutil.copytree(tiny_checkpoint, tmp_path / "mixed")
    for part in ("unet", "vae"):
        plain = mixed / part / "diffusion_pytorch_model.safetensors"
        halved = {name: value.to(torch.float16) for name, value in load_file(plain).items()}
        save_file(halved, mixed / part / "diffusion_pytorch_model.fp16.safetensors", metadata={"format": "pt"})
    (mixed / "vae/diffusion_pytorch_model.safetensors").unlink()
    assert Checkpoint.open(str(mixed)).variants == {"text_encoder": None, "unet": None, "vae": "fp16"}
    made = bundle_maker(mixed, tmp_path)
    assert run(["check", str(made), "--against", str(mixed), "--steps", "2", "--shapes", "opt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
