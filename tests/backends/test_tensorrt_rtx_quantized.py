"""What TensorRT for RTX makes of graphs in 8 bits: real builds of small ones, on which trtdiff's rules stand."""

import numpy as np
import pytest

from trtdiff.backends import backend
from trtdiff.backends.options import BuilderOptions
from trtdiff.backends.tensorrt_layers import read_layers_file
from trtdiff.errors import BuildError
from trtdiff.lowered import write_graph
from trtdiff.lowering import _require_precision
from trtdiff.types import ShapeProfile

pytest.importorskip("tensorrt_rtx")
ir = pytest.importorskip("onnx_ir")

HEAD = '<ir_version: 11, opset_import: ["": 23]>\n'
CONV = (
    HEAD
    + """net (HALF[batch, 32, size, size] x, HALF s, EIGHT z, EIGHT[32, 32, 3, 3] w, HALF[32] ws, EIGHT[32] wz)
=> (HALF[batch, 32, size, size] y)
{ a = QuantizeLinear (x, s, z)  b = DequantizeLinear (a, s, z)  c = DequantizeLinear <axis = 0> (w, ws, wz)
  y = Conv <pads = [1, 1, 1, 1]> (b, c) }"""
)
LINEAR = (
    HEAD
    + """net (HALF[batch, size, 64] x, HALF s, EIGHT z, EIGHT[48, 64] w, HALF[48] ws, EIGHT[48] wz)
=> (HALF[batch, size, 48] y)
{ a = QuantizeLinear (x, s, z)  b = DequantizeLinear (a, s, z)  c = DequantizeLinear <axis = 0> (w, ws, wz)
  d = Transpose <perm = [1, 0]> (c)  y = MatMul (b, d) }"""
)
SCORES = """a = QuantizeLinear (q, s, z)  b = DequantizeLinear (a, s, z)  kt = Transpose <perm = [0, 1, 3, 2]> (k)
  c = QuantizeLinear (kt, s, z)  d = DequantizeLinear (c, s, z)  e = QuantizeLinear (k, s, z)
  f = DequantizeLinear (e, s, z)  g = MatMul (b, d)  h = Softmax (g)  i = QuantizeLinear (h, s, z)
  j = DequantizeLinear (i, s, z)  y = MatMul (j, f)"""
HEADS = HEAD + (
    "net (HALF[batch, 2, size, 32] q, HALF[batch, 2, KEYS, 32] k, HALF s, EIGHT z) => (HALF[batch, 2, size, 32] y)"
    " { BODY }"
)
OPERATOR = """a = QuantizeLinear (q, s, z)  b = DequantizeLinear (a, s, z)  c = QuantizeLinear (k, s, z)
  d = DequantizeLinear (c, s, z)  y = Attention (b, d, d)"""
BATCH, SIZE = 2, 32
SIZES = ShapeProfile.parse(f"batch=1:{BATCH}:2,size=32:{SIZE}:32")
"""Multiply-adds are counted in the middle of it."""
TYPES = {"int8": "int8", "float8": "float8e4m3fn", "float16": "float16", "bfloat16": "bfloat16"}


@pytest.fixture
def build(tmp_path):
    """Build a text whose HALF and EIGHT are these types; every input but x, q and k is a constant."""

    def compiled(text, eight, device="sm89", *, half="float16"):
        text = text.replace("HALF", TYPES[half]).replace("EIGHT", TYPES[eight])
        model = ir.from_onnx_text(text)
        for place, node in enumerate(model.graph):  # two Q/DQ of one name are refused
            node.name, node.metadata_props["module"] = f"net/{node.outputs[0].name}", f"blocks.{place}"
        for value in [value for value in model.graph.inputs if value.name not in {"x", "q", "k"}]:
            model.graph.inputs.remove(value)
            zero = str(value.name).endswith("z")
            array = np.full(value.shape.numpy(), 0 if zero else 0.5 if str(value.name).endswith("s") else 3)
            value.const_value = ir.Tensor(array.astype(value.dtype.numpy()), dtype=value.dtype, name=value.name)
            model.graph.register_initializer(value)
        folder, out = tmp_path / "in", tmp_path / "engine"
        folder.mkdir()
        out.mkdir()
        graph = write_graph(model, folder)
        rtx = backend("tensorrt-rtx", device)
        return rtx.build(graph, SIZES, BuilderOptions(), out, lambda done, total: None)

    compiled.engine = tmp_path / "engine"
    return compiled


COUNTS = {CONV: BATCH * 32 * SIZE * SIZE * 32 * 9, LINEAR: BATCH * SIZE * 48 * 64}


@pytest.mark.parametrize("text", [CONV, LINEAR], ids=["conv", "linear"])
@pytest.mark.parametrize(
    ("eight", "device"), [("int8", "sm86"), ("float8", "sm89"), ("float8", ""), ("int8", "sm80,sm120")]
)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_all_that_a_graph_quantizes_is_multiplied_in_8_bits(build, text, eight, device, half):
    realised = build(text, eight, device, half=half)
    assert realised["arithmetic"] == {eight: 1}
    other = {"int8": "float8", "float8": "int8"}[eight]
    assert realised["quantized"] == {eight: COUNTS[text], other: 0, "total": COUNTS[text], "share": 1}
    assert realised["remarks"] == []
    _require_precision(realised, half, "graph.onnx")


def with_wide_scales(text):
    """Let scales be float32, and what is dequantized by them half precision."""
    wide = (
        text.replace("HALF s,", "float s,")
        .replace("HALF[48] ws", "float[48] ws")
        .replace("HALF[32] ws", "float[32] ws")
    )
    plain = wide.replace("DequantizeLinear (", "DequantizeLinear <output_dtype = CODE> (")
    return plain.replace("DequantizeLinear <axis = 0>", "DequantizeLinear <axis = 0, output_dtype = CODE>")


@pytest.mark.parametrize("text", [CONV, LINEAR], ids=["conv", "linear"])
@pytest.mark.parametrize("eight", ["int8", "float8"])
@pytest.mark.parametrize(("half", "code"), [("float16", 10), ("bfloat16", 16)])
def test_scales_may_be_float32_and_sums_are_then_written_in_float32(build, text, eight, half, code):
    realised = build(with_wide_scales(text).replace("CODE", str(code)), eight, half=half)
    assert realised["quantized"]["share"] == 1
    (layer,) = [layer for layer in read_layers_file(build.engine) if layer.computes]
    assert layer.writes == "float32"


def test_with_scales_in_float16_a_linear_layer_writes_sums_of_integers_in_float16_which_is_why_they_are_float32(build):
    build(LINEAR, "int8")
    (layer,) = [layer for layer in read_layers_file(build.engine) if layer.computes]
    assert layer.writes == "float16"  # 64 · 127 · 127 is beyond its end


def test_turing_has_no_convolutions_in_int8_which_is_an_error(build):
    realised = build(CONV, "int8", "sm75,sm89")
    (wrong,) = realised["not_quantized"]
    assert (wrong["nodes"], wrong["reads"], wrong["share"]) == (["net/y"], "float16", 1)
    assert "blocks.3" in wrong["modules"]
    with pytest.raises(BuildError, match="in float16 what its graph has in 8 bits"):
        _require_precision(realised, "float16", "graph.onnx")


def test_turing_multiplies_matrices_in_int8(build):
    assert build(LINEAR, "int8", "sm75")["quantized"]["share"] == 1


WEIGHTS = {"conv": CONV.replace("Conv <pads = [1, 1, 1, 1]> (b, c)", "Conv <pads = [1, 1, 1, 1]> (x, c)"),
           "linear": LINEAR.replace("MatMul (b, d)", "MatMul (x, d)")}  # fmt: skip


@pytest.mark.parametrize("text", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("eight", ["int8", "float8"])
def test_quantized_weights_alone_are_multiplied_in_half_precision(build, text, eight):
    realised = build(text, eight)
    assert realised["arithmetic"] == {"float16": 1}
    assert realised["quantized"]["share"] == 0
    assert "not_quantized" not in realised
    _require_precision(realised, "float16", "graph.onnx")


DATA = (
    HEAD
    + """net (HALF[batch, size, 64] x, HALF s, EIGHT z, HALF[64, 48] v) => (HALF[batch, size, 48] y)
{ a = QuantizeLinear (x, s, z)  b = DequantizeLinear (a, s, z)  y = MatMul (b, v) }"""
)


@pytest.mark.parametrize("eight", ["int8", "float8"])
def test_quantized_data_alone_is_multiplied_in_half_precision_though_the_layer_reads_8_bits(build, eight):
    realised = build(DATA, eight)
    assert realised["arithmetic"] == {"float16": 1}
    assert realised["quantized"]["share"] == 0
    assert "not_quantized" not in realised


# --- attention -------------------------------------------------------------------------------------------------------


def heads(body, keys=32):
    return HEADS.replace("BODY", body).replace("KEYS", str(keys))


def test_float8_products_with_a_softmax_between_are_one_kernel_that_reads_float8(build):
    realised = build(heads(SCORES), "float8")
    assert realised["arithmetic"] == {"float8": 1}
    assert realised["quantized"]["float8"] == realised["quantized"]["total"] == BATCH * 2 * SIZE * 32 * (32 + 32)


def test_it_takes_32_keys_or_more(build):
    assert build(heads(SCORES, keys=31), "float8")["arithmetic"] == {"float8": 2}


def test_int8_products_with_a_softmax_between_are_two(build):
    realised = build(heads(SCORES), "int8")
    assert realised["arithmetic"] == {"int8": 2}
    assert realised["quantized"]["share"] == 1


def test_the_operator_attention_reads_half_precision_whatever_its_inputs_come_from(build):
    realised = build(heads(OPERATOR), "float8")
    assert realised["arithmetic"] == {"float16": 1}
    assert [item["nodes"] for item in realised["not_quantized"]] == [["net/y"]]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["sm75", "sm80", "sm86", "sm86,sm89"])
def test_float8_is_refused_below_ada_by_us_and_by_the_library(build, device):
    rtx, lacking = backend("tensorrt-rtx", device), device.partition(",")[0]
    says = f"{lacking} has no float8; of the GPUs that TensorRT for RTX builds for, sm89, sm120, sm121 have it"
    assert rtx.impossible("mine", frozenset({"int8", "float8"})) == says
    assert rtx.impossible("mine", frozenset({"int8"})) == ""
    with pytest.raises(BuildError, match="HW-specific datatypes: fp8") as caught:
        build(CONV, "float8", device)
    assert "sm89" in caught.value.hint


@pytest.mark.parametrize("device", ["", "sm89", "sm89,sm120"])
def test_float8_is_possible_from_ada_on_and_portable(device):
    assert backend("tensorrt-rtx", device).impossible("fp8", frozenset({"float8"})) == ""


def test_several_gpus_without_float8_are_all_named():
    assert (
        backend("tensorrt-rtx", "sm80,sm86")
        .impossible("fp8", frozenset({"float8"}))
        .startswith("sm80, sm86 have no float8")
    )


def test_weights_in_8_bits_are_stored_in_8_bits(build):
    """The plan has room for a byte a weight and the code, and not for two bytes a weight."""
    large = CONV.replace("32, 32, 3, 3", "256, 256, 3, 3").replace("batch, 32", "batch, 256").replace("[32]", "[256]")
    weights = 256 * 256 * 9
    assert weights < build(large, "int8")["plan_bytes"] < 2 * weights
