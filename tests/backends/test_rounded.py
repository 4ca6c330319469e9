"""The backend that shows half precision on a CPU: the whole product runs on it, and is as exact as its recipe says."""

import json

import numpy as np
import pytest

import trtdiff
from trtdiff.backends import backend
from trtdiff.cli import exit_code as run


@pytest.fixture(scope="module", params=["fp16", "bf16"])
def made(request, tiny_bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "tiny"
    command = ["build", str(tiny_bundle.parent.parent / "exports/tiny"), "-o", str(folder), "--schedulers", "ddim"]
    sizes = "batch=1:1:2,height=32:64:64,width=32:64:64"
    assert run([*command, "--target", "rounded", "--precision", request.param, "--profile", sizes]) == 0
    return request.param, folder


def test_it_differs_from_float32_by_no_more_than_its_recipe_says(made, tiny_checkpoint, capsys):
    precision, folder = made
    command = ["check", str(folder), "--against", str(tiny_checkpoint), "--steps", "4", "--json"]
    assert run(command) == 0
    report = json.loads(capsys.readouterr().out)
    needed = {row["name"]: row["needed"] for row in report["results"]}
    least = {"fp16": 2**-12, "bf16": 2**-9}[precision]  # half a unit in the last place
    assert needed["denoiser.prediction"] > least / 4  # and is not float32 in disguise
    assert needed["denoiser.latent"] < 1e-6  # the sampler's sums are float32


def test_pictures_are_close_to_those_of_float32(made, tiny_bundle):
    precision, folder = made
    pictures = []
    for bundle in (folder, tiny_bundle):
        with trtdiff.load(bundle, threads=1) as pipeline:
            result = pipeline("a red cat", steps=6, seed=3)
            pictures.append(np.asarray(result.images[0], dtype=float))
    error = np.mean((pictures[0] - pictures[1]) ** 2)
    assert 10 * np.log10(255**2 / error) > {"fp16": 45, "bf16": 30}[precision]


HEADS = """<ir_version: 11, opset_import: ["": 23]>
net (float[batch, 1, 4, SIZE] q, float[batch, 1, 4, SIZE] k, float[batch, 1, 4, SIZE] v) => (float[batch, 1, 4, SIZE] y)
{ y = Attention <scale = 1.0> (q, k, v) }"""


@pytest.mark.parametrize("size", [64, 512])
def test_scores_beyond_half_precision_need_no_island(tmp_path, size):
    """Heads of 64 have a fused kernel, whose scores are float32; those of 512 have none, and are decomposed safely."""
    from trtdiff.calibrate.feeds import calibrate_feeds
    from trtdiff.calibrate.ranges import RANGES_SCHEMA, Ranges, ValueRange
    from trtdiff.lowering import build_engine
    from trtdiff.recipes import recipe
    from trtdiff.records import write_record

    ir = pytest.importorskip("onnx_ir")
    ir.save(ir.from_onnx_text(HEADS.replace("SIZE", str(size))), tmp_path / "net.onnx")
    rounded = backend("rounded")
    values = np.full((1, 1, 4, size), (1e5 / size) ** 0.5, np.float32)  # their products add up to 100,000
    feeds = {"q": values, "k": values, "v": values}
    seen = calibrate_feeds(tmp_path / "net.onnx", [(0, feeds)], tmp_path / "scan", method="max", component="net")
    ranges = {name: ValueRange(one.largest, one.rms) for name, one in seen.values.items()}
    write_record(tmp_path / "ranges.json", Ranges(RANGES_SCHEMA, {"net": ranges}, {"net": 1}, ""))
    made = build_engine(
        graph=str(tmp_path / "net.onnx"), passes=[*recipe("fp16").passes, *rounded.passes], backend="rounded",
        device=rounded.device, computes_in="float16", ranges=str(tmp_path / "ranges.json"),
        profile={"batch": "1"}, options={}, out=str(tmp_path), progress=lambda done, total: None,
    )  # fmt: skip
    assert made["realised"]["islands"] == {}
    with rounded.load(tmp_path / "engine", threads=1) as session:
        got = session.run(feeds)["y"]
    np.testing.assert_allclose(got, values, rtol=2**-10)  # all scores are one number, and so are all values
