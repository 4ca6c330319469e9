"""Mixed types get the casts that PyTorch makes, and every node type-checks, for ONNX and for TensorRT's parser."""

import itertools

import numpy as np
import pytest

from trtdiff.errors import BuildError
from trtdiff.passes.legalise_types import legalise_types, promoted

ir = pytest.importorskip("onnx_ir")
onnx = pytest.importorskip("onnx")

HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float")


def make(text):
    return ir.from_onnx_text(f'<ir_version: 11, opset_import: ["": 23]>\nnet {text}')


def types(model):
    """Types that ONNX infers from inputs alone, by name; raises where a node does not type-check."""
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = value.type = None
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True).graph
    return {
        value.name: onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)
        for value in [*inferred.value_info, *inferred.output]
    }


# --- PyTorch's promotion ----------------------------------------------------------------------------------------------


def test_promotion_is_that_of_pytorch():
    """For all pairs of eight types, with and without dimensions."""
    torch = pytest.importorskip("torch")
    names = {"bool": "bool", "uint8": "uint8", "int32": "int32", "int64": "int64", "float16": "float16",
             "bfloat16": "bfloat16", "float32": "float", "float64": "double"}  # fmt: skip
    for (a, b), shape, other in itertools.product(itertools.product(names, repeat=2), [(), (2,)], [(), (2,)]):
        tensors = [torch.empty(dims, dtype=getattr(torch, name)) for name, dims in ((a, shape), (b, other))]
        expected = str(torch.result_type(*tensors)).removeprefix("torch.")
        values = [
            ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(ir.DataType[names[name].upper()]))
            for name, dims in ((a, shape), (b, other))
        ]
        assert promoted(values) == ir.DataType[names[expected].upper()], (a, shape, b, other)


def test_a_constant_that_the_narrow_type_cannot_hold_widens():
    for number, kind in ((60000.0, "FLOAT16"), (70000.0, "FLOAT"), (-np.inf, "FLOAT16")):
        model = make("(float16[n] x, float c) => (float16[n] y) { p = Mul (x, c)  y = Cast <to = 10> (p) }")
        value = model.graph.inputs.pop()
        value.const_value = ir.tensor(np.float32(number), name="c")
        model.graph.register_initializer(value)
        legalise_types(model)
        assert types(model)["p"] == kind


# --- the operators of diffusers' exports ------------------------------------------------------------------------------

TWO = "{0}[2, 4] x, {1}[2, 4] y"
IMAGE = "{0}[1, 4, 8, 8] x"
HEADS = "{0}[1, 2, 8, 16] x, {1}[1, 2, 8, 16] y, {2}[1, 2, 8, 16] v"
OPERATORS = {
    **{name: (TWO, f"r = {name} (x, y)") for name in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Equal", "Less",
                                                      "Greater", "LessOrEqual", "GreaterOrEqual")},
    "Mod": (TWO, "r = Mod <fmod = 1> (x, y)"),
    "Concat": (TWO, "r = Concat <axis = 0> (x, y)"),
    "Where": (TWO + ", bool[2, 4] b", "r = Where (b, x, y)"),
    "MatMul": ("{0}[2, 4] x, {1}[4, 3] y", "r = MatMul (x, y)"),
    "Gemm": ("{0}[2, 4] x, {1}[3, 4] y, {2}[3] c", "r = Gemm <transB = 1> (x, y, c)"),
    "Clip": ("{0}[2, 4] x, {1} low, {2} high", "r = Clip (x, low, high)"),
    "PRelu": (TWO, "r = PRelu (x, y)"),
    "Sum": (TWO, "r = Sum (x, y)"),
    "Conv": (IMAGE + ", {1}[4, 4, 3, 3] w, {2}[4] c", "r = Conv (x, w, c)"),
    "ConvTranspose": (IMAGE + ", {1}[4, 4, 3, 3] w, {2}[4] c", "r = ConvTranspose (x, w, c)"),
    "GroupNormalization": (IMAGE + ", {1}[4] s, {2}[4] c", "r = GroupNormalization <num_groups = 2> (x, s, c)"),
    "InstanceNormalization": (IMAGE + ", {1}[4] s, {2}[4] c", "r = InstanceNormalization (x, s, c)"),
    "LayerNormalization": ("{0}[2, 4] x, {1}[4] s, {2}[4] c", "r = LayerNormalization (x, s, c)"),
    "Attention": (HEADS + ", {3}[1, 1, 8, 8] m", "r = Attention (x, y, v, m)"),
    "Attention, Boolean mask": (HEADS + ", bool[1, 1, 8, 8] m", "r = Attention (x, y, v, m)"),
    "RotaryEmbedding": ("{0}[1, 2, 8, 16] x, {1}[1, 8, 8] c, {2}[1, 8, 8] s", "r = RotaryEmbedding (x, c, s)"),
    "Resize": (IMAGE + ", {1}[4] scales", 'r = Resize <mode = "nearest"> (x, , scales)'),
    "Range": ("{0} x, {1} y, {2} z", "r = Range (x, y, z)"),
    "Pad": (IMAGE + ", int64[8] p, {1} c", "r = Pad (x, p, c)"),
    "ScatterND": (TWO + ", int64[2, 1] i", "r = ScatterND (x, i, y)"),
    "ConstantOfShape": ("{0}[n] x, int64[1] s", "c = ConstantOfShape (s)  r = Add (x, c)"),
    "Cast": ("{0}[n] x, {1}[n] y", "c = Cast <to = 10> (x)  r = Add (c, y)"),
    "CastLike": (TWO, "c = CastLike (x, y)  r = Mul (x, c)"),
    "ReduceMean": (TWO, "c = ReduceMean <keepdims = 1> (x)  r = Sub (c, y)"),
    "Softmax": (TWO, "c = Softmax (x)  r = Mul (c, y)"),
    "Split": (TWO, "c, d = Split <axis = 0, num_outputs = 2> (x)  r = Concat <axis = 0> (c, y, d)"),
    "Gelu": (TWO, "c = Gelu (x)  r = Mul (c, y)"),
    "Einsum": ("{0}[2, 4] x, {1}[4, 3] y", 'r = Einsum <equation = "ij,jk"> (x, y)'),
    "integers": ("{0}[2, 4] x, int64[2, 4] i, bool[2, 4] b", "c = Mul (x, i)  r = Add (c, b)"),
    "indices": ("{0}[2, 4] x, int32[1] i, int64[1] j", "r = Slice (x, i, j, j)"),
    "a chain": (TWO + ", {2}[2, 4] z", "c = Tanh (x)  d = Add (c, y)  e = Exp (d)  r = Mul (e, z)"),
}  # fmt: skip


def mixtures(inputs):
    """Write every mixture of floats for the inputs that are open."""
    count = sum(f"{{{number}}}" in inputs for number in range(4))
    return [inputs.format(*kinds) for kinds in itertools.product(FLOATS, repeat=count)]


@pytest.mark.parametrize("name", OPERATORS)
def test_every_mixture_type_checks_afterwards(name):
    """The checker refuses some mixture of each operator before the pass, and none after it."""
    inputs, body = OPERATORS[name]
    refused = 0
    for mixture in mixtures(inputs):
        text = f"({mixture}) => (float[a] end) {{ {body}  size = Shape (r)  end = Cast <to = 1> (size) }}"
        try:
            types(make(text))
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
            refused += 1
        model = make(text)
        legalise_types(model)
        recorded = {value.name: value.dtype.name for node in model.graph for value in node.outputs}
        assert types(model).items() <= recorded.items()  # ONNX infers nothing about GroupNormalization
    assert refused or name in {"Pow", "CastLike", "Attention, Boolean mask"}  # ONNX allows all of these


@pytest.mark.parametrize("name", sorted(set(OPERATORS) - {"CastLike", "Resize", "Range"}))
def test_tensorrt_s_parser_takes_every_mixture(name):
    """(It has no CastLike, and wants scales and ends as constants.)"""
    trt = pytest.importorskip("tensorrt_rtx")
    inputs, body = OPERATORS[name]
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    for mixture in mixtures(inputs)[:9]:
        model = make(f"({mixture}) => (float[a] end) {{ {body}  size = Shape (r)  end = Cast <to = 1> (size) }}")
        legalise_types(model)
        network = trt.Builder(logger).create_network(0)
        parser = trt.OnnxParser(network, logger)
        assert parser.parse(ir.to_proto(model).SerializeToString()), parser.get_error(0).desc()


# --- what else it promises --------------------------------------------------------------------------------------------


def test_values_are_those_of_the_float32_graph():
    """float16 numbers are exact in float32, so a mixture computes what the promoted inputs give."""
    import onnxruntime as ort

    text = (
        "({0}[2, 4] x, float[2, 4] y, int64[4] i) => (float[c, d] r) {{ c = Concat <axis = 0> (x, y)  r = Mul (c, i) }}"
    )
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 4)).astype(np.float16), "y": rng.standard_normal((2, 4)).astype(np.float32),
             "i": np.arange(4)}  # fmt: skip
    model = make(text.format("float16"))
    legalise_types(model)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    expected = np.concatenate([feeds["x"].astype(np.float32), feeds["y"]]) * feeds["i"].astype(np.float32)
    np.testing.assert_array_equal(session.run(None, feeds)[0], expected)


def test_a_value_is_cast_once_for_all_its_readers():
    model = make("(float16[n] x, float[n] y) => (float[n] r) { a = Add (x, y)  b = Mul (x, y)  r = Sub (a, b) }")
    legalise_types(model)
    assert [node.op_type for node in model.graph] == ["Cast", "Add", "Mul", "Sub"]


def test_outputs_of_the_graph_keep_their_names_and_types():
    model = make("(float16[n] x, float[n] y) => (float16[n] r) { r = Add (x, y) }")
    legalise_types(model)
    assert [node.op_type for node in model.graph] == ["Cast", "Add", "Cast"]
    assert [value.dtype.name for node in model.graph for value in node.outputs] == ["FLOAT", "FLOAT", "FLOAT16"]
    assert types(model)["r"] == "FLOAT16"


def test_a_graph_of_one_type_is_left_alone():
    model = make("(float16[n] x, float16[n] y, int64[n] i) => (float16[n] r) { a = Add (x, y)  r = Gather (a, i) }")
    before = ir.to_proto(model)
    legalise_types(model)
    assert [node.op_type for node in model.graph] == ["Add", "Gather"]
    assert ir.to_proto(model).graph.input == before.graph.input


def test_what_no_cast_can_mend_is_an_error_that_names_the_node():
    model = make("(float[n] x) => (bool[n] r) { r = And (x, x) }")
    model.graph[0].name, model.graph[0].metadata_props["module"] = "both", "net.mask"
    with pytest.raises(BuildError, match="And takes no float32 as A") as caught:
        legalise_types(model)
    assert "node And both; module net.mask" in caught.value.where
