"""How much of an engine computes in 8 bits: layers as a compiler lists them beside a graph that asks for it."""

import onnx
import pytest

from trtdiff.backends.tensorrt_failures import Graph
from trtdiff.backends.tensorrt_layers import Layer
from trtdiff.backends.tensorrt_quantized import quantized
from trtdiff.errors import BuildError
from trtdiff.lowering import _require_precision

HEAD = '<ir_version: 11, opset_import: ["": 23]>\n'
NET = f"""{HEAD}
net (float16[batch, 16] x, float16 s, int8 z, int8[16, 16] w, float16[16] ws, int8[16] wz, float16[16, 8] v)
=> (float16[batch, 8] y)
{{ a = QuantizeLinear (x, s, z)  b = DequantizeLinear (a, s, z)  c = DequantizeLinear <axis = 0> (w, ws, wz)
   d = Transpose <perm = [1, 0]> (c)  both = MatMul (b, d)  half = MatMul (both, v)  weights = Gemm (x, c)
   joined = MatMul (weights, v)  y = Add (half, joined) }}"""
"""`both` is quantized, of `weights` only the weights, `half` and `joined` have nothing to do with it."""
BATCH = 4
BOTH = WEIGHTS = BATCH * 16 * 16
TOTAL = BOTH + WEIGHTS + 2 * (BATCH * 16 * 8)


@pytest.fixture
def summary(tmp_path):
    def of(*layers, text=NET, sizes=None):
        model = onnx.parser.parse_model(text)
        for node in model.graph.node:
            node.name = f"net/{node.output[0]}"
        onnx.save(model, tmp_path / "graph.onnx")
        return quantized(layers, Graph(tmp_path / "graph.onnx"), sizes or {"batch": BATCH})

    return of


def layer(reads, *nodes, kind="gemm"):
    return Layer(f"layer of {nodes[0]}", kind, reads, "float16", tuple(f"net/{node}" for node in nodes), ("blocks.0",))


REST = (layer("float16", "half"), layer("float16", "weights", "c"), layer("float16", "joined"))


def test_multiply_adds_are_counted_by_what_the_layers_read(summary):
    found = summary(layer("int8", "both", "b", "c", "d"), *REST)
    assert found == {"quantized": {"int8": BOTH, "float8": 0, "total": TOTAL, "share": BOTH * 10_000 // TOTAL / 10_000}}


def test_a_share_is_all_only_where_it_is(summary):
    text = NET.replace("float16[16, 8] v", "float16[16, 1] v").replace("float16[batch, 8] y", "float16[batch, 1] y")
    found = summary(layer("float8", "both"), layer("float8", "weights"), *REST[::2], text=text, sizes={"batch": 8})
    assert found["quantized"] == {"int8": 0, "float8": 8 * 512, "total": 8 * 544, "share": 0.9411}


def test_what_the_graph_quantizes_and_no_layer_reads_so_is_listed(summary):
    found = summary(layer("float16", "both", "d"), *REST)
    assert found["quantized"]["share"] == 0
    assert found["not_quantized"] == [
        {"layer": "layer of both", "nodes": ["net/both"], "modules": ["blocks.0"], "reads": "float16",
         "share": BOTH * 10_000 // TOTAL / 10_000}
    ]  # fmt: skip
    with pytest.raises(BuildError, match=r"computes in float16 what its graph has in 8 bits \(33\.3%") as caught:
        _require_precision(found, "float16", "denoiser.onnx")
    assert caught.value.where == "layer layer of both; nodes net/both; modules blocks.0"
    assert "sm75" in caught.value.hint


def test_weights_alone_are_no_fault(summary):
    found = summary(layer("int8", "both"), *REST)
    assert "not_quantized" not in found
    _require_precision({**found, "arithmetic": {"int8": 1, "float16": 3}}, "float16", "denoiser.onnx")


def test_a_node_in_several_layers_counts_as_the_widest(summary):
    found = summary(layer("int8", "both"), layer("float16", "both"), *REST)
    assert found["quantized"]["int8"] == 0
    assert [item["reads"] for item in found["not_quantized"]] == ["float16"]


def test_layers_that_multiply_nothing_do_not_count(summary):
    found = summary(layer("int8", "both"), layer("float16", "both", "y", kind="kgen"), *REST)
    assert found["quantized"]["int8"] == BOTH
    assert "not_quantized" not in found


def test_what_cannot_be_counted_is_said(summary):
    assert summary(*REST)["uncounted"] == "no layer names 1 nodes that the graph quantizes"
    text = NET.replace(
        "y = Add (half, joined)", "n = NonZero (x)  m = Cast <to = 10> (n)  o = MatMul (m, x)  y = Add (half, joined)"
    )
    assert summary(layer("int8", "both"), *REST, text=text)["uncounted"] == "the shapes of 1 nodes are not known"


def test_a_graph_without_8_bits_says_nothing_of_them(summary):
    text = f"{HEAD} net (float16[batch, 16] x, float16[16, 8] v) => (float16[batch, 8] y) {{ y = MatMul (x, v) }}"
    assert summary(layer("float16", "y"), text=text) == {}


ATTENTION = f"""{HEAD}
net (float16[batch, 2, 8, 16] q, float16[batch, 2, 8, 16] k, float16 s, float8e4m3fn z) => (float16[batch, 2, 8, 16] y)
{{ a = QuantizeLinear (q, s, z)  b = DequantizeLinear (a, s, z)  c = QuantizeLinear (k, s, z)
   d = DequantizeLinear (c, s, z)  y = Attention (b, d, d) }}"""


def test_attention_that_reads_half_precision_is_a_fault(summary):
    found = summary(layer("float16", "y", kind="mha"), text=ATTENTION)
    assert found["not_quantized"][0]["share"] == 1
    assert summary(layer("float8", "y", kind="mha"), text=ATTENTION)["quantized"]["share"] == 1


@pytest.mark.parametrize(
    ("arithmetic", "fits"), [({"int8": 5, "float16": 1, "float32": 1}, True), ({"float32": 3, "int8": 2}, False)]
)
def test_without_nodes_layers_in_8_bits_count_as_asked_for(arithmetic, fits):
    realised = {"precision": "not verified: …", "arithmetic": arithmetic, "quantized": {}}
    if fits:
        return _require_precision(realised, "float16", "denoiser.onnx")
    with pytest.raises(BuildError, match="3 in float32, 2 in int8"):
        _require_precision(realised, "float16", "denoiser.onnx")
    return None
