"""Receipts survive the trip to JSON and back, and refuse what is not one."""

import json

import pytest

from trtdiff.errors import ArtefactError
from trtdiff.export.manifest import CheckpointOrigin
from trtdiff.machine import this_machine
from trtdiff.receipt import EngineUse, PictureFacts, Receipt, SchedulerUse, StageTime


def receipt():
    return Receipt(
        schema=1,
        trtdiff="0.1.0",
        created="2026-01-01T00:00:00+00:00",
        bundle="toy",
        bundle_digest="d" * 64,
        family="stable-diffusion",
        checkpoint=CheckpointOrigin("toy", "abc", "0", "StableDiffusionPipeline"),
        precision="fp32",
        backend="onnxruntime",
        backend_version="1.32.0",
        device="cpu",
        engines={"denoiser": EngineUse("key", 0.5)},
        loop="device",
        scheduler=SchedulerUse("ddim", "DDIMScheduler", "e" * 64, 20, None, 20, 1e-12),
        guidance=4.0,
        strength=None,
        height=64,
        width=64,
        batches=(2, 1),
        pictures=tuple(PictureFacts("a 猫", None, seed, None, "f" * 64) for seed in (0, 2**64 - 1, -(2**63))),
        stages={"step": StageTime.of([0.1, 0.2])},
        seconds=0.3,
        first_run=True,
        threads=None,
        peak_memory=1,
        machine=this_machine(),
        warnings=("cut",),
    )


def test_a_receipt_survives_json(tmp_path):
    receipt().write(tmp_path / "out.json")
    assert Receipt.read(tmp_path / "out.json") == receipt()
    assert json.loads((tmp_path / "out.json").read_text())["pictures"][1]["seed"] == 2**64 - 1


def test_a_newer_receipt_is_refused(tmp_path):
    receipt().write(tmp_path / "out.json")
    loose = json.loads((tmp_path / "out.json").read_text())
    (tmp_path / "out.json").write_text(json.dumps({**loose, "schema": 2}))
    with pytest.raises(ArtefactError, match="schema 2"):
        Receipt.read(tmp_path / "out.json")


def test_a_wrong_field_is_named(tmp_path):
    receipt().write(tmp_path / "out.json")
    loose = json.loads((tmp_path / "out.json").read_text())
    (tmp_path / "out.json").write_text(json.dumps({**loose, "guidance": "high"}))
    with pytest.raises(ArtefactError, match=r"\$\.guidance"):
        Receipt.read(tmp_path / "out.json")


@pytest.mark.parametrize(
    ("seconds", "median", "p95"),
    [([3.0], 3.0, 3.0), ([4.0, 1.0, 3.0, 2.0], 2.5, 4.0), ([*map(float, range(1, 101))], 50.5, 95.0)],
)
def test_stage_times_are_median_and_nearest_rank(seconds, median, p95):
    time = StageTime.of(seconds)
    assert (time.count, time.median, time.p95, time.total) == (len(seconds), median, p95, sum(seconds))


def test_the_machine_is_described():
    machine = this_machine()
    assert machine.cores >= 1
    assert machine.memory > 1 << 28
    assert machine.processor
    assert "numpy" in machine.libraries
