"""The first value that is not finite is found in the order of computing, whichever of the three ways it is not."""

import numpy as np
import pytest

from trtdiff.passes.flag_non_finite import flag_non_finite
from trtdiff.passes.half_precision import half_precision
from trtdiff.passes.round_values import round_values
from trtdiff.passes.statistics import STATISTICS, amax

ir = pytest.importorskip("onnx_ir")
NET = """<ir_version: 11, opset_import: ["": 23]>
    net (float[n, 4] x) => (float[n, 4] y)
    <float[n, 4] a, float[n, 4] b, float[n, 4] c, float[n, 4] d, int64[2] order = {0, 4}>
    { a = Mul (x, x)
      b = Reshape (a, order)
      c = Sqrt (b)
      d = Neg (c)
      y = Tanh (d) }"""


def first(x, *, half=False):
    """The place of the first value that is not finite, or None."""
    import onnxruntime as ort

    model = ir.from_onnx_text(NET)
    for node in model.graph:
        node.name = f"node {node.outputs[0].name}"
        node.metadata_props["module"] = f"module {node.outputs[0].name}"
    if half:
        half_precision(model, dtype="float16")
        round_values(model)
    places = flag_non_finite(model)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    finite = np.isfinite(amax(session.run([STATISTICS], {"x": x})[0]))
    return None if finite.all() else places[int(np.argmin(finite))]


def filled(value):
    x = np.ones((3, 4), np.float32)
    x[1, 2] = value
    return x


@pytest.mark.parametrize("half", [False, True])
def test_nothing_is_blamed_where_all_is_finite(half):
    assert first(filled(2), half=half) is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("half", [False, True])
def test_an_input_that_is_not_finite_is_blamed_itself(value, half):
    place = first(filled(value), half=half)
    assert (place.value, place.node, place.module) == ("x", "", "")


def test_an_overflow_is_blamed_on_the_node_that_makes_it():
    place = first(filled(1e25))  # its square is beyond float32
    assert (place.value, place.node, place.module) == ("a", "node a", "module a")
    assert str(place) == "module a (node node a)"


def test_an_overflow_of_half_precision_is_blamed_on_what_was_rounded():
    assert first(filled(300)) is None  # 90,000 is nothing to float32
    place = first(filled(300), half=True)
    assert (place.value, place.node, place.module) == ("a", "node a", "module a")


def test_a_value_beyond_half_precision_is_blamed_on_the_input_that_is_rounded():
    place = first(filled(1e6), half=True)
    assert str(place) == "input x"
