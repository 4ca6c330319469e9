"""Attention in parts computes what the operator's definition says, and is done only where no kernel fits."""

import numpy as np
import pytest

from trtdiff.backends import backend
from trtdiff.backends.attention import SUPPORT, fuses, mark_decomposable
from trtdiff.backends.options import BuilderOptions
from trtdiff.errors import BuildError, UsageError
from trtdiff.lowered import write_graph
from trtdiff.passes.check_graph import check_graph
from trtdiff.passes.decompose_attention import decompose_attention
from trtdiff.passes.half_precision import half_precision
from trtdiff.passes.legalise_types import legalise_types
from trtdiff.passes.round_values import round_values
from trtdiff.types import ShapeProfile

ir = pytest.importorskip("onnx_ir")
HEAD = '<ir_version: 11, opset_import: ["": 23]>\n'


def attention(call="Attention (q, k, v)", extra="", *, size=8, heads=2, shared=2, dtype="float"):
    model = ir.from_onnx_text(f"""{HEAD} net ({dtype}[B, {heads}, S, {size}] q, {dtype}[B, {shared}, T, {size}] k,
        {dtype}[B, {shared}, T, {size}] v{extra}) => ({dtype}[B, {heads}, S, {size}] y) {{ y = {call} }}""")
    model.graph[0].name, model.graph[0].metadata_props["module"] = "net/Attention", "net.attn1"
    return model


def run(model, feeds):
    import onnx
    import onnxruntime as ort

    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def exact(q, k, v, bias=0.0, scale=None, cap=0.0):
    """The definition in float64: a row whose bias is minus infinity everywhere is zero."""
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    k, v = (np.repeat(array, q.shape[1] // array.shape[1], axis=1) for array in (k, v))
    scores = q @ k.swapaxes(-1, -2) * (scale or q.shape[-1] ** -0.5)
    scores = cap * np.tanh(scores / cap) if cap else scores
    scores = scores + bias
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    return np.where(total == 0, 0, weights / np.where(total == 0, 1, total)) @ v


ALLOWED = random(5, 7, seed=9) > 0
ALLOWED[:, 0] = True
DEAD = ALLOWED.copy()
DEAD[2] = False
MASK = random(5, 7, seed=8)
SQUARE = np.tril(np.ones((5, 7), bool))
NONE = -np.inf


@pytest.mark.parametrize(
    ("call", "mask", "expected"),
    [
        ("Attention (q, k, v)", None, {}),
        ("Attention <scale = 0.3> (q, k, v)", None, {"scale": 0.3}),
        ("Attention <softcap = 0.5> (q, k, v)", None, {"cap": 0.5}),
        ("Attention <is_causal = 1> (q, k, v)", None, {"bias": np.where(SQUARE, 0, NONE)}),
        ("Attention (q, k, v, m)", ALLOWED, {"bias": np.where(ALLOWED, 0, NONE)}),
        ("Attention (q, k, v, m)", DEAD, {"bias": np.where(DEAD, 0, NONE)}),
        ("Attention (q, k, v, m)", MASK, {"bias": MASK}),
        ("Attention (q, k, v, m)", np.where(DEAD, MASK, np.float32(NONE)), {"bias": np.where(DEAD, MASK, NONE)}),
        ("Attention <is_causal = 1> (q, k, v, m)", ALLOWED, {"bias": np.where(ALLOWED & SQUARE, 0, NONE)}),
        ("Attention <is_causal = 1> (q, k, v, m)", MASK, {"bias": np.where(SQUARE, MASK, NONE)}),
        ("Attention <softcap = 0.5> (q, k, v, m)", MASK, {"bias": MASK, "cap": 0.5}),
        ("Attention <softmax_precision = 1> (q, k, v)", None, {}),
    ],
)
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_the_definition_in_float64(call, mask, expected, shared):
    feeds = {
        "q": random(2, 4, 5, 8, seed=1),
        "k": random(2, shared, 7, 8, seed=2),
        "v": random(2, shared, 7, 8, seed=3),
    }
    extra = ""
    if mask is not None:
        feeds["m"] = mask
        extra = f", {'bool' if mask.dtype == bool else 'float'}[S, T] m"
    model = attention(call, extra, heads=4, shared=shared)
    assert decompose_attention(model, target="all") == 1
    check_graph(model)
    assert "Attention" not in {node.op_type for node in model.graph}
    assert {node.metadata_props["module"] for node in model.graph} == {"net.attn1"}
    wanted = exact(feeds["q"], feeds["k"], feeds["v"], **expected)
    assert np.abs(run(model, feeds) - wanted).max() <= 1e-6  # measured 3e-7


@pytest.mark.parametrize(("dtype", "products"), [("float16", "FLOAT16"), ("bfloat16", "BFLOAT16")])
def test_half_graphs_multiply_in_their_type_and_have_a_float32_softmax(dtype, products):
    model = attention(dtype=dtype, extra=f", {dtype}[S, T] m", call="Attention <softmax_precision = 1> (q, k, v, m)")
    decompose_attention(model, target="all")
    check_graph(model)
    kinds = {value.dtype.name for node in model.graph for value in node.outputs if node.op_type == "MatMul"}
    assert kinds == {products}
    (softmax,) = [node for node in model.graph if node.op_type == "Softmax"]
    assert softmax.outputs[0].dtype.name == "FLOAT"


def in_half(model, feeds, dtype):
    """Lower a float32 graph as an engine's is, and run it with every value rounded to its type."""
    import onnxruntime as ort

    half_precision(model, dtype=dtype)
    legalise_types(model)
    decompose_attention(model, target="all")
    check_graph(model)
    round_values(model)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    proto = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]


def storable(array):
    """Numbers that float16 has, so that nothing but the computation is judged."""
    return np.clip(array, -6e4, 6e4).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("mask", [None, ALLOWED, DEAD, storable(MASK)], ids=["no mask", "bool", "dead row", "numbers"])
@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("size", [0.5, 60.0, 2e4])
def test_scores_of_float16_never_overflow(size, cap, mask):
    """Numbers of one sign: the products of 512 pairs are up to 512 · size² = 2e11 in sum, 9e9 when they are scaled."""
    shrinking = 0.5 ** np.arange(7, dtype=np.float32)[:, None]  # large scores lie far apart, beyond doubt
    feeds = {
        "q": storable(size * np.abs(random(2, 2, 5, 512, seed=1))),
        "k": storable(size * np.abs(random(2, 2, 7, 512, seed=2)) * shrinking),
        "v": storable(random(2, 2, 7, 512, seed=3)),
    }
    bias, extra, name = 0.0, "", ""
    if mask is not None:
        feeds["m"], name = mask, ", m"
        extra = f", {'bool' if mask.dtype == bool else 'float'}[S, T] m"
        bias = np.where(mask, 0, NONE) if mask.dtype == bool else mask
    model = attention(f"Attention <softcap = {cap}> (q, k, v{name})", extra, size=512)
    got = in_half(model, feeds, "float16")
    wanted = exact(feeds["q"], feeds["k"], feeds["v"], bias=bias, cap=cap)
    assert np.abs(got - wanted).max() <= 4 * 2.0**-11 * np.abs(feeds["v"]).max()


def test_rows_of_zeros_and_of_the_smallest_and_largest_numbers_are_rows_like_others():
    query = np.zeros((1, 1, 4, 512), np.float32)
    query[..., 1, 0], query[..., 2, :], query[..., 3, :] = 2.0**-24, 65504, -65504
    keys = np.full((1, 1, 3, 512), 65504, np.float32)
    keys[..., 1, :] = 0.5
    values = storable(random(1, 1, 3, 512))
    got = in_half(attention(size=512, heads=1, shared=1), {"q": query, "k": keys, "v": values}, "float16")
    wanted = exact(query, keys, values)
    assert np.abs(got - wanted).max() <= 4 * 2.0**-11 * np.abs(values).max()


@pytest.mark.parametrize(
    ("dtype", "size", "stays"),
    [
        ("float16", 8, False),
        ("float16", 40, True),
        ("float16", 512, False),
        ("bfloat16", 64, True),
        ("float", 64, False),
    ],
)
def test_only_where_no_kernel_fits(dtype, size, stays):
    model = attention(dtype=dtype, size=size)
    assert decompose_attention(model, target="rtx") == (0 if stays else 1)
    assert ("Attention" in {node.op_type for node in model.graph}) == stays


def test_what_cannot_be_decomposed_is_an_error_that_names_the_node():
    model = attention("Attention (q, k, v, , pk, pv)", ", float[B, 2, P, 8] pk, float[B, 2, P, 8] pv")
    with pytest.raises(BuildError, match="cannot be decomposed: it has a cache") as caught:
        decompose_attention(model, target="rtx")
    assert "node Attention net/Attention; module net.attn1" in caught.value.where


def test_a_target_that_nobody_tried_is_an_error():
    with pytest.raises(UsageError, match="nobody has tried"):
        fuses("tensorrt", "float16", 64)


@pytest.fixture
def trt():
    return pytest.importorskip("tensorrt_rtx")


def builds(trt, model, *, decomposable=False):
    """Whether TensorRT for RTX builds an engine for no GPU in particular."""
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(ir.to_proto(model).SerializeToString())
    if decomposable:
        assert mark_decomposable(trt, network) == 1
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        value = network.get_input(index)
        batch = 0 if value.name == "m" else 1  # [S, T], not [B, …]
        known = [1] * batch + list(value.shape)[batch:]
        shapes = [[number if dim < 0 else dim for dim in known] for number in (4, 16, 64)]
        profile.set_shape(value.name, *shapes)
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config) is not None


@pytest.mark.parametrize("row", SUPPORT, ids=lambda row: row.dtype)
def test_the_table_is_what_the_compiler_says(trt, row):
    """At the ends of each row; beyond them it refuses, unless the operator is decomposed by us or by it."""
    dtype = {"float32": "float"}.get(row.dtype, row.dtype)
    mask = ", bool[S, T] m"
    inside = [row.heads[0], row.heads[-1]] if row.heads else []
    outside = [row.heads[0] - 1, row.heads[-1] + 1] if row.heads else [64]
    assert [builds(trt, attention(dtype=dtype, size=size)) for size in inside] == [True] * len(inside)
    for size in outside:
        model = attention(dtype=dtype, size=size)
        assert not builds(trt, model)
        assert builds(trt, model, decomposable=True)
        decompose_attention(model, target="rtx")
        assert builds(trt, model)
    for size, fused in ((16, True), (20, False), (256, True)) if row.boolean else ((64, False),):
        model = attention("Attention (q, k, v, m)", mask, dtype=dtype, size=size)
        assert fuses("rtx", row.dtype, size, "bool") == builds(trt, model) == fused
        assert decompose_attention(model, target="rtx") == (0 if fused else 1)
        assert builds(trt, model)


def test_masks_build_when_decomposed(trt):
    for call, extra in (
        ("Attention <is_causal = 1> (q, k, v)", ""),
        ("Attention (q, k, v, m)", ", bool[S, T] m"),
        ("Attention (q, k, v, m)", ", float[S, T] m"),
    ):
        model = attention(call, extra)
        decompose_attention(model, target="rtx")
        assert builds(trt, model)


@pytest.mark.parametrize("device", ["sm75", "sm89", "portable"])
def test_heads_of_512_build_for_every_gpu(trt, device, tmp_path):
    """Turing too, for which TensorRT for RTX refuses products in float32."""
    model = ir.from_onnx_text(f"""{HEAD} net (float16[batch, 1, tokens, 512] q, float16[batch, 1, tokens, 512] k,
        float16[batch, 1, tokens, 512] v) => (float16[batch, 1, tokens, 512] y) {{ y = Attention (q, k, v) }}""")
    assert decompose_attention(model, target="rtx") == 1
    (tmp_path / "engine").mkdir()
    profile = ShapeProfile.parse("batch=1:1:2,tokens=16:64:64")
    path = write_graph(model, tmp_path)
    realised = backend("tensorrt-rtx", device).build(
        path, profile, BuilderOptions(), tmp_path / "engine", lambda *_: None
    )
    assert realised["arithmetic"] == {"float16": 2}
