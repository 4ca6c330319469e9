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


@pytest.mark.parametrize("word", [{"Datatype": "Half"}, {"Format/Datatype": "Channel major FP16 format"}])
def test_layers_are_read_from_an_inspector_new_or_old(word):
    layer = {
        "Name": "conv", "LayerType": "CaskConvolution", "Inputs": [{"Name": "x", **word}], "Outputs": [{"Name": "y",
        "Format/Datatype": "Row major linear FP32"}], "Metadata": "[ONNX Layer: a/Conv]",
    }  # fmt: skip
    found = inspected_layers(json.dumps({"Layers": [layer, "only a name"], "Bindings": ["x", "y"]}))
    assert found == [Layer("conv", "CaskConvolution", "float16", "float32", ("a/Conv",))]


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
    assert summed_up([COPY])["precision"].startswith("not verified")
    assert "precision" not in summed_up([CONV])
