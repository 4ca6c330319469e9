"""Engines for RTX GPUs, compiled without one; nothing here runs them."""

import json

import pytest

from trtdiff.backends import backend
from trtdiff.backends.options import BuilderOptions
from trtdiff.backends.tensorrt_builder import PLAN, describe_node, read_layers
from trtdiff.cli import exit_code as run
from trtdiff.errors import BuildError, MissingDependency, UsageError
from trtdiff.lowered import write_graph
from trtdiff.types import ShapeProfile

pytest.importorskip("tensorrt_rtx")
ir = pytest.importorskip("onnx_ir")

CONV = """<ir_version: 11, opset_import: ["": 23]>
net (float16[batch, 16, height, width] x, float16[16, 16, 3, 3] w) => (float16[batch, 16, height, width] y)
{ c = Conv <pads = [1, 1, 1, 1]> (x, w)  y = Tanh (c) }"""
SIZES = ShapeProfile.parse("batch=1:1:2,height=8:16:32,width=8:16:32")


def graph(folder, text):
    folder.mkdir()
    model = ir.from_onnx_text(text)
    for node in model.graph:
        node.name, node.metadata_props["module"] = f"net/{node.op_type}", "down_blocks.0"
    return write_graph(model, folder)


def build(tmp_path, text, device="sm89"):
    out = tmp_path / "engine"
    out.mkdir()
    return out, backend("tensorrt-rtx", device).build(
        graph(tmp_path / "in", text), SIZES, BuilderOptions(), out, lambda done, total: None
    )


def test_an_engine_and_the_types_that_it_realised(tmp_path):
    out, realised = build(tmp_path, CONV)
    assert realised["plan_bytes"] == (out / PLAN).stat().st_size > 0
    assert realised["arithmetic"] == {"float16": 1}
    assert set(realised["types"]) == {"float16"}


@pytest.mark.parametrize("device", ["", "sm86,sm120"])
def test_portable_engines_and_several_gpus(tmp_path, device):
    out, realised = build(tmp_path, CONV, device)
    assert realised["plan_bytes"] == (out / PLAN).stat().st_size


def test_a_gpu_that_the_library_does_not_build_for_names_those_it_does(tmp_path):
    with pytest.raises(UsageError, match="does not build for sm61") as caught:
        build(tmp_path, CONV, "sm61")
    assert "sm89" in caught.value.hint


def test_a_node_that_is_refused_is_named_with_its_module_and_inputs(tmp_path):
    mixed = CONV.replace("float16[16, 16, 3, 3] w", "float[16, 16, 3, 3] w")
    with pytest.raises(BuildError) as caught:
        build(tmp_path, mixed)
    assert "node Conv net/Conv" in caught.value.where
    assert "module down_blocks.0" in caught.value.where
    assert "w: float[16, 16, 3, 3]" in caught.value.where


def test_a_node_is_described_in_words(tmp_path):
    path = graph(tmp_path / "in", CONV)
    assert describe_node(path, "net/Tanh", "Tanh") == "node Tanh net/Tanh; module down_blocks.0"
    assert describe_node(path, "elsewhere", "Add") == "node Add elsewhere"


def test_layers_are_read_from_the_compiler_s_words():
    line = (
        "Name: a/Conv_myl0_4, LayerType: correlation, Inputs: [ { Name: x, Dimensions: [-1,4], Datatype: Half, Format: "
        "(NC/4HW4) Four wide }], Constants: [ { Name: w, Datatype: Float, Format: (Linear) }], Outputs: [ { Name: y, "
        "Datatype: BFloat16, Format: (NHWC) }], TacticName: t, StreamId: 0, "
        "Metadata: [ONNX Layer: a/Conv][ONNX Layer: b]"
    )
    (layer,) = read_layers(f"Layers:\n{line}\n\nBindings:\nx\n")
    assert (layer.kind, layer.reads, layer.writes, layer.nodes) == (
        "correlation", "float16", "bfloat16", ("a/Conv", "b"),
    )  # fmt: skip
    assert layer.computes


@pytest.mark.parametrize(("precision", "target"), [("fp16", "rtx:sm89"), ("bf16", "rtx")])
def test_the_whole_tiny_pipeline_is_compiled_and_says_that_it_needs_a_gpu(
    tiny_bundle, tmp_path, precision, target, capsys
):
    folder = tmp_path / "tiny"
    command = ["build", str(tiny_bundle.parent.parent / "exports/tiny"), "-o", str(folder), "--schedulers", "ddim"]
    assert run([*command, "--target", target, "--precision", precision]) == 0
    capsys.readouterr()
    found = json.loads((folder / "bundle.json").read_text())
    dtype = {"fp16": "float16", "bf16": "bfloat16"}[precision]
    for key in found["engines"]["tensorrt-rtx"].values():
        realised = json.loads((folder / "engines" / key / "manifest.json").read_text())["realised"]
        assert set(realised["arithmetic"]) == {dtype}
    assert run(["run", str(folder), "a cat"]) == MissingDependency.exit_code
    assert "built with --target cpu" in capsys.readouterr().err
