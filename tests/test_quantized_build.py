"""Precisions of 8 bits through the verbs: calibrated first or from a cache, built, checked, refused with reasons."""

import json
import struct
from dataclasses import replace

import pytest

from trtdiff.bundle import Bundle
from trtdiff.calibrate.cache import read_cache, sealed, write_cache
from trtdiff.calibrate.fitting import read_fitting_cache
from trtdiff.cli import exit_code as run
from trtdiff.errors import ArtefactError, UsageError
from trtdiff.export.read import read_export
from trtdiff.lowered import read_graph
from trtdiff.passes.layers import layers
from trtdiff.passes.quantize import quantize
from trtdiff.plan import make_plan
from trtdiff.recipes import RECIPES
from trtdiff.recipes.own import own_recipe

pytest.importorskip("onnxruntime")
SIZES = "batch=1:1:2,height=32:64:64,width=32:64:64"


@pytest.fixture(scope="module")
def export(tiny_bundle):
    return tiny_bundle.parent.parent / "exports/tiny"


@pytest.fixture(scope="module")
def cache(export, tmp_path_factory):
    """A calibration of the tiny checkpoint, of two steps in two bands."""
    path = tmp_path_factory.mktemp("calibration") / "tiny.json"
    few = ["--samples", "4", "--steps", "4", "--bands", "2", "--height", "64", "--width", "64"]
    assert run(["calibrate", str(export), *few, "-o", str(path)]) == 0
    return path


def build(export, out, *options, target="rounded"):
    """Build into a store that all tests share, so that schedulers and what is not quantized are made once."""
    store = export.parent.parent / "quantized-store"
    return run(
        ["build", str(export), "-o", str(out), "--schedulers", "ddim", "--target", target, "--profile", SIZES,
         "--store", str(store), *options]
    )  # fmt: skip


def planned(export, precision, cache=None, targets=("rounded",), **options):
    return make_plan(read_export(export), name="tiny", precision=precision, targets=targets, schedulers=("ddim",),
                     calibration=cache, **options)  # fmt: skip


EIGHT = ["int8", "fp8", "fp8-mixed", "int8-weights"]


@pytest.mark.parametrize("precision", EIGHT)
def test_it_is_built_from_a_cache_and_is_as_exact_as_its_recipe_says(
    precision, export, cache, tiny_checkpoint, tmp_path, capsys
):
    given = ["--calibration", str(cache)] if RECIPES[precision].calibrated else ["--no-range-scan"]
    assert build(export, tmp_path / "q", "--precision", precision, *given) == 0
    bundle = Bundle.open(tmp_path / "q")
    realised = bundle.engine_manifest("rounded", "denoiser").realised["quantization"]
    many = sum(1 for _ in layers(read_graph(export / "denoiser.onnx").graph))
    assert sum(realised["layers"].values()) > many / 2
    assert "quantization" not in bundle.engine_manifest("rounded", "vae_decoder").realised
    capsys.readouterr()
    command = ["check", str(tmp_path / "q"), "--against", str(tiny_checkpoint), "--steps", "4", "--json"]
    assert run(command) == 0
    assert json.loads(capsys.readouterr().out)["passed"]


def test_without_a_cache_it_calibrates_first_and_says_so(export, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert build(export, tmp_path / "q", "--precision", "fp8", "--dry-run") == 0
    out, err = capsys.readouterr()
    assert "calibrated first" in err
    assert "trtdiff calibrate" in err
    assert "calibration" in out
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration/tiny.json").write_text("{}")
    assert build(export, tmp_path / "q", "--precision", "fp8", "--dry-run") == 4
    assert "calibration/tiny.json (default)" in capsys.readouterr().err


def test_the_calibration_is_part_of_the_key(export, cache, tmp_path):
    other = tmp_path / "other.json"
    kept = read_cache(cache)
    write_cache(other, sealed(replace(kept, method="max")))
    keys = {
        name: {engine.component.name: engine.key for engine in planned(export, "fp8", path).engines}
        for name, path in (("first", cache), ("second", other), ("made", None))
    }
    assert len({tuple(found.values()) for found in keys.values()}) == 3
    assert planned(export, "fp8", None).ranges.calibrates
    assert planned(export, "int8-weights").ranges.calibrates is False  # it needs the range scan alone


def number(value):
    """The number that a graph holds in an initializer or a Constant."""
    if value.const_value is not None:
        return float(value.const_value.numpy())
    (held,) = value.producer().attributes.values()
    return float(held.value.numpy() if hasattr(held.value, "numpy") else held.value)


def test_scales_of_tensorrts_own_cache_are_those_of_the_graph(export, cache, tmp_path, capsys):
    """Written, cut down to some tensors, read, and built from: activations with scales are quantized by these alone."""
    text, mine = tmp_path / "calib.cache", tmp_path / "mine.json"
    assert run(["calibrate", str(export), "-o", str(cache), "--export-tensorrt", str(text), "--method", "max"]) == 0
    graph = read_graph(export / "denoiser.onnx").graph
    quantized = [layer for layer in layers(graph) if layer.operator in {"conv", "linear"} and "time_emb" not in
                 layer.module and layer.module not in {"conv_in", "conv_out"}]  # fmt: skip
    lacking = quantized[0].node.inputs[0]
    without = [layer.module for layer in quantized if layer.node.inputs[0] is lacking]
    header, *lines = text.read_text().splitlines()
    scales = {line.split(": ")[0]: struct.unpack("!f", bytes.fromhex(line.split(": ")[1]))[0] for line in lines}
    text.write_text("\n".join([header, *(line for line in lines if line.split(": ")[0] != lacking.name)]))
    assert run(["calibrate", str(export), "-o", str(mine), "--import-tensorrt", str(text)]) == 0
    capsys.readouterr()

    assert build(export, tmp_path / "q", "--precision", "int8", "--calibration", str(mine)) == 0
    said = capsys.readouterr().err
    assert f"calib.cache has no scales for {len(without)} of the {len(quantized)} layers of denoiser" in said
    assert without[0] in said
    assert "not smoothed" in said
    engine = Bundle.open(tmp_path / "q").engine_manifest("rounded", "denoiser")
    told = engine.realised["quantization"]
    assert told["layers"] == {"int8": len(quantized) - len(without)}
    assert sum("no scale of" in why for why in told["kept"].values()) == len(without)
    assert engine.realised["islands"] is not None
    plan = planned(export, "int8", mine)
    assert not plan.ranges.calibrates  # what stays in float32 is scanned: scales say nothing of sums
    model, found = read_graph(export / "denoiser.onnx"), read_cache(mine).components["denoiser"].values
    quantize(model, how=RECIPES["int8"].quantization, base="float16", statistics=found)
    steps = [node.inputs[1] for node in model.graph if node.op_type == "QuantizeLinear"]
    used = {number(step) for step in steps}
    read = {layer.node.inputs[0].name for layer in quantized} - {lacking.name}
    assert sorted(used) == pytest.approx(sorted({scales[name] for name in read}), rel=1e-6)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_cache_of_another_model_names_the_field(export, cache):
    exported = read_export(export)
    parts = tuple(
        replace(part, graph_sha256="0" * 64) if part.name == "denoiser" else part for part in exported.components
    )
    with pytest.raises(ArtefactError, match=r"graphs\.denoiser") as caught:
        read_fitting_cache(cache, replace(exported, components=parts), RECIPES["fp8"])
    assert caught.value.exit_code == 4


def test_a_recipe_that_quantizes_nothing_of_the_checkpoint(export, tmp_path):
    (tmp_path / "own.toml").write_text('based_on = "fp8"\n[quantization]\ncomponents = ["unet"]')
    with pytest.raises(UsageError, match="quantizes none of this checkpoint's components") as caught:
        planned(export, own_recipe(tmp_path / "own.toml"))
    assert "denoiser" in caught.value.hint


def test_a_cache_that_lacks_what_the_method_needs(export, cache, tmp_path):
    (tmp_path / "own.toml").write_text('based_on = "fp8"\n[quantization]\nmethod = "percentile"')
    with pytest.raises(ArtefactError, match="did not measure counts") as caught:
        planned(export, own_recipe(tmp_path / "own.toml"), cache)
    assert "--method percentile" in caught.value.hint


def test_a_target_without_it_says_which_have_it(export):
    with pytest.raises(UsageError, match="target cpu is not built in fp8") as caught:
        planned(export, "fp8", targets=["cpu"])
    assert "fp8 is built for: rtx, tensorrt, rounded" in caught.value.hint
    pytest.importorskip("tensorrt_rtx")
    with pytest.raises(UsageError, match="sm86") as caught:
        planned(export, "fp8", targets=["rtx:sm86,sm89"])
    assert "sm89" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--precision", "fp16", "--calibration", "CACHE"], "nothing that is built needs a calibration"),
        (["--precision", "fp8", "--recipe", "own.toml"], "both --precision and --recipe"),
        (["--precision", "fp8", "--calibration", "gone.json"], "cannot read gone.json"),
    ],
)
def test_options_that_do_not_fit(export, cache, tmp_path, capsys, options, says):
    words = [str(cache) if word == "CACHE" else word for word in options]
    assert build(export, tmp_path / "q", *words) in {2, 4}
    assert says in capsys.readouterr().err


def test_a_pattern_of_an_own_recipe_that_matches_nothing_shows_near_names(export, cache, tmp_path, capsys):
    (tmp_path / "own.toml").write_text('based_on = "int8"\n[quantization]\nkeep = ["mid_blok.*"]')
    given = ["--recipe", str(tmp_path / "own.toml"), "--calibration", str(cache)]
    assert build(export, tmp_path / "q", *given) == 2
    words = capsys.readouterr().err
    assert "no module matches mid_blok.*" in words
    assert "mid_block" in words.partition("to do:")[2]
    assert not (tmp_path / "q").exists()


def test_a_recipe_whose_pictures_are_worse_than_it_says_fails_and_names_layers(
    export, cache, tiny_checkpoint, tmp_path, capsys
):
    (tmp_path / "own.toml").write_text('based_on = "int8"\n[tolerance]\ncomponents = { denoiser = 1e-6 }')
    given = ["--recipe", str(tmp_path / "own.toml"), "--calibration", str(cache)]
    assert build(export, tmp_path / "q", *given) == 0
    bundle = Bundle.open(tmp_path / "q")
    assert bundle.manifest.precision == {"rounded": "own"}
    noisiest = bundle.engine_manifest("rounded", "denoiser").realised["quantization"]["noisiest"]
    decibels = [row["decibels"] for row in noisiest]
    assert decibels == sorted(decibels)
    capsys.readouterr()
    command = ["check", str(tmp_path / "q"), "--against", str(tiny_checkpoint), "--steps", "2", "--shapes", "opt"]
    assert run(command) == 3
    out, err = capsys.readouterr()
    assert noisiest[0]["module"] in out
    assert f'keep = ["{noisiest[0]["module"]}"' in err


# --- compiled by TensorRT for RTX ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["int8", "fp8", "int8-weights"])
def test_the_compiler_realises_8_bits(precision, export, cache, tmp_path):
    """What is counted is what the compiler lists, not what the graph says."""
    pytest.importorskip("tensorrt_rtx")
    given = ["--calibration", str(cache)] if RECIPES[precision].calibrated else ["--no-range-scan"]
    assert build(export, tmp_path / "q", "--precision", precision, *given, target="rtx:sm89") == 0
    realised = Bundle.open(tmp_path / "q").engine_manifest("tensorrt-rtx", "denoiser").realised
    if precision == "int8-weights":
        assert set(realised["quantization"]["layers"]) == {"int8 weights"}
        assert realised["quantized"]["share"] == 0  # it multiplies in half precision
        return
    counted = realised["quantized"]
    assert counted[{"int8": "int8", "fp8": "float8"}[precision]] > 0.5 * counted["total"]
    assert not realised.get("not_quantized")
