"""Observers say of every value what numpy says of it, lose no infinity or NaN, and leave the graph what it was."""

import numpy as np
import pytest

from trtdiff.passes.cpu_forms import cpu_forms
from trtdiff.passes.observe import observe
from trtdiff.passes.statistics import STATISTICS, amax

ir = pytest.importorskip("onnx_ir")
HEAD = '<ir_version: 11, opset_import: ["": 23]>\n'
RNG = np.random.default_rng(0)
NET = f"""{HEAD} net (float[n, 6] x, float[n] t, int64[n] ids) => (float[n, 6] y)
    <float16[6, 6] stored, float[n, 6] scaled, float[n, 1] column, float[n, 6] moved, float[6, 6] w, float[6, 6] turned,
     float[n, 6] product, float counted, float[n, 6] dead>
    {{ w = Cast <to = 1> (stored)
       turned = Transpose (w)
       product = MatMul (x, turned)
       last = Constant <value_ints = [1]> ()
       column = Unsqueeze (t, last)
       scaled = Mul (product, column)
       dead = Exp (scaled)
       ends = Shape (scaled)
       moved = Reshape (scaled, ends)
       rows = Size (ids)
       counted = Cast <to = 1> (rows)
       y = Add (moved, counted) }}"""


def observed(text, feeds, weights=None, prepare=lambda model: None):
    """Places, the statistics and the other outputs of a graph in ONNX text."""
    import onnxruntime as ort

    model = ir.from_onnx_text(text)
    for value in [value for node in model.graph for value in node.inputs if value is not None]:
        if weights and value.name in weights and not value.is_initializer():
            value.const_value = ir.tensor(weights[value.name], name=value.name)
            model.graph.register_initializer(value)
    for node in model.graph:
        node.name = f"node {node.outputs[0].name}"
        node.metadata_props["module"] = f"module {node.outputs[0].name}"
    places = observe(model)
    prepare(model)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    results = dict(zip(names, session.run(None, feeds), strict=True))
    return places, results.pop(STATISTICS), results


def feeds(rows=5):
    random = RNG.standard_normal((rows, 6)).astype(np.float32)
    return {"x": random, "t": np.linspace(-3, 2, rows, dtype=np.float32), "ids": np.arange(rows)}


WEIGHT = {"stored": RNG.standard_normal((6, 6)).astype(np.float16)}


def test_what_computes_is_observed_and_what_moves_or_holds_weights_is_not():
    places, _, _ = observed(NET, feeds(), WEIGHT)
    assert [place.value for place in places] == ["x", "t", "product", "scaled", "counted", "y"]
    assert str(places[2]) == "module product (node node product)"


def test_statistics_are_those_of_float64():
    given = feeds()
    places, statistics, results = observed(NET, given, WEIGHT)
    product = given["x"].astype(np.float64) @ WEIGHT["stored"].astype(np.float64).T
    scaled = product * given["t"][:, None]
    values = [given["x"], given["t"], product, scaled, np.array(5.0), scaled + 5]
    assert len(places) == len(values)
    np.testing.assert_allclose(results["y"], scaled + 5, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(statistics[0], [value.max() for value in values], rtol=1e-5)
    np.testing.assert_allclose(statistics[1], [value.min() for value in values], rtol=1e-5)
    np.testing.assert_allclose(statistics[2], [np.sum(value.astype(float) ** 2) for value in values], rtol=1e-5)
    np.testing.assert_array_equal(statistics[3], [value.size for value in values])
    np.testing.assert_allclose(amax(statistics), [np.abs(value).max() for value in values], rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 3001, 6 * 1000 - 1])
def test_one_value_that_is_not_finite_is_seen_wherever_it_stands(bad, place):
    given = feeds(1000)
    given["x"].flat[place] = bad
    _, statistics, _ = observed(NET, given, WEIGHT)
    largest = amax(statistics)
    assert np.isnan(largest[0]) if np.isnan(bad) else np.isposinf(largest[0])
    assert np.isfinite(largest[1])  # t
    assert not np.isfinite(largest[[2, 3, 5]]).any()


def test_squares_that_overflow_are_no_reason_to_call_a_value_infinite():
    given = feeds()
    given["x"][2, 2] = 1e30
    _, statistics, _ = observed(NET, given, WEIGHT)
    assert np.isposinf(statistics[2, 0])
    assert amax(statistics)[0] == np.float32(1e30)


ATTENTION = f"""{HEAD} net (float[B, S, 32] q, float[B, S, 32] k{{inputs}}) => (float[B, S, 32] y)
    <int64[4] heads = {{{{0, 0, 4, 8}}}}, int64[3] flat = {{{{0, 0, 32}}}}, float[B, 4, S, 8] q2, float[B, 4, S, 8] k2,
     float[B, 4, S, 8] a{{values}}>
    {{{{ q1 = Reshape (q, heads)
       q2 = Transpose <perm = [0, 2, 1, 3]> (q1)
       k1 = Reshape (k, heads)
       k2 = Transpose <perm = [0, 2, 1, 3]> (k1)
       {{before}}
       a = Attention (q2, k2, k2{{mask}})
       b = Transpose <perm = [0, 2, 1, 3]> (a)
       y = Reshape (b, flat) }}}}"""


def tokens(rows=7):
    return {name: RNG.standard_normal((2, rows, 32)).astype(np.float32) for name in "qk"}


def attention(query, key, mask=0.0):
    """Four heads of eight channels in float64; key and value are one."""
    query, key = (array.astype(np.float64).reshape(2, -1, 4, 8).swapaxes(1, 2) for array in (query, key))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(8) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ key


def test_attention_is_observed_and_still_fused():
    kinds = []

    def prepare(model):
        cpu_forms(model)
        kinds.extend(node.op_type for node in model.graph)

    text = ATTENTION.format(inputs="", values="", before="", mask="")
    given = tokens()
    places, statistics, _ = observed(text, given, prepare=prepare)
    assert "MultiHeadAttention" in kinds
    assert "Attention" not in kinds
    assert [place.value for place in places] == ["q", "k", "a"]
    np.testing.assert_allclose(amax(statistics)[2], np.abs(attention(given["q"], given["k"])).max(), rtol=1e-5)


def test_a_mask_that_says_minus_infinity_means_it():
    text = ATTENTION.format(
        inputs=", float[S, S] far",
        values=", float[S, S] mask",
        before="mask = Log (far)",
        mask=", mask",
    )
    given = {**tokens(), "far": np.tril(np.ones((7, 7), np.float32))}
    places, statistics, _ = observed(text, given)
    assert [place.value for place in places] == ["q", "k", "far", "a"]
    with np.errstate(divide="ignore"):
        expected = np.abs(attention(given["q"], given["k"], np.log(given["far"]))).max()
    np.testing.assert_allclose(amax(statistics)[3], expected, rtol=1e-5)
