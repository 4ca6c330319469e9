"""Engines for RTX GPUs, compiled without one; nothing here runs them."""

import json
import resource

import onnx
import pytest

from trtdiff.backends import backend, gpu, tensorrt_builder
from trtdiff.backends.options import BuilderOptions
from trtdiff.backends.tensorrt_builder import PLAN, apply_options
from trtdiff.backends.tensorrt_layers import read_layers_file
from trtdiff.cli import exit_code as run
from trtdiff.errors import BuildError, MissingDependency, StorageError, UsageError
from trtdiff.lowered import write_graph
from trtdiff.types import ShapeProfile

trt = pytest.importorskip("tensorrt_rtx")
ir = pytest.importorskip("onnx_ir")

HEAD = '<ir_version: 11, opset_import: ["": 23]>\n'
CONV = f"""{HEAD}
net (float16[batch, 16, height, width] x, float16[16, 16, 3, 3] w) => (float16[batch, 16, height, width] y)
{{ c = Conv <pads = [1, 1, 1, 1]> (x, w)  y = Tanh (c) }}"""
NONE = BuilderOptions()
SIZES = ShapeProfile.parse("batch=1:1:2,height=8:16:32,width=8:16:32")


def graph(folder, text):
    """Nodes are called net/Conv, and come from the modules blocks.0, blocks.1, …."""
    folder.mkdir()
    model = ir.from_onnx_text(text)
    for place, node in enumerate(model.graph):
        node.name, node.metadata_props["module"] = f"net/{node.op_type}", f"blocks.{place}"
    return write_graph(model, folder)


def compiled(path, out, device="sm89", *, options=NONE, progress=lambda done, total: None):
    out.mkdir()
    return backend("tensorrt-rtx", device).build(path, SIZES, options, out, progress)


def build(tmp_path, text, *args, **more):
    return compiled(graph(tmp_path / "in", text), tmp_path / "engine", *args, **more)


def test_an_engine_its_types_and_its_layers(tmp_path):
    realised = build(tmp_path, CONV)
    assert realised["plan_bytes"] == (tmp_path / "engine" / PLAN).stat().st_size > 0
    assert realised["arithmetic"] == {"float16": 1}
    assert realised["other_arithmetic"] == []
    assert set(realised["types"]) == {"float16"}
    assert realised["remarks"] == realised["warnings"] == []
    assert "precision" not in realised  # its layers were compared with the graph
    layers = read_layers_file(tmp_path / "engine")
    assert len(layers) == realised["layers"]
    (conv,) = [layer for layer in layers if layer.computes]
    assert "net/Conv" in conv.nodes
    assert "blocks.0" in conv.modules
    assert {module for layer in layers for module in layer.modules} == {"blocks.0", "blocks.1"}


@pytest.mark.parametrize("device", ["", "sm86,sm120"])
def test_portable_engines_and_several_gpus(tmp_path, device):
    realised = build(tmp_path, CONV, device)
    assert realised["plan_bytes"] == (tmp_path / "engine" / PLAN).stat().st_size


def test_a_gpu_that_the_library_does_not_build_for_names_those_it_does(tmp_path):
    with pytest.raises(UsageError, match="does not build for sm61") as caught:
        build(tmp_path, CONV, "sm61")
    assert "sm89" in caught.value.hint


# --- options ---------------------------------------------------------------------------------------------------------


def test_options_reach_the_builder_s_config():
    config = trt.Builder(trt.Logger()).create_builder_config()
    asked = BuilderOptions(optimization_level=2, workspace=1 << 28, weight_streaming=True)
    apply_options(trt, config, asked)
    assert config.builder_optimization_level == 2
    assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 1 << 28
    assert config.get_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    assert not config.get_flag(trt.BuilderFlag.VERSION_COMPATIBLE)


def test_the_options_that_it_takes_build(tmp_path):
    taken = BuilderOptions(workspace=1 << 28, weight_streaming=True)
    assert build(tmp_path, CONV, options=taken)["plan_bytes"] > 0
    assert not any(backend("tensorrt-rtx").refusal(option) for option in taken.asked())


@pytest.mark.parametrize("level", [0, 5])
def test_the_optimization_level_changes_nothing_which_is_why_it_is_refused(tmp_path, level):
    path = graph(tmp_path / "in", CONV)
    compiled(path, tmp_path / "plain")
    compiled(path, tmp_path / "asked", options=BuilderOptions(optimization_level=level))
    assert (tmp_path / "plain" / PLAN).read_bytes() == (tmp_path / "asked" / PLAN).read_bytes()
    assert "same engine at every level" in backend("tensorrt-rtx").refusal("optimization_level")


def test_version_compatible_engines_fail_which_is_why_they_are_refused(tmp_path):
    with pytest.raises(BuildError, match="libnvinfer_lean"):
        build(tmp_path, CONV, options=BuilderOptions(version_compatible=True))
    assert "libnvinfer_lean" in backend("tensorrt-rtx").refusal("version_compatible")


def test_hardware_compatible_is_ignored_with_a_warning_which_is_why_it_is_refused(tmp_path):
    realised = build(tmp_path, CONV, options=BuilderOptions(hardware_compatible=True))
    assert any("setHardwareCompatibilityLevel() is unsupported" in text for text in realised["warnings"])
    assert "ignores it" in backend("tensorrt-rtx").refusal("hardware_compatible")


# --- progress --------------------------------------------------------------------------------------------------------


def test_progress_never_falls_and_reaches_its_end(tmp_path):
    told = []
    build(tmp_path, CONV, progress=lambda done, total: told.append(done / total))
    assert told == sorted(told)
    assert told[0] < 0.1
    assert told[-1] == 1
    assert len(told) > 20


@pytest.mark.parametrize("problem", [KeyboardInterrupt, ZeroDivisionError])
def test_what_is_raised_while_it_builds_stops_it_and_comes_out(tmp_path, problem):
    told = []

    def progress(done, total):
        told.append(done)
        if done > total / 4:
            raise problem

    with pytest.raises(problem):
        build(tmp_path, CONV, progress=progress)
    assert sum(done > 250 for done in told) == 1  # it was called no more


# --- failures --------------------------------------------------------------------------------------------------------

QKV = ", ".join(f"DTYPE[batch, 2, 64, HEAD] {name}" for name in "qkv")
ATTENTION = f"{HEAD} net ({QKV}) => (DTYPE[batch, 2, 64, HEAD] y) {{ a = Tanh (q)  y = Attention (a, k, v) }}"
PAIR = HEAD + "net (float16[batch, 16] a, B b) => (float16[batch, n] y) { t = Tanh (a)  y = OP (t, b) }"
TURING = HEAD + "net (float[batch, 16] a, float[16, 16] w) => (float[batch, 16] y) { t = Tanh (a)  y = MatMul (t, w) }"
RESHAPE = (
    HEAD
    + """net (float16[batch, 16] a) => (float16[p, q] y) <int64[2] s = {5, 7}>
{ t = Tanh (a)  y = Reshape (t, s) }"""
)
FAILURES = {
    "float32 attention": (
        ATTENTION.replace("DTYPE", "float").replace("HEAD", "64"), "sm89",
        "node Attention net/Attention; module blocks.1; inputs a: float32[batch, 2, 64, 64], k: float32",
        "dedicated kernel", "fp16 and bf16",
    ),
    "small heads": (
        ATTENTION.replace("DTYPE", "float16").replace("HEAD", "8"), "sm89",
        "node Attention net/Attention; module blocks.1; inputs a: float16[batch, 2, 64, 8]",
        "dedicated kernel", "head size",
    ),
    "mixed types": (
        PAIR.replace("B b", "float[batch, 16] b").replace("OP", "Concat <axis = 1>"), "sm89",
        "node Concat net/Concat; module blocks.1; inputs t: float16[batch, 16], b: float32[batch, 16]",
        "same type", "different types",
    ),
    "an operator that it does not have": (
        PAIR.replace("B b", "float16[batch, 16] b").replace("OP (t, b)", "Det (t)"), "sm89",
        "node Det net/Det; module blocks.1; inputs t: float16[batch, 16]",
        "does not support the operator Det", "--target cpu",
    ),
    "sizes of a product": (
        PAIR.replace("B b", "float16[8, 4] b").replace("OP", "MatMul"), "sm89",
        "node MatMul net/MatMul; module blocks.1; inputs t: float16[batch, 16], b: float16[8, 4]",
        "must match", "do not fit",
    ),
    "sizes at a point of the profile": (
        RESHAPE, "sm89",
        "node Reshape net/Reshape; module blocks.1; inputs t: float16[batch, 16], s: int64[2]",
        "would change volume", "--profile",
    ),
    "bfloat16 on Turing": (
        TURING.replace("float[", "bfloat16["), "sm75", "graph.onnx", "sm75", "--precision fp16",
    ),
    "float32 products on Turing": (
        TURING, "sm75", "module blocks.1; inputs t: float32[batch, 16], w: float32[16, 16]; outputs y: float32[",
        "FP32 GEMM is not supported", "leave sm75 out",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "device", "where", "message", "hint"), FAILURES.values(), ids=FAILURES)
def test_a_failure_names_its_node_module_types_and_way_out(tmp_path, monkeypatch, text, device, where, message, hint):
    if "kernel" in message:  # as with a version that cannot decompose attention
        monkeypatch.setattr(tensorrt_builder, "mark_decomposable", lambda trt, network: 0)
    with pytest.raises(BuildError) as caught:
        build(tmp_path, text, device)
    assert where in caught.value.where
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert "cudaError" not in caught.value.message  # the missing driver is not what is wrong


@pytest.mark.parametrize("failure", ["float32 attention", "small heads"])
def test_attention_without_a_kernel_is_built_in_parts(tmp_path, failure):
    """Where a pass has not decomposed it: the library may."""
    text, device, *_ = FAILURES[failure]
    build(tmp_path, text, device)
    assert (tmp_path / "engine" / PLAN).stat().st_size > 0


@pytest.mark.parametrize("content", [b"no graph at all" * 100, b""], ids=["garbage", "empty"])
def test_a_file_that_is_no_graph_is_refused_by_name(tmp_path, content):
    path = tmp_path / "graph.onnx"
    path.write_bytes(content)
    with pytest.raises(BuildError, match="refuses the graph") as caught:
        compiled(path, tmp_path / "engine")
    assert str(path) in caught.value.where


def test_weights_that_are_not_there_are_named(tmp_path):
    path = graph(tmp_path / "in", CONV)
    model = onnx.load(path)
    weight = model.graph.initializer.add(name="w2", data_type=10, dims=[16, 16, 3, 3], data_location=1)
    weight.external_data.add(key="location", value="gone.safetensors")
    model.graph.node[0].input[1] = "w2"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(BuildError, match=r"gone\.safetensors") as caught:
        compiled(path, tmp_path / "engine")
    assert "export again" in caught.value.hint


def test_a_plan_that_does_not_fit_on_the_disk_is_a_storage_error(tmp_path):
    path = graph(tmp_path / "in", CONV)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StorageError, match="could not be written") as caught:
            compiled(path, tmp_path / "engine")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.where.endswith(PLAN)
    assert "free some space" in caught.value.hint


# --- what can be loaded here -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("built_for", "number", "reason"),
    [
        ("portable", 89, ""),
        ("portable", 75, "sm80 or later"),
        ("sm86,sm89", 89, ""),
        ("sm86,sm120", 89, "built for sm86,sm120, A GPU (sm89) is here"),
    ],
)
def test_engines_for_other_gpus_are_refused(monkeypatch, built_for, number, reason):
    rtx = backend("tensorrt-rtx")
    monkeypatch.setattr("trtdiff.backends.tensorrt_rtx.this_gpu", lambda: gpu.Gpu("A GPU", number))
    spec = {"backend_version": rtx.toolchain().version, "device": built_for}
    found = rtx.mismatch(spec)
    assert reason in found
    assert bool(found) == bool(reason)
    assert "built with TensorRT for RTX 1.0" in rtx.mismatch({**spec, "backend_version": "1.0"})


@pytest.mark.parametrize(("number", "reason"), [(86, "sm86 has no float8"), (89, "")])
def test_a_portable_engine_of_float8_is_refused_by_a_gpu_without_it(monkeypatch, number, reason):
    rtx = backend("tensorrt-rtx")
    monkeypatch.setattr("trtdiff.backends.tensorrt_rtx.this_gpu", lambda: gpu.Gpu("A GPU", number))
    recipe = {"quantization": {"weights": "float8", "activations": None}}
    spec = {"backend_version": rtx.toolchain().version, "device": "portable", "recipe": recipe}
    assert rtx.mismatch(spec) == reason


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
        assert "precision" not in realised
    assert run(["run", str(folder), "a cat"]) == MissingDependency.exit_code
    assert "build --target cpu" in capsys.readouterr().err
