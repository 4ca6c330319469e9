"""A block whose values leave fp16's range while the picture does not: found by the scan, kept by the build, or blamed.

A convolution 200,000 times as strong is normalised away by the GroupNorm behind it. In float32 nothing is wrong; in
fp16 it is infinite. The graph does not depend on weights, so they are planted into copies of a checkpoint and its
export.
"""

import json
import shutil
from dataclasses import asdict

import numpy as np
import pytest

from trtdiff import build, worker
from trtdiff.calibrate.ranges import RANGES_FILE, read_ranges
from trtdiff.calibrate.scan import scan_ranges, scan_settings
from trtdiff.checkpoint import Checkpoint
from trtdiff.cli import exit_code as run
from trtdiff.digest import file_digest
from trtdiff.errors import NonFiniteError
from trtdiff.export import schedulers
from trtdiff.export.read import read_export
from trtdiff.lowering import named
from trtdiff.plan import make_plan
from trtdiff.store import Store

MODULE = "mid_block.resnets.0.conv1"
TOO_LARGE = {f"{MODULE}/Conv", "mid_block.resnets.0/Add"}
"""The convolution, and its sum with the timestep's embedding, which the norm reads."""
UNET = "unet/diffusion_pytorch_model.safetensors"


def plant(edited, file, factor):
    """Multiply the convolution's weights where they lie."""
    with edited(file) as weights, np.errstate(over="ignore"):
        for end in ("weight", "bias"):
            weights[f"{MODULE}.{end}"][...] *= np.float32(factor)


def planted(edited, checkpoint, export, folder, factor):
    """Copies of a checkpoint and of its export with other weights; gives both folders."""
    changed = shutil.copytree(checkpoint, folder / "checkpoint")
    copied = shutil.copytree(export, folder / "export")
    plant(edited, changed / UNET, factor)
    plant(edited, copied / "weights/unet.safetensors", factor)
    about = json.loads((copied / "export.json").read_text())
    about["checkpoint"]["digest"] = Checkpoint.open(str(changed)).origin().digest
    for component in about["components"]:
        component["weights"] = {name: file_digest(copied / name) for name in component["weights"]}
    (copied / "export.json").write_text(json.dumps(about))
    return changed, copied


@pytest.fixture(scope="module")
def overflowing(edited, tiny_checkpoint, tiny_bundle, tmp_path_factory):
    export = tiny_bundle.parent.parent / "exports/tiny"
    return planted(edited, tiny_checkpoint, export, tmp_path_factory.mktemp("planted"), 2e5)


def scan(export, out, steps=2):
    """Scan, and count executions."""
    seen = []
    settings = asdict(scan_settings(read_export(export), {"steps": steps}))
    out.mkdir()
    made = scan_ranges(
        export=str(export), out=str(out), settings=settings, progress=lambda done, total: seen.append((done, total))
    )
    return made, seen, out / RANGES_FILE


def test_the_scan_finds_exactly_what_was_planted(overflowing, tmp_path):
    made, seen, file = scan(overflowing[1], tmp_path / "scan")
    ranges = read_ranges(file)
    large = {value for values in ranges.components.values() for value, seen in values.items() if 2 * seen.amax > 65504}
    assert large == TOO_LARGE
    assert set(ranges.components) == {"text_encoder", "denoiser", "vae_decoder", "vae_encoder"}
    assert ranges.calls == {"text_encoder": 3, "denoiser": 2 * 2 * 2, "vae_decoder": 2, "vae_encoder": 2}
    assert seen == [(done, 15) for done in range(1, 16)]
    assert made["realised"]["largest"]["denoiser"]["value"] in TOO_LARGE
    assert [item.name for item in (tmp_path / "scan").iterdir()] == [RANGES_FILE]


def test_equal_settings_give_equal_bytes(overflowing, tmp_path):
    files = [scan(overflowing[1], tmp_path / name, steps=1)[2].read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]


def test_a_checkpoint_that_overflows_float32_is_an_error_that_names_the_layer(
    edited, tiny_checkpoint, tiny_bundle, tmp_path
):
    export = tiny_bundle.parent.parent / "exports/tiny"
    _, broken = planted(edited, tiny_checkpoint, export, tmp_path, np.inf)
    with pytest.raises(NonFiniteError, match="in float32") as caught:
        scan(broken, tmp_path / "scan", steps=1)
    assert f"denoiser: first in {MODULE} (node {MODULE}/Conv)" in caught.value.where


@pytest.fixture(scope="module", params=[True, False], ids=["scanned", "not scanned"])
def half_bundle(request, overflowing, tmp_path_factory):
    """An fp16 bundle that shows its rounding, made with the scan and without it."""
    folder = tmp_path_factory.mktemp("half")

    def in_this_process(task, arguments, **_):
        return worker.Outcome(named(task)(**arguments, progress=lambda done, total: None), 0.0, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "run", in_this_process)
        real = schedulers.compile_samplers
        patch.setattr(schedulers, "compile_samplers", lambda *args, **kwargs: real(*args, **{"steps": [2], **kwargs}))
        plan = make_plan(
            read_export(overflowing[1]), name="half", precision="fp16", targets=["rounded"], schedulers=None,
            profile="batch=1:1:2,height=64,width=64", range_scan=request.param,
        )  # fmt: skip
        build.build(plan, overflowing[1], folder / "bundle", Store(folder / "store"))
    return request.param, folder / "bundle"


def test_check_holds_with_the_island_and_blames_the_layer_without(half_bundle, overflowing, capsys):
    scanned, bundle = half_bundle
    command = ["check", str(bundle), "--against", str(overflowing[0]), "--steps", "2", "--shapes", "opt", "--json"]
    command += ["--prompt", "the cat"]
    code = run(command)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["results"]}
    blamed = {name for name, row in rows.items() if f"first in {MODULE} (node {MODULE}/Conv)" in row["problem"]}
    if scanned:
        assert code == 0
        assert blamed == set()
        assert rows["denoiser.prediction"]["needed"] > 1e-5  # it is in fp16, but for the island
    else:
        assert code == 3
        assert blamed == {
            "denoiser.prediction", "text to image.latents", "text to image.picture", "image to image.latents",
            "image to image.picture",
        }  # fmt: skip
        assert rows["vae_decoder.image"]["passed"]
