"""A channel a hundred times as large as the others, and a branch that is always 0, in 8 bits.

Both are planted into the weights of a copy of an export, whose graph does not depend on them. Norms multiply a channel
by 100 and the linear layers behind them divide it again, so that the network computes what it did.
"""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from trtdiff.backends.onnxruntime import MODEL, OnnxRuntime
from trtdiff.calibrate.feeds import calibrate_feeds
from trtdiff.lowered import read_graph, write_graph
from trtdiff.lowering import named
from trtdiff.passes.quantize import quantize
from trtdiff.passes.widen_weights import widen_weights
from trtdiff.recipes import recipe

pytest.importorskip("onnxruntime")
CHANNEL, TIMES = 3, np.float32(100)
BEHIND = {"norm1": ("attn1.to_q", "attn1.to_k", "attn1.to_v"), "norm2": ("attn2.to_q",), "norm3": ("ff.net.0.proj",)}
"""Norm of a transformer block → the linear layers that read it."""
UNUSED = "mid_block.attentions.0.transformer_blocks.0.ff"


def plant_outliers(weights):
    for name, tensor in weights.items():
        block, dot, kind = name.removesuffix(".weight").rpartition(".")
        if name.endswith(".weight") and "transformer_blocks" in name and kind in BEHIND:
            tensor[CHANNEL] *= TIMES
            weights[f"{block}.{kind}.bias"][CHANNEL] *= TIMES
            for reader in BEHIND[kind]:
                weights[f"{block}{dot}{reader}.weight"][:, CHANNEL] /= TIMES


def plant_unused(weights):
    for end in ("weight", "bias"):
        weights[f"{UNUSED}.net.0.proj.{end}"][:] = 0


@pytest.fixture(scope="module")
def feeds(tiny_bundle):
    graph = read_graph(tiny_bundle.parent.parent / "exports/tiny/denoiser.onnx").graph
    sizes = {"batch": 2, "height": 64, "width": 64, "latent_height": 16, "latent_width": 16, "tokens": 77}
    rng, found = np.random.default_rng(7), []
    for _ in range(6):
        values = {}
        for value in graph.inputs:
            shape = [dim if isinstance(dim, int) else sizes.get(str(dim.value), 16) for dim in value.shape]
            numbers = rng.integers(0, 1000, shape) if value.name == "timestep" else rng.standard_normal(shape)
            values[str(value.name)] = numbers.astype(np.float32)
        found.append(values)
    return found


def error(export, precision, feeds, tmp_path, *, smooth=...):
    """Relative L2 of two predictions in 8 bits, the other arithmetic in float32, calibrated on four other inputs."""
    how = recipe(precision).quantization
    if smooth is not ...:
        how = replace(how, smooth=smooth)
    graph = export / "denoiser.onnx"
    seen = calibrate_feeds(graph, [(0, one) for one in feeds[:4]], tmp_path / "work", formats=[how.activations])
    made = []
    for quantized in (True, False):
        model = read_graph(graph)
        if quantized:
            quantize(model, how=how, base="float32", statistics=seen.values)
        for run in (widen_weights, *map(named, () if quantized else OnnxRuntime.passes)):
            run(model)
        folder = tmp_path / f"engine-{quantized}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_graph(model, folder).rename(folder / MODEL)
        session = OnnxRuntime().load(folder)
        made.append(np.stack([session.run(one)["prediction"] for one in feeds[4:]]))
        session.close()
    ours, theirs = made
    assert np.isfinite(ours).all()
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)), theirs, seen


@pytest.fixture(scope="module")
def export(tiny_bundle):
    return tiny_bundle.parent.parent / "exports/tiny"


@pytest.fixture
def copied(export, tmp_path):
    return shutil.copytree(export, tmp_path / "export")


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_an_outlier_channel_costs_next_to_nothing(precision, export, copied, feeds, edited, tmp_path):
    before, exact, _ = error(export, precision, feeds, tmp_path)
    with edited(copied / "weights/unet.safetensors") as weights:
        plant_outliers(weights)
    after, same, seen = error(copied, precision, feeds, tmp_path)
    assert same == pytest.approx(exact, abs=1e-4)
    wide = [one for one in seen.values.values() if one.channels and one.largest > 20 * np.median(one.channels)]
    assert wide, "the outliers are there"
    assert after < 1.1 * before
    if precision == "int8":
        assert error(copied, precision, feeds, tmp_path, smooth=None)[0] > 2 * after


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_a_branch_that_is_always_zero_breaks_nothing(precision, export, copied, feeds, edited, tmp_path):
    with edited(copied / "weights/unet.safetensors") as weights:
        plant_unused(weights)
    before, _, _ = error(export, precision, feeds, tmp_path)
    lost, _, seen = error(copied, precision, feeds, tmp_path)
    (unused,) = [layer for layer in seen.layers.values() if layer.module == f"{UNUSED}.net.2"]
    assert [seen.values[name].largest for name in unused.inputs] == [0.0]
    assert lost < 1.1 * before
