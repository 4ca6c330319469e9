"""Multiply-adds of a graph's nodes, counted by hand."""

import onnx
import pytest

from trtdiff.backends.multiply_adds import PRODUCTS, multiply_adds

HEAD = '<ir_version: 11, opset_import: ["": 23]>\n'
SIZES = {"batch": 2, "height": 16, "tokens": 5}


def counted(text, sizes=SIZES):
    model = onnx.parser.parse_model(HEAD + text)
    for place, node in enumerate(model.graph.node):
        node.name = f"net/{place}"
    return multiply_adds(model, sizes)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (  # 2 · 8 · 4 · 4 outputs of 16 / 2 · 3 · 3 terms
            """net (float[batch, 16, "height/2", 8] x, float[8, 8, 3, 3] w) => (float[batch, c, h, v] y)
            { y = Conv <strides = [2, 2], pads = [1, 1, 1, 1], group = 2> (x, w) }""",
            2 * 8 * 4 * 4 * (8 * 9),
        ),
        (  # 2 · 4 · 16 · 8 inputs, each into 3 · 4 · 4 products
            """net (float[batch, 4, height, 8] x, float[4, 3, 4, 4] w) => (float[batch, c, h, v] y)
            { y = ConvTranspose <strides = [4, 4]> (x, w) }""",
            2 * 4 * 16 * 8 * (3 * 16),
        ),
        (
            "net (float[batch, 7] x, float[3, 7] w) => (float[batch, 3] y) { y = Gemm <transB = 1> (x, w) }",
            2 * 3 * 7,
        ),
        ("net (float[7, batch] x, float[7, 3] w) => (float[m, n] y) { y = Gemm <transA = 1> (x, w) }", 2 * 3 * 7),
        ("net (float[batch, tokens, 7] x, float[7, 3] w) => (float[m, n, k] y) { y = MatMul (x, w) }", 2 * 5 * 3 * 7),
        (
            "net (float[batch, 1, tokens, 7] x, float[3, 7, 4] w) => (float[m, n, k, l] y) { y = MatMul (x, w) }",
            2 * 3 * 5 * 4 * 7,
        ),
        (  # 16 queries of 4 heads, 5 keys and values of 2
            """net (float[batch, 4, height, 8] q, float[batch, 2, tokens, 8] k, float[batch, 2, tokens, 6] v)
            => (float[batch, 4, height, 6] y) { y = Attention (q, k, v) }""",
            2 * 4 * 16 * 5 * (8 + 6),
        ),
    ],
    ids=["conv", "conv transposed", "gemm", "gemm of a transposed", "matmul", "matmul broadcast", "attention"],
)
def test_one_node(text, count):
    assert counted(text) == {"net/0": count}


def test_shapes_are_followed_through_what_a_graph_computes_of_them():
    """[B, C, H, W] → group norm → [B, H·W, C], as transformers of a UNet begin."""
    text = """net (float[batch, 8, height, "height/2"] x, float[8] scale, float[8] bias, float[8, 3] w)
        => (float[b, t, 3] y)
        <int64[1] one = {1}, int64[1] all = {-1}>
        { n = GroupNormalization <num_groups = 2> (x, scale, bias)
          b = Shape <end = 1> (x)
          h = Shape <start = 2, end = 3> (n)
          v = Shape <start = 3> (n)
          area = Mul (h, v)
          flat = Reshape (area, one)
          target = Concat <axis = 0> (b, flat, all)
          last = Transpose <perm = [0, 2, 3, 1]> (n)
          rows = Reshape (last, target)
          y = MatMul (rows, w) }"""
    assert counted(text) == {"net/9": 2 * (16 * 8) * 3 * 8}


def test_quantized_products_count_as_any():
    text = """net (float16[batch, 16] x, float16 s, int8 z, int8[8, 16] w, float16[8] ws, int8[8] wz)
        => (float16[batch, 8] y)
        { a = QuantizeLinear (x, s, z)  b = DequantizeLinear (a, s, z)  c = DequantizeLinear <axis = 0> (w, ws, wz)
          d = Transpose <perm = [1, 0]> (c)  y = MatMul (b, d) }"""
    assert counted(text) == {"net/4": 2 * 16 * 8}


def test_a_node_of_unknown_shape_is_left_out_and_not_counted_as_nothing():
    text = """net (float[batch, 4] x, bool[batch] chosen, float[4, 2] w) => (float[n, 2] y, float[batch, 2] z)
        { a = Compress <axis = 0> (x, chosen)  y = MatMul (a, w)  z = MatMul (x, w) }"""
    assert counted(text) == {"net/2": 2 * 4 * 2}


def test_nodes_of_one_name_are_counted_together():
    model = onnx.parser.parse_model(
        HEAD + "net (float[2, 4] x, float[4, 4] w) => (float[2, 4] y) { a = MatMul (x, w)  y = MatMul (a, w) }"
    )
    for node in model.graph.node:
        node.name = "net/twice"
    assert multiply_adds(model, {}) == {"net/twice": 2 * (2 * 4 * 4)}


def test_every_product_of_an_exported_pipeline_is_counted(tiny_bundle):
    sizes = {"batch": 2, "height": 64, "width": 64, "tokens": 16, "context": 16}
    graphs = sorted((tiny_bundle.parent.parent / "exports/tiny").glob("*.onnx"))
    assert len(graphs) == 4
    for path in graphs:
        model = onnx.load(path, load_external_data=False)
        assert multiply_adds(model, sizes).keys() == {
            node.name for node in model.graph.node if node.op_type in PRODUCTS
        }
