"""The forms for OpenVINO compute what the operators they replace compute, and are of opset 20."""

import numpy as np
import pytest

from trtdiff.errors import BuildError
from trtdiff.passes.check_graph import check_graph
from trtdiff.passes.openvino_forms import openvino_forms

ir = pytest.importorskip("onnx_ir")

BLOCK = """<ir_version: 11, opset_import: ["": 23]>
net (float[N, 12, H, 8] x, float[12] w, float[12] c, float[8] s) => (float[N, 12, H, 8] y)
<float[N, 12, H, 8] n, float[N, 12, H, 8] l, float[N, 12, H, 8] g>
{ n = GroupNormalization <num_groups = 3, epsilon = 1e-6> (x, w, c)
  l = LayerNormalization (n, s)
  g = Gelu (l)
  y = Attention (g, n, x) }"""


def block():
    model = ir.from_onnx_text(BLOCK)
    for node in model.graph:
        node.name, node.metadata_props["module"] = f"net/{node.op_type}", "net.block"
    return model


def run(model, feeds):
    import onnx
    import onnxruntime as ort

    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]


def feeds():
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 12, 5, 8), "w": (12,), "c": (12,), "s": (8,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_the_block_computes_the_same_at_opset_20():
    model = block()
    openvino_forms(model)
    check_graph(model)
    assert model.graph.opset_imports == {"": 20}
    assert "Attention" not in {node.op_type for node in model.graph}
    assert np.abs(run(model, feeds()) - run(block(), feeds())).max() <= 1e-6  # measured 3e-7


def test_group_normalization_in_float64():
    model = ir.from_onnx_text("""<ir_version: 11, opset_import: ["": 23]>
        net (float[N, 12, H, W] x, float[12] w, float[12] c) => (float[N, 12, H, W] y)
        { y = GroupNormalization <num_groups = 3, epsilon = 1e-2> (x, w, c) }""")
    openvino_forms(model)
    given = {name: array for name, array in feeds().items() if name != "s"}
    exact = given["x"].astype(np.float64).reshape(2, 3, -1)
    exact = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-2)
    exact = exact.reshape(2, 12, 5, 8) * given["w"].reshape(-1, 1, 1) + given["c"].reshape(-1, 1, 1)
    assert np.abs(run(model, given) - exact).max() <= 2e-6


def test_what_opset_20_has_not_is_an_error_that_names_the_node():
    model = ir.from_onnx_text("""<ir_version: 11, opset_import: ["": 23]>
        net (float[N, 8] x, float[8] s) => (float[N, 8] y) { y = RMSNormalization (x, s) }""")
    model.graph[0].name = "net/RMSNormalization"
    with pytest.raises(BuildError, match="opset 20 has no such RMSNormalization") as caught:
        openvino_forms(model)
    assert "node RMSNormalization net/RMSNormalization" in caught.value.where
