"""Layers in 8 bits: what is rounded and how, what is left alone and why, and that runtimes compute what is meant."""

import re

import numpy as np
import pytest

from trtdiff.calibrate.cache import Statistics
from trtdiff.errors import ArtefactError, BuildError
from trtdiff.lowered import write_graph
from trtdiff.passes.check_graph import check_graph
from trtdiff.passes.half_precision import half_precision
from trtdiff.passes.half_types import KEEP
from trtdiff.passes.quantize import quantize
from trtdiff.passes.smoothing import smoothing_factors
from trtdiff.recipes.quantization import Quantization

ir = pytest.importorskip("onnx_ir")
ort = pytest.importorskip("onnxruntime")
ml_dtypes = pytest.importorskip("ml_dtypes")

RANDOM = np.random.default_rng(7)
WEIGHTS = {
    "w_conv": RANDOM.normal(0, 0.1, (6, 4, 3, 3)).astype(np.float32),
    "w_a": RANDOM.normal(0, 0.1, (8, 6)).astype(np.float32),
    "w_b": RANDOM.normal(0, 0.1, (5, 6)).astype(np.float32),
}
NET = """<ir_version: 11, opset_import: ["": 23]>
net (float[n, 4, h, w] x) => (float[n, t, 8] a, float[n, t, 5] b)
<int64[3] shape = {0, 6, -1}>
{
    kernel = Cast <to = 1> (w_conv)
    drawn = Conv <pads = [1, 1, 1, 1]> (x, kernel)
    flat = Reshape (drawn, shape)
    rows = Transpose <perm = [0, 2, 1]> (flat)
    wide_a = Cast <to = 1> (w_a)
    turned_a = Transpose <perm = [1, 0]> (wide_a)
    a = MatMul (rows, turned_a)
    wide_b = Cast <to = 1> (w_b)
    turned_b = Transpose <perm = [1, 0]> (wide_b)
    b = MatMul (rows, turned_b)
}"""
BOTH = Quantization("int8", "int8")


def make(text=NET, weights=WEIGHTS):
    model = ir.from_onnx_text(text)
    names = {value.name for node in model.graph for value in node.inputs if value is not None}
    for name in names & weights.keys():
        value = next(v for node in model.graph for v in node.inputs if v is not None and v.name == name)
        value.const_value = ir.tensor(weights[name], name=name)
        value.dtype, value.shape = value.const_value.dtype, ir.Shape(weights[name].shape)
        model.graph.register_initializer(value)
    for node in model.graph:
        node.name = node.outputs[0].name
        node.metadata_props["module"] = f"block.{node.name}"
        for value in node.outputs:
            value.dtype = ir.DataType.FLOAT if value.dtype is None else value.dtype
    return model


def seen(**amax):
    return {name: Statistics((largest,), (1.0,), (1,)) for name, largest in amax.items()}


def run(model, feeds, folder):
    folder.mkdir()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(write_graph(model, folder)), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def int8(array, clip):
    scale = np.float32(clip / 127)
    return np.clip(np.rint(array / scale), -128, 127) * scale


def by_channel(weight):
    largest = np.abs(weight.reshape(len(weight), -1)).max(axis=1).reshape(-1, *[1] * (weight.ndim - 1))
    return int8(weight, largest)


def conv(x, weight):
    import torch

    return torch.nn.functional.conv2d(torch.tensor(x), torch.tensor(weight), padding=1).numpy()


def test_it_computes_what_numpy_computes_with_rounded_operands(tmp_path):
    model = make()
    found = quantize(model, how=BOTH, base="float32", statistics=seen(x=2.0, rows=1.5))
    check_graph(model)
    x = RANDOM.normal(size=(2, 4, 5, 5)).astype(np.float32)
    got = run(model, {"x": x}, tmp_path / "net")
    drawn = conv(int8(x, 2.0), by_channel(WEIGHTS["w_conv"]))
    rows = int8(drawn.reshape(2, 6, -1).transpose(0, 2, 1), 1.5)
    np.testing.assert_allclose(got["a"], rows @ by_channel(WEIGHTS["w_a"]).T, atol=1e-5)
    np.testing.assert_allclose(got["b"], rows @ by_channel(WEIGHTS["w_b"]).T, atol=1e-5)
    assert found.layers == {"drawn": "int8", "a": "int8", "b": "int8"}
    assert found.kept == {}


def test_one_pair_serves_all_readers_and_weights_are_stored_in_8_bits():
    model = make()
    quantize(model, how=BOTH, base="float32", statistics=seen(x=2.0, rows=1.5))
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("QuantizeLinear") == 2  # x and rows, though three layers read them
    assert kinds.count("DequantizeLinear") == 5
    stored = {name: value.dtype for name, value in model.graph.initializers.items() if value.dtype != ir.DataType.INT64}
    assert set(stored) == {f"{name}.int8" for name in WEIGHTS} | {f"{name}.int8.scale" for name in WEIGHTS}
    assert {stored[f"{name}.int8"] for name in WEIGHTS} == {ir.DataType.INT8}
    names = [node.name for node in model.graph]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("base", ["float16", "bfloat16"])
def test_in_half_precision_scales_stay_in_float32(base):
    model = make()
    quantize(model, how=BOTH, base=base, statistics=seen(x=2.0, rows=1.5))
    half_precision(model, dtype=base)
    check_graph(model)
    half = ir.DataType[base.upper()]
    for node in model.graph:
        if node.op_type == "QuantizeLinear":
            assert [value.dtype for value in node.inputs[:2]] == [half, ir.DataType.FLOAT]
        if node.op_type == "DequantizeLinear":
            assert node.inputs[1].dtype == ir.DataType.FLOAT
            assert node.outputs[0].dtype == node.attributes["output_dtype"].as_int() == half
        if node.op_type in {"Conv", "MatMul"}:
            assert {value.dtype for value in node.inputs} == {half}


def test_only_weights(tmp_path):
    model = make()
    found = quantize(model, how=Quantization("int8", None), base="float32")
    assert found.layers["drawn"] == "int8 weights"
    assert not any(node.op_type == "QuantizeLinear" for node in model.graph)
    x = RANDOM.normal(size=(1, 4, 4, 4)).astype(np.float32)
    rows = conv(x, by_channel(WEIGHTS["w_conv"])).reshape(1, 6, -1).transpose(0, 2, 1)
    got = run(model, {"x": x}, tmp_path / "net")
    np.testing.assert_allclose(got["a"], rows @ by_channel(WEIGHTS["w_a"]).T, atol=1e-5)


def test_float8_weights_are_no_worse_than_with_the_largest_magnitude_as_clip(tmp_path):
    model = make()
    quantize(model, how=Quantization("float8", None), base="float32")
    (tmp_path / "net").mkdir()
    write_graph(model, tmp_path / "net")
    for name, weight in WEIGHTS.items():
        bytes_, scales = (model.graph.initializers[f"{name}.float8{end}"].const_value for end in ("", ".scale"))
        scales = scales.numpy().reshape(-1, *[1] * (weight.ndim - 1))
        kept = bytes_.numpy().astype(np.float32) * scales
        usual = np.abs(weight.reshape(len(weight), -1)).max(axis=1).reshape(scales.shape) / 448
        plain = (weight / usual).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * usual
        assert np.square(kept - weight).sum() <= np.square(plain - weight).sum()
        assert np.linalg.norm(kept - weight) / np.linalg.norm(weight) < 2**-4  # half a unit in the last of 3 bits


# --- what stays ------------------------------------------------------------------------------------------------------


def test_a_layer_that_stays_says_why():
    model = make()
    next(node for node in model.graph if node.name == "b").metadata_props[KEEP] = "for a test"
    how = Quantization("int8", "int8", keep={"*.drawn": "it is drawn"}, least=7)
    found = quantize(model, how=how, base="float32", statistics=seen(rows=1.0))
    assert found.layers == {}
    assert found.kept == {
        "drawn": "it is drawn",
        "a": "sums of 6 terms, 8 outputs: smaller than 7",
        "b": "it stays in float32: for a test",
    }


def test_nothing_but_convolutions():
    model = make()
    found = quantize(model, how=Quantization("int8", "int8", ("conv",)), base="float32", statistics=seen(x=1.0))
    assert found.layers == {"drawn": "int8"}


def test_a_value_that_was_not_calibrated_is_named():
    with pytest.raises(ArtefactError, match="nothing of rows"):
        quantize(make(), how=BOTH, base="float32", statistics=seen(x=1.0))


def test_a_weight_that_is_not_finite_is_named(tmp_path):
    model = make(weights={**WEIGHTS, "w_a": np.full((8, 6), np.nan, np.float32)})
    quantize(model, how=Quantization("int8", None), base="float32")
    with pytest.raises(BuildError, match="not finite") as caught:
        write_graph(model, tmp_path)
    assert "w_a" in caught.value.where


# --- outliers, and branches that are never used ----------------------------------------------------------------------


def test_an_outlier_channel_costs_little_once_it_is_smoothed(tmp_path):
    text = """<ir_version: 11, opset_import: ["": 23]>
    net (float[n, t, 64] x) => (float[n, t, 32] y)
    { wide = Cast <to = 1> (w)
      turned = Transpose <perm = [1, 0]> (wide)
      y = MatMul (x, turned) }"""
    weight = RANDOM.normal(0, 0.1, (32, 64)).astype(np.float32)
    x = RANDOM.normal(size=(1, 200, 64)).astype(np.float32)
    x[..., 17] *= 100
    statistics = {"x": Statistics((np.abs(x).max(),), (1.0,), (1,), channels=tuple(np.abs(x[0]).max(axis=0).tolist()))}
    right = x @ weight.T
    errors = {}
    for alpha in (None, 0.5):
        model = make(text, {"w": weight})
        quantize(model, how=Quantization("int8", "int8", smooth=alpha), base="float32", statistics=statistics)
        check_graph(model)
        got = run(model, {"x": x}, tmp_path / str(alpha))["y"]
        errors[alpha] = np.linalg.norm(got - right) / np.linalg.norm(right)
    lost = np.sqrt(np.mean((int8(x, np.abs(x).max()) - x)[..., :17] ** 2) / np.mean(x[..., :17] ** 2))
    assert lost > 0.5  # without smoothing most of the other channels is lost
    assert errors[0.5] < errors[None] / 3


def test_factors_are_those_of_the_paper():
    channels, weights = np.array([8.0, 2.0, 0.0, 3.0]), np.array([0.5, 2.0, 1.0, 0.0])
    factors = smoothing_factors(channels, weights, 0.5)
    assert factors[0] / factors[1] == pytest.approx((8 / 0.5) ** 0.5 / (2 / 2) ** 0.5)
    assert factors[2] == factors[3] == 1  # nothing is known of them
    assert smoothing_factors(channels, weights, 1.0)[0] / smoothing_factors(channels, weights, 1.0)[1] == pytest.approx(
        4
    )


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_a_branch_that_is_always_zero_stays_zero_and_finite(tmp_path, kind):
    weights = {**WEIGHTS, "w_conv": np.zeros_like(WEIGHTS["w_conv"])}
    model = make(weights=weights)
    quantize(model, how=Quantization(kind, kind), base="float32", statistics=seen(x=1.0, rows=0.0))
    got = run(model, {"x": np.ones((1, 4, 3, 3), np.float32)}, tmp_path / "net")
    assert not np.any(got["a"])


# --- attention -------------------------------------------------------------------------------------------------------

HEADS = """<ir_version: 11, opset_import: ["": 23]>
net (float[n, 2, t, SIZE] q, float[n, 2, s, SIZE] k, float[n, 2, s, SIZE] v) => (float[n, 2, t, SIZE] y)
{ y = Attention (q, k, v) }"""
ATTENTION = Quantization("float8", "float8", ("attention",))


def float8(array, clip):
    scale = np.float32(clip / 448)
    return (array / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def test_attention_in_float8_rounds_its_softmax_too(tmp_path):
    model = make(HEADS.replace("SIZE", "16"))
    found = quantize(model, how=ATTENTION, base="float32", statistics=seen(q=4.0, k=5.0, v=6.0))
    check_graph(model)
    assert found.layers == {"y": "float8"}
    q, k, v = (RANDOM.normal(size=(1, 2, 7, 16)).astype(np.float32) for _ in range(3))
    got = run(model, {"q": q, "k": k, "v": v}, tmp_path / "net")["y"]
    scores = float8(q / 4, 1.0) @ float8(k, 5.0).transpose(0, 1, 3, 2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = float8(weights / weights.sum(axis=-1, keepdims=True), 1.0)
    np.testing.assert_allclose(got, weights @ float8(v, 6.0), atol=2e-2)  # a softmax at a tie rounds either way
    assert np.median(np.abs(got - weights @ float8(v, 6.0))) < 1e-6


@pytest.mark.parametrize(
    ("size", "amax", "why"),
    [("8", 1.0, "no multiple of 16"), ("16", 200.0, "its scores may reach 1.6e\\+05, float16 ends at 65504")],
)
def test_attention_that_does_not_fit_stays(size, amax, why):
    model = make(HEADS.replace("SIZE", size))
    found = quantize(model, how=ATTENTION, base="float16", statistics=seen(q=amax, k=amax, v=1.0))
    assert found.layers == {}
    assert re.search(why, found.kept["y"])
    assert [node.op_type for node in model.graph] == ["Attention"]


def test_attention_with_a_mask_stays():
    text = (
        HEADS.replace("SIZE] v)", "SIZE] v, bool[t, s] m)").replace("(q, k, v)", "(q, k, v, m)").replace("SIZE", "16")
    )
    found = quantize(make(text), how=ATTENTION, base="float32", statistics=seen(q=1.0, k=1.0, v=1.0))
    assert found.kept == {"y": "it has a mask or a cap"}


# --- residual adds ---------------------------------------------------------------------------------------------------

SUM = """<ir_version: 11, opset_import: ["": 23]>
net (float[n, 4, h, w] x) => (float[n, 6, h, w] y OTHER)
{{
    before = Tanh (x)
    kernel = Cast <to = 1> (w_conv)
    drawn = Conv <pads = [1, 1, 1, 1]> (before, kernel)
    skip = Sigmoid (drawn)
    wide = Cast <to = 1> (w_2)
    again = Conv <pads = [1, 1, 1, 1]> (skip, wide)
    sum = Add (again, skip)
    third = Cast <to = 1> (w_3)
    y = Conv <pads = [1, 1, 1, 1]> (sum, third)
    {more}
}}"""


@pytest.mark.parametrize(("more", "rounded"), [("", True), ("z = Tanh (sum)", False)])
def test_the_other_operand_of_a_sum_is_rounded_where_only_layers_read_the_sum(more, rounded):
    weights = {**WEIGHTS, "w_2": np.ones((6, 6, 3, 3), np.float32), "w_3": np.ones((6, 6, 3, 3), np.float32)}
    text = SUM.format(more=more).replace("OTHER", ", float[n, 6, h, w] z" if more else "")
    model = make(text, weights)
    statistics = seen(before=1.0, skip=1.0, sum=3.0, drawn=1.0)
    quantize(model, how=BOTH, base="float32", statistics=statistics)
    check_graph(model)
    add = next(node for node in model.graph if node.op_type == "Add")
    assert [value.producer().op_type for value in add.inputs] == ["Conv", "DequantizeLinear" if rounded else "Sigmoid"]


def test_a_weight_of_two_layers_is_stored_once(tmp_path):
    text = """<ir_version: 11, opset_import: ["": 23]>
    net (float[n, t, 6] x) => (float[n, t, 8] y, float[n, t, 8] z)
    { wide = Cast <to = 1> (w_a)
      turned = Transpose <perm = [1, 0]> (wide)
      y = MatMul (x, turned)
      half = Tanh (x)
      z = MatMul (half, turned) }"""
    model = make(text)
    quantize(model, how=BOTH, base="float32", statistics=seen(x=3.0, half=1.0))
    check_graph(model)
    assert sorted(model.graph.initializers) == ["w_a.int8", "w_a.int8.scale"]
    x = RANDOM.normal(size=(1, 3, 6)).astype(np.float32)
    got = run(model, {"x": x}, tmp_path / "net")
    np.testing.assert_allclose(got["z"], int8(np.tanh(x), 1.0) @ by_channel(WEIGHTS["w_a"]).T, atol=1e-5)
