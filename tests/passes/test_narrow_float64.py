"""float64 in a traced graph: gone, and the numbers are those of float64 as far as float32 has them."""

import numpy as np
import pytest

from trtdiff.passes.narrow_float64 import narrow_float64
from trtdiff.passes.simplify import simplify

ir = pytest.importorskip("onnx_ir")

ANGLES = """<ir_version: 10, opset_import: ["": 23]>
angles (int64["n"] place) => (float["n", 3] wave)
<double theta = {10000.0}, double[3] share = {0.0, -0.25, -0.75}, int64[2] last = {-1, 1}>
{
    wide = Cast <to = 11> (place)
    rates = Pow (theta, share)
    column = Reshape (wide, last)
    angle = Mul (column, rates)
    sine = Sin (angle)
    wave = Cast <to = 1> (sine)
}"""


def types(model):
    values = [*model.graph.initializers.values(), *(out for node in model.graph for out in node.outputs)]
    return {value.dtype for value in values}


@pytest.mark.parametrize("passes", [narrow_float64, simplify])
def test_angles_are_computed_in_float32(passes):
    import onnx
    import onnxruntime as ort

    model = ir.from_onnx_text(ANGLES)
    for node in model.graph:
        for value, dtype in zip(node.outputs, (ir.DataType.DOUBLE,), strict=True):
            value.dtype = value.dtype or dtype
    assert passes(model)
    assert ir.DataType.DOUBLE not in types(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    place = np.arange(300)
    (wave,) = ort.InferenceSession(proto.SerializeToString()).run(None, {"place": place})
    exact = np.sin(place[:, None] * 10000.0 ** np.array([0.0, -0.25, -0.75]))
    assert wave.dtype == np.float32
    assert np.abs(wave - exact).max() <= 1e-5  # an ulp of an angle of 300 is 3e-5; measured 1.1e-6
