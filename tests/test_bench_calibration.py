"""The benchmark's count of what is quantized, on a graph whose multiply-adds can be counted by hand."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_calibration.py"
GRAPH = """
<ir_version: 10, opset_import: ["": 20]>
net (float[1, 2, 4, 4] x, float[1, 3, 4, 5] y) => (float[1, 3, 4, 4] z)
<float s = {0.1}, int8 o = {0}> {
    xq = QuantizeLinear(x, s, o)
    xd = DequantizeLinear(xq, s, o)
    wq = QuantizeLinear(w, s, o)
    wd = DequantizeLinear(wq, s, o)
    c = Conv <pads = [1, 1, 1, 1]> (xd, wd)
    m = MatMul(c, v)
    yt = Transpose <perm = [0, 1, 3, 2]> (y)
    z = MatMul(m, yt)
}"""


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("bench_calibration", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_shares_are_of_multiply_adds(script, tmp_path):
    """48 outputs of 18 terms are quantized, 60 of 4 are not; the product of two activations is not either."""
    import onnx

    model = onnx.parser.parse_model(GRAPH)
    for name, shape in (("w", (3, 2, 3, 3)), ("v", (4, 5))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    onnx.save(model, tmp_path / "model.onnx")
    feeds = {"x": np.ones((1, 2, 4, 4), np.float32), "y": np.ones((1, 3, 4, 5), np.float32)}
    assert script.quantized_shares(tmp_path / "model.onnx", feeds) == (864 / (864 + 240), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
