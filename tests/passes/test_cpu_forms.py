"""The forms for ONNX Runtime's CPU kernels compute what the operators they replace compute."""

import numpy as np
import pytest

from trtdiff.passes.check_graph import check_structure
from trtdiff.passes.cpu_forms import cpu_forms
from trtdiff.passes.transpose_weights import transpose_weights

ir = pytest.importorskip("onnx_ir")
HEAD = '<ir_version: 11, opset_import: ["": 23]>\n'


def attention(call="a = Attention (q2, k2, v2)", extra="", size=8):
    return f"""{HEAD} g (float[B, S, 32] q, float[B, T, 32] k, float[B, T, 32] v{extra}) => (float[B, S, 32] y)
        <int64[4] heads = {{0, 0, {32 // size}, {size}}}, int64[3] flat = {{0, 0, 32}},
         float[B, {32 // size}, S, {size}] q2, float[B, {32 // size}, T, {size}] k2,
         float[B, {32 // size}, T, {size}] v2, float[B, {32 // size}, S, {size}] a>
        {{ q1 = Reshape (q, heads)
           q2 = Transpose <perm = [0, 2, 1, 3]> (q1)
           k1 = Reshape (k, heads)
           k2 = Transpose <perm = [0, 2, 1, 3]> (k1)
           v1 = Reshape (v, heads)
           v2 = Transpose <perm = [0, 2, 1, 3]> (v1)
           {call}
           b = Transpose <perm = [0, 2, 1, 3]> (a)
           y = Reshape (b, flat) }}"""


GROUP_NORM = f"""{HEAD} g (float[N, 12, H, W] x, float[12] w, float[12] c) => (float[N, 12, H, W] y)
    {{ y = GroupNormalization <num_groups = 3, epsilon = 1e-6> (x, w, c) }}"""
GROUP_NORM_3D = GROUP_NORM.replace(", H, W]", ", H]")
GELU = f"{HEAD} g (float[N, M] x) => (float[N, M] y) {{ y = Gelu (x) }}"


def run(model, feeds):
    import onnx
    import onnxruntime as ort

    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    return ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]


def both(text, feeds):
    """The result before and after the pass, and the kinds of nodes after it."""
    plain, lowered = ir.from_onnx_text(text), ir.from_onnx_text(text)
    cpu_forms(lowered)
    return run(plain, feeds), run(lowered, feeds), {(node.domain, node.op_type) for node in lowered.graph}


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", [8, 32])
@pytest.mark.parametrize("scale", ["", " <scale = 0.3>"])
def test_attention_in_float64(size, scale):
    feeds = {"q": random(2, 7, 32, seed=1), "k": random(2, 5, 32, seed=2), "v": random(2, 5, 32, seed=3)}
    plain, lowered, kinds = both(attention(f"a = Attention{scale} (q2, k2, v2)", size=size), feeds)
    assert ("com.microsoft", "MultiHeadAttention") in kinds
    assert not {("", "Attention"), ("", "Transpose")} & kinds
    q, k, v = (feeds[name].astype(np.float64).reshape(2, -1, 32 // size, size) for name in "qkv")
    scores = np.einsum("bsnd,btnd->bnst", q, k) * (0.3 if scale else size**-0.5)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = np.einsum("bnst,btnd->bsnd", weights / weights.sum(-1, keepdims=True), v).reshape(2, 7, 32)
    for got in (plain, lowered):
        assert np.abs(got - exact).max() <= 1e-6  # measured 3e-7


@pytest.mark.parametrize(
    ("call", "extra"),
    [
        ("a = Attention <is_causal = 1> (q2, k2, v2)", ""),
        ("a = Attention (q2, k2, v2, mask)", ", float[S, T] mask"),
        ("a = Attention <softcap = 2.0> (q2, k2, v2)", ""),
    ],
)
def test_attention_with_more_to_it_stays(call, extra):
    feeds = {"q": random(2, 5, 32, seed=1), "k": random(2, 5, 32, seed=2), "v": random(2, 5, 32, seed=3)}
    if extra:
        feeds["mask"] = random(5, 5)
    plain, lowered, kinds = both(attention(call, extra), feeds)
    assert ("", "Attention") in kinds
    assert np.array_equal(plain, lowered)


@pytest.mark.parametrize(("text", "shape"), [(GROUP_NORM, (2, 12, 5, 4)), (GROUP_NORM_3D, (2, 12, 9))])
@pytest.mark.parametrize(("mean", "bound"), [(0, 1e-6), (10, 1e-5), (100, 1e-4), (1000, 1e-3)])
def test_group_normalization_in_float64_also_where_the_mean_is_large(text, shape, mean, bound):
    """Measured 4e-7, 4e-6, 2e-5, 2e-4, as PyTorch; ONNX Runtime's own expansion 8e-7, 5e-5, 2e-3, 5e-1."""
    feeds = {"x": random(*shape) + np.float32(mean), "w": random(12, seed=1), "c": random(12, seed=2)}
    _, lowered, kinds = both(text, feeds)
    assert ("", "InstanceNormalization") in kinds
    exact = feeds["x"].astype(np.float64).reshape(shape[0], 3, -1)
    exact = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-6)
    wide = (-1, *[1] * (len(shape) - 2))
    exact = exact.reshape(shape) * feeds["w"].reshape(wide) + feeds["c"].reshape(wide)
    assert np.abs(lowered - exact).max() <= bound


def test_gelu_in_float64():
    from math import erf

    x = np.linspace(-8, 8, 4001, dtype=np.float32).reshape(1, -1)
    _, lowered, kinds = both(GELU, {"x": x})
    assert kinds == {("com.microsoft", "Gelu")}
    exact = 0.5 * x.astype(np.float64) * (1 + np.vectorize(erf)(x.astype(np.float64) / np.sqrt(2)))
    assert np.abs(lowered - exact).max() <= 1e-6  # measured 5e-7


def test_the_tanh_gelu_stays():
    x = random(3, 4)
    plain, lowered, kinds = both(GELU.replace("Gelu (x)", 'Gelu <approximate = "tanh"> (x)'), {"x": x})
    assert kinds == {("", "Gelu")}
    assert np.array_equal(plain, lowered)


def test_a_graph_without_any_of_them_is_left_alone():
    model = ir.from_onnx_text(f"{HEAD} g (float[N] x) => (float[N] y) {{ y = Tanh (x) }}")
    cpu_forms(model)
    assert dict(model.graph.opset_imports) == {"": 23}


def test_transposed_weights_are_stored_transposed(tmp_path):
    from trtdiff.lowered import write_graph

    weight = random(300, 4)
    model = ir.from_onnx_text(f"""{HEAD} g (float[N, 4] x) => (float[N, 300] y)
        <float[300, 4] w> {{ t = Transpose <perm = [1, 0]> (w)  u = Transpose (w)  a = MatMul (x, t)  b = MatMul (x, u)
        y = Add (a, b) }}""")
    value = next(node for node in model.graph if node.op_type == "Transpose").inputs[0]
    value.const_value = ir.Tensor(weight, name="w")
    model.graph.register_initializer(value)
    transpose_weights(model)
    assert [node.op_type for node in model.graph] == ["MatMul", "MatMul", "Add"]
    assert {name: tuple(found.shape) for name, found in model.graph.initializers.items()} == {"w.10": (4, 300)}
    write_graph(model, tmp_path)
    import onnxruntime as ort

    x = random(3, 4)
    session = ort.InferenceSession(str(tmp_path / "graph.onnx"), providers=["CPUExecutionProvider"])
    exact = 2 * x.astype(np.float64) @ weight.T
    assert np.abs(session.run(None, {"x": x})[0] - exact).max() <= 2e-6


@pytest.mark.parametrize(
    ("text", "kind"), [(attention(), "Attention"), (GROUP_NORM, "GroupNormalization"), (GELU, "Gelu")]
)
def test_new_nodes_come_from_the_module_of_the_old_and_are_named_after_it(text, kind):
    model = ir.from_onnx_text(text)
    for place, node in enumerate(model.graph):
        node.name = f"node {place}"
        node.metadata_props["module"] = "net.block" if node.op_type == kind else "elsewhere"
    (old,) = [node.name for node in model.graph if node.op_type == kind]
    before = {node.name for node in model.graph}
    cpu_forms(model)
    new = [node for node in model.graph if node.name not in before]
    assert {node.metadata_props["module"] for node in new} == {"net.block"}
    assert {node.name.rpartition("/")[0] for node in new} == {old}
    check_structure(model)
    assert kind not in {node.op_type for node in model.graph if not node.domain}
