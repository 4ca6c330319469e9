"""What the compiler says of its layers, read, kept and summed up."""

import json

import pytest

from trtdiff.backends.tensorrt_layers import (
    LAYERS_FILE,
    Layer,
    inspected_layers,
    read_layers,
    read_layers_file,
    summed_up,
    with_modules,
    write_layers_file,
)
from trtdiff.errors import ArtefactError

CONV = Layer("conv_myl0_4", "correlation", "float16", "bfloat16", ("a/Conv", "b"))
GEMM = Layer("mm", "gemm", "float32", "float32", ("proj/MatMul",), ("time_embedding",))
COPY = Layer("move", "kgen", "", "float16", ())


def test_layers_are_read_from_the_compiler_s_words():
    line = (
        "Name: conv_myl0_4, LayerType: correlation, Inputs: [ { Name: n, Datatype: Int32 }, { Name: x, Dimensions: "
        "[-1,4], Datatype: Half, Format: (NC/4HW4) Four wide }], Constants: [ { Name: w, Datatype: Float, Format: "
        "(Linear) }], Outputs: [ { Name: y, Datatype: BFloat16, Format: (NHWC) }], TacticName: t, StreamId: 0, "
        "Metadata: [ONNX Layer: a/Conv][ONNX Layer: b]"
    )
    assert read_layers(f"Layers:\n{line}\n\nBindings:\nx\n") == [CONV]
    assert CONV.computes
    assert not COPY.computes


def rtx(name, kind, reads, constants, writes):
    """Give a line of TensorRT for RTX's log."""

    def tensors(types):
        items = ", ".join(f"{{ Name: t{place}, Datatype: {dtype} }}" for place, dtype in enumerate(types))
        return f"[ {items}]" if items else "[]"

    return (
        f"Name: {name}, LayerType: {kind}, Inputs: {tensors(reads)}, Constants: {tensors(constants)}, Outputs: "
        f"{tensors([writes])}, TacticName: t, StreamId: 0, Metadata: [ONNX Layer: net/y][ONNX Layer: w/DQ]"
    )


@pytest.mark.parametrize(
    ("name", "kind", "reads", "constants", "writes", "multiplied"),
    [
        ("net/Conv_myl0_2", "correlation", ["Int8"], ["Int8", "Float", "Float"], "Float", "int8"),
        ("net/MatMul_myl0_2", "gemm", ["FP8"], ["FP8", "Float", "Float"], "Half", "float8"),
        ("net/QK_myl0_4", "gemm", ["FP8", "FP8"], ["Float", "Float"], "FP8", "float8"),
        ("_gemm_mha_v2_myl0_4", "kgen", ["FP8", "FP8", "FP8"], [], "Half", "float8"),
        # dequantized as they are read: weights, data, one of two factors; last, to a type that is not told
        ("__myl_CastMulCastFc_myl0_2", "runtime_fusion", ["Half"], ["Half", "Int8"], "Half", "float16"),
        ("__myl_CastMulFc_myl0_2", "runtime_fusion", ["Int8"], ["BFloat16"], "BFloat16", "bfloat16"),
        ("__myl_CastMulFcAdd_myl0_8", "runtime_fusion", ["FP8", "Half"], [], "Half", "float16"),
        ("__myl_CastMulFcMulCast_myl0_8", "runtime_fusion", ["FP8", "Half"], [], "FP8", ""),
        ("__myl_FcMulCast_myl0_8", "runtime_fusion", ["FP8", "FP8"], [], "Half", "float8"),
    ],
)
def test_a_layer_reads_the_type_that_it_multiplies_in(name, kind, reads, constants, writes, multiplied):
    (layer,) = read_layers(rtx(name, kind, reads, constants, writes))
    assert layer.computes
    assert layer.reads == multiplied
    assert layer.nodes == ("net/y", "w/DQ")


CASK = (
    "Name: conv_in/Conv + act/Relu, LayerType: CaskConvolution, Inputs: [ { Name: Reformatted Input Tensor 0 to "
    "conv_in/Conv, Location: Device, Dimensions: [1,3,224,224], Format/Datatype: READ }], Outputs: [ { Name: "
    "(Unnamed Layer* 7) [Shuffle]_output, Location: Device, Dimensions: [1,64,55,55], Format/Datatype: WRITTEN }], "
    'ParameterType: Convolution, Kernel: [11,11], Groups: 1, Weights: {"Type": "Float", "Count": 23232}, HasBias: 1, '
    "Activation: RELU, TacticName: sm80_xmma_fprop, TacticValue: 0x280b0ad3c23d8442, StreamId: 0, Metadata: "
    "[ONNX Layer: conv_in/Conv][ONNX Layer: act/Relu]"
)
"""As TensorRT 10 lists a layer in its log: no constants, and the type within a format or alone."""
MYELIN = (
    "Name: {ForeignNode[Constant_12_output_0...Unsqueeze_6]}, LayerType: Myelin, Inputs: [], Outputs: [ { Name: y, "
    "Location: Device, Dimensions: [2,12600], Format/Datatype: Row major linear FP32 }], TacticValue: 0x0"
)
SAID = [
    ("Half", "float16"),
    ("BFloat16", "bfloat16"),
    ("Row major linear FP32", "float32"),
    ("Channel major FP16 format where channel % 8 == 0", "float16"),
    ("Thirty-two wide channel vectorized row major Int8 format", "int8"),
    ("Int32", ""),
]


@pytest.mark.parametrize(("said", "dtype"), SAID)
def test_the_log_of_tensorrt_10_is_read(said, dtype):
    conv, opaque = read_layers(f"{CASK.replace('READ', said).replace('WRITTEN', 'Half')}\n\n{MYELIN}")
    assert conv == Layer("conv_in/Conv + act/Relu", "CaskConvolution", dtype, "float16", ("conv_in/Conv", "act/Relu"))
    assert conv.computes
    assert (opaque.kind, opaque.reads, opaque.writes, opaque.computes) == ("Myelin", "", "float32", False)


@pytest.mark.parametrize("key", ["Datatype", "Format/Datatype", "Format"])
@pytest.mark.parametrize(("said", "dtype"), SAID)
def test_an_inspector_says_types_in_the_words_of_the_log(key, said, dtype):
    layer = {
        "Name": "conv", "LayerType": "CaskConvolution", "Inputs": [{"Name": "x", key: said}], "Outputs": [{"Name": "y",
        "Format/Datatype": "Row major linear FP32"}], "Metadata": "[ONNX Layer: a/Conv]",
    }  # fmt: skip
    found = inspected_layers(json.dumps({"Layers": [layer, "only a name"], "Bindings": ["x", "y"]}))
    assert found == [Layer("conv", "CaskConvolution", dtype, "float32", ("a/Conv",))]


@pytest.mark.parametrize(
    ("name", "kind", "computes"),
    [
        ("__myl_FcAddSilu_myl0_9", "runtime_fusion", True),  # a Gemm and its activation
        ("_gemm_mha_v2_myl0_3", "kgen", True),  # attention
        ("__myl_CastReplConc_myl0_1", "kgen", False),
        ("__myl_MulCastFcAdd_myl0_9", "runtime_fusion", True),
        ("__myl_MulFcn_myl0_9", "kgen", False),
        ("blocks.0.attention/Reshape", "reshape", False),
    ],
)
def test_products_under_other_types_are_known_by_their_names(name, kind, computes):
    assert Layer(name, kind, "float16", "float16", ()).computes is computes


def test_modules_are_those_of_the_nodes_each_once():
    layer = Layer("l", "gemm", "", "", ("a", "b", "c", "d"))
    (found,) = with_modules([layer], {"a": "block.0", "b": "block.1", "c": "block.0"})
    assert found.modules == ("block.0", "block.1")


def test_the_file_gives_back_what_was_written(tmp_path):
    layers = [CONV, GEMM, COPY, Layer("two", "gemm", "int8", "float16", ("x",), ("time_embedding", "other"))]
    write_layers_file(tmp_path, layers)
    assert read_layers_file(tmp_path) == layers
    assert (tmp_path / LAYERS_FILE).read_text().count("time_embedding") == 1


def test_no_file_is_no_layers_and_a_damaged_one_an_error(tmp_path):
    assert read_layers_file(tmp_path) == []
    (tmp_path / LAYERS_FILE).write_text('{"schema": 1, "modules": [], "layers": [["a", "b", "c", "d", [], [0]]]}')
    with pytest.raises(ArtefactError, match=r"layers\.json names a module that it does not list"):
        read_layers_file(tmp_path)


def test_arithmetic_in_another_type_is_listed_with_its_modules():
    found = summed_up([CONV, CONV, GEMM, COPY])
    assert found["layers"] == 4
    assert found["types"] == {"bfloat16": 2, "float32": 1, "float16": 1}
    assert found["arithmetic"] == {"float16": 2, "float32": 1}
    assert found["other_arithmetic"] == [{"layer": "mm", "reads": "float32", "modules": ["time_embedding"]}]


def test_no_list_of_layers_is_said_to_prove_nothing():
    assert summed_up([]) == {"layers": "not verified: the compiler listed none"}
    assert summed_up([COPY])["arithmetic"] == {}
