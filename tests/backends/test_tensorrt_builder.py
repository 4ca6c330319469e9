"""How a graph goes through TensorRT's API, in the forms that its versions give it. The library is a double."""

import json
from types import SimpleNamespace

import onnx
import onnx_ir as ir
import pytest

from trtdiff.backends.options import NO_OPTIONS, BuilderOptions
from trtdiff.backends.tensorrt_builder import PLAN, compile_graph
from trtdiff.backends.tensorrt_layers import read_layers_file
from trtdiff.backends.timing_cache import Key, read_times
from trtdiff.errors import BuildError
from trtdiff.lowered import write_graph
from trtdiff.lowering import _require_precision
from trtdiff.types import ShapeProfile

SERIALIZED = b"what the compiler made" * 1000
STRONGLY_TYPED = 1
L4 = Key("NVIDIA L4", "sm89", "10.13.0.35")
HEAD = '<ir_version: 11, opset_import: ["": 23]>\n'
NET = f"""{HEAD}
net (float16[batch, 4] x, float[batch, 4] z, float16[4, 4] w, float[4, 4] v) => (float16[batch, 4] y)
{{ a = MatMul (x, w)  b = Tanh (a)  c = MatMul (z, v)  d = Cast <to = 10> (z)  e = MatMul (d, w)  f = Cast <to = 10> (c)
g = Add (b, e)  y = Add (f, g) }}"""
"""net/0 is half precision, net/2 an island, and net/4 half precision behind a cast."""
ATTENTION = f"""{HEAD}
net (float16[batch, 2, 16, 8] q, float16[batch, 2, 16, 8] k) => (float16[batch, 2, 16, 8] y)
{{ y = Attention (q, k, k) }}"""


class Logger:
    def __init__(self):
        pass


class Config:
    def __init__(self, library):
        self.library, self.cleared, self.profiles = library, [], []

    def clear_flag(self, flag):
        self.cleared.append(flag)

    def add_optimization_profile(self, profile):
        self.profiles.append(profile)

    def create_timing_cache(self, content):
        return SimpleNamespace(serialize=lambda: self.library.times, combine=lambda other, ignore: True)

    def set_timing_cache(self, cache, ignore):
        return True


class Network:
    num_outputs = num_inputs = num_layers = 0


class Parser:
    def __init__(self, library, network):
        self.library, self.network = library, network

    def supports_operator(self, name):
        return name != "Attention" or self.library.attention

    def parse_from_file(self, path):
        model = onnx.load(path)
        self.library.parsed = [node.op_type for node in model.graph.node]
        self.network.inputs = [SimpleNamespace(name=value.name) for value in model.graph.input]
        self.network.get_input = self.network.inputs.__getitem__
        self.network.num_inputs, self.network.num_outputs = len(model.graph.input), len(model.graph.output)
        return True


class Library:
    """The module of one version: what it has, what it says while it builds, and what its inspector tells."""

    __name__, __version__ = "tensorrt", "10.13.0.35"
    ILogger, IProgressMonitor = Logger, Logger
    ProfilingVerbosity = SimpleNamespace(DETAILED="detailed")
    BuilderFlag = SimpleNamespace(TF32="tf32")
    LayerInformationFormat = SimpleNamespace(JSON="json")

    def __init__(self, *, strongly_typed=True, streams=True, attention=True, says=(), inspector=None, plan=SERIALIZED):
        self.NetworkDefinitionCreationFlag = SimpleNamespace()
        if strongly_typed:
            self.NetworkDefinitionCreationFlag.STRONGLY_TYPED = STRONGLY_TYPED
        if streams:
            self.IStreamWriter = object
        self.streams, self.attention, self.says, self.inspector, self.plan = streams, attention, says, inspector, plan
        self.times = b"times"

    def Builder(self, logger):  # noqa: N802
        def build():
            for severity, text in self.says:
                logger.log(SimpleNamespace(name=severity), text)
            return self.plan

        def network(flags):
            self.flags = flags
            return Network()

        def stream(network, config, writer):
            plan = build()
            return plan is not None and all(writer.write(plan[at : at + 999]) for at in range(0, len(plan), 999))

        def profile():
            return SimpleNamespace(shapes={}, set_shape=lambda name, *shapes: self.shapes.update({name: shapes}))

        self.shapes = {}
        self.config = Config(self)
        builder = SimpleNamespace(
            create_network=network, create_builder_config=lambda: self.config, create_optimization_profile=profile
        )
        if self.streams:
            builder.build_serialized_network_to_stream = stream
        else:
            builder.build_serialized_network = lambda network, config: build()
        return builder

    def OnnxParser(self, network, logger):  # noqa: N802
        return Parser(self, network)

    def Runtime(self, logger):  # noqa: N802
        return SimpleNamespace(deserialize_cuda_engine=self.load)

    def load(self, plan):
        assert bytes(plan) == self.plan
        if self.inspector is None:
            return None
        return SimpleNamespace(
            create_engine_inspector=lambda: SimpleNamespace(get_engine_information=lambda form: self.inspector)
        )


def line(node, dtype="Half", kind="gemm", metadata=None):
    """Give a layer as TensorRT 10 lists it."""
    return (
        f"Name: {node}_myl0_3, LayerType: {kind}, Inputs: [ {{ Name: x, Dimensions: [1,4], Format/Datatype: {dtype} }}]"
        ", Outputs: [ { Name: y, Dimensions: [1,4], Format/Datatype: Half }], TacticName: sm80, StreamId: 0, Metadata: "
        + (f"[ONNX Layer: {node}]" if metadata is None else metadata)
    )


def listing(*lines):
    return ("VERBOSE", "Layers:\n" + "\n".join(lines))


def told(*layers):
    """What an inspector tells of such layers."""
    return json.dumps({"Layers": list(layers), "Bindings": []})


INSPECTED = {
    "Name": "net/0", "LayerType": "gemm", "Inputs": [{"Name": "x", "Format/Datatype": "Half"}],
    "Outputs": [{"Name": "y", "Format/Datatype": "Half"}], "Metadata": "[ONNX Layer: net/0]",
}  # fmt: skip


@pytest.fixture
def build(tmp_path):
    def compiled(library, text=NET, **more):
        (tmp_path / "in").mkdir()
        (tmp_path / "engine").mkdir()
        model = ir.from_onnx_text(text)
        for place, node in enumerate(model.graph):
            node.name, node.metadata_props["module"] = f"net/{place}", f"blocks.{place}"
        for value in (node.outputs[0] for node in model.graph if node.op_type == "Attention"):
            value.shape, value.dtype = ir.Shape(["batch", 2, 16, 8]), ir.DataType.FLOAT16
        graph = write_graph(model, tmp_path / "in")
        sizes, more = ShapeProfile.parse("batch=1:2:4"), {"options": NO_OPTIONS, **more}
        return compile_graph(
            library, graph, sizes, out=tmp_path / "engine", progress=lambda done, total: None,
            shares={"phases": 0.9, "read": 0.0, "written": 0.1}, **more
        )  # fmt: skip

    compiled.engine = tmp_path / "engine"
    return compiled


# --- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(("strongly_typed", "flags"), [(True, 1 << STRONGLY_TYPED), (False, 0)])
def test_the_network_is_strongly_typed_and_the_plan_written_in_every_version(build, streams, strongly_typed, flags):
    library = Library(strongly_typed=strongly_typed, streams=streams, says=[listing(line("net/0"))])
    realised = build(library)
    assert library.flags == flags
    assert (build.engine / PLAN).read_bytes() == SERIALIZED
    assert realised["plan_bytes"] == len(SERIALIZED)
    assert realised["arithmetic"] == {"float16": 1}
    assert realised["remarks"] == realised["warnings"] == []
    assert "precision" not in realised
    assert library.shapes["x"] == ((1, 4), (2, 4), (4, 4))
    assert library.config.profiling_verbosity == "detailed"
    assert library.config.cleared == ["tf32"]


@pytest.mark.parametrize("streams", [True, False])
def test_no_plan_is_an_error_with_what_the_library_said(build, streams):
    library = Library(streams=streams, plan=None, says=[("ERROR", "no implementation of net/2")])
    with pytest.raises(BuildError, match="no implementation of net/2") as caught:
        build(library)
    assert "module blocks.2" in caught.value.where


def test_attention_is_decomposed_for_a_parser_that_does_not_know_it(build):
    library = Library(attention=False, says=[listing(line("net/0/MatMul"))])
    realised = build(library, ATTENTION)
    assert "Attention" not in library.parsed
    assert {"MatMul", "Softmax"} <= set(library.parsed)
    assert "tensorrt 10.13.0.35 does not know attention" in realised["remarks"][0]
    (layer,) = read_layers_file(build.engine)
    assert layer.modules == ("blocks.0",)
    assert "precision" not in realised  # the layer's node is one of the graph that was compiled


def test_attention_is_left_to_a_parser_that_knows_it(build):
    library = Library(says=[listing(line("net/0"))])
    assert build(library, ATTENTION)["remarks"] == []
    assert library.parsed == ["Attention"]


# --- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "says", [[], [listing(line("net/0"), "Name: net/2, LayerType: gemm, In a way that no version has yet")]]
)
def test_the_engine_is_asked_where_the_log_does_not_tell_every_layer(build, says):
    other = {**INSPECTED, "Name": "net/4", "Metadata": "[ONNX Layer: net/4]"}
    realised = build(Library(says=says, inspector=told(INSPECTED, other)))
    assert [layer.name for layer in read_layers_file(build.engine)] == ["net/0", "net/4"]
    assert realised["remarks"] == realised["warnings"] == []


def test_the_engine_is_not_asked_where_the_log_tells_every_layer(build):
    build(Library(says=[listing(line("net/0"))], inspector=told(INSPECTED, INSPECTED)))
    assert len(read_layers_file(build.engine)) == 1


@pytest.mark.parametrize(
    ("inspector", "reason"),
    [
        (None, "does not load here: no CUDA device"),
        (told("net/0"), "gives names at most"),
        ("{", "JSONDecodeError"),
    ],
)
def test_an_engine_that_tells_nothing_is_a_warning_that_says_why(build, inspector, reason):
    says = [("WARNING", f"of the compiler {number}") for number in range(30)]
    realised = build(Library(says=[*says, ("ERROR", "no CUDA device")], inspector=inspector))
    first, second = realised["remarks"]
    assert first == "the precision of this engine is not verified: the compiler listed no layers"
    assert "of 0 layers that the compiler listed, 0 could be read" in second
    assert reason in second
    assert realised["warnings"] == [f"of the compiler {number}" for number in range(20)]
    assert realised["precision"] == "not verified: the compiler listed no layers"


# --- times -----------------------------------------------------------------------------------------------------------


def test_times_are_kept(build, tmp_path):
    build(Library(), options=BuilderOptions(timing_cache=tmp_path / "times"), times=L4)
    assert read_times(tmp_path / "times") == {L4: b"times"}


@pytest.mark.parametrize(
    ("times", "reason"), [(None, "does not give what it measured"), ("no bytes", "TypeError: string argument")]
)
def test_times_that_cannot_be_kept_lose_no_engine(build, tmp_path, times, reason):
    library = Library(says=[listing(line("net/0")), *[("WARNING", f"number {number}") for number in range(30)]])
    library.times = times
    realised = build(library, options=BuilderOptions(timing_cache=tmp_path / "times"), times=L4)
    assert (build.engine / PLAN).read_bytes() == SERIALIZED
    assert realised["remarks"][0].startswith("the measured times were not kept: ")
    assert reason in realised["remarks"][0]


# --- precision -------------------------------------------------------------------------------------------------------


def test_a_layer_that_computes_half_precision_in_float32_is_refused_by_layer_nodes_and_module(build):
    lines = [line("net/0", "Float", metadata="[ONNX Layer: net/0][ONNX Layer: net/1]"), line("net/4")]
    realised = build(Library(says=[listing(*lines, *[line("net/4")] * 9)]))
    with pytest.raises(BuildError, match="in float32 what its graph has in float16") as caught:
        _require_precision(realised, "float16", "denoiser.onnx")
    assert caught.value.where == "layer net/0_myl0_3; nodes net/0, net/1; modules blocks.0, blocks.1"
    assert "--keep" in caught.value.hint


def test_the_first_three_such_layers_are_described(build):
    realised = build(Library(says=[listing(*[line("net/0", "Float")] * 5)]))
    with pytest.raises(BuildError) as caught:
        _require_precision(realised, "float16", "denoiser.onnx")
    assert caught.value.where.count("layer net/0") == 3
    assert caught.value.where.endswith("and 2 more")


@pytest.mark.parametrize(
    "lines",
    [
        [line("net/2", "Float")] * 9 + [line("net/0")],  # an island, however large
        [line("net/4", "Float", metadata="[ONNX Layer: net/3][ONNX Layer: net/4]")],  # casts as it reads
        [line("net/0", "Float", metadata="[ONNX Layer: net/0][ONNX Layer: net/2]")],  # both types in one
        [line("net/1", "Float", kind="kgen"), line("net/0")],  # multiplies nothing
        [line("net/0", "Row major linear FP16")],
    ],
)
def test_layers_in_the_types_of_the_graph_pass(build, lines):
    realised = build(Library(says=[listing(*lines)]))
    assert "precision" not in realised
    _require_precision(realised, "float16", "denoiser.onnx")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([line("net/1", kind="kgen")], "no layer that multiplies was listed"),
        ([line("net/0", metadata="")], "no layer that multiplies names its nodes in the graph"),
    ],
)
def test_what_cannot_be_compared_is_said_to_be_not_verified(build, lines, reason):
    realised = build(Library(says=[listing(*lines), ("WARNING", "of the compiler")]))
    assert realised["precision"] == f"not verified: {reason}"
    assert realised["remarks"] == [f"the precision of this engine is not verified: {reason}"]
    assert realised["warnings"] == ["of the compiler"]
    _require_precision(realised, "float16", "denoiser.onnx")


def test_without_nodes_most_layers_must_be_of_the_type_that_was_asked_for(build):
    half, wide = line("a", metadata=""), line("b", "Float", metadata="")
    _require_precision(build(Library(says=[listing(half, half, wide)])), "float16", "denoiser.onnx")
    with pytest.raises(BuildError, match="2 in float32, 1 in float16") as caught:
        _require_precision(
            {"precision": "not verified: …", "arithmetic": {"float32": 2, "float16": 1}}, "float16", "denoiser.onnx"
        )
    assert caught.value.where == "denoiser.onnx"


def test_a_backend_that_lists_no_layers_is_not_judged():
    _require_precision({"inputs": []}, "float32", "denoiser.onnx")
