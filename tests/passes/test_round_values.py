"""Half precision made visible on a CPU: each value is rounded where it is stored, and what overflows is infinite."""

import ml_dtypes
import numpy as np
import pytest

from trtdiff.errors import BuildError
from trtdiff.lowered import write_graph
from trtdiff.passes.half_precision import half_precision
from trtdiff.passes.mark_islands import mark_islands
from trtdiff.passes.round_values import round_values

ir = pytest.importorskip("onnx_ir")
HALF = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
WEIGHT = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)


def run(folder, body, feeds, *, dtype="float16", keep=(), rounding=True):
    import onnxruntime as ort

    inputs = ", ".join(f"float[{', '.join(map(str, array.shape))}] {name}" for name, array in feeds.items())
    model = ir.from_onnx_text(
        f'<ir_version: 11, opset_import: ["": 23]>\nnet ({inputs}) => (float[a, b] y) {{ {body} }}'
    )
    for node in model.graph:
        node.outputs[0].dtype = ir.DataType.FLOAT
        node.metadata_props["module"] = node.outputs[0].name
    mark_islands(model, dtype=dtype, patterns=dict.fromkeys(keep, ""), ranges={})
    half_precision(model, dtype=dtype)
    if rounding:
        round_values(model)
    folder.mkdir(exist_ok=True)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    path = str(write_graph(model, folder))
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]


@pytest.mark.parametrize("dtype", HALF)
def test_every_step_is_rounded_as_numpy_rounds(tmp_path, dtype):
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((3, 4)).astype(np.float32), WEIGHT
    got = run(tmp_path, "a = MatMul (x, w)  b = Exp (a)  y = Sub (b, x)", {"x": x, "w": w}, dtype=dtype)

    def half(array):
        return array.astype(HALF[dtype]).astype(np.float32)

    product = half(half(x).astype(np.float64) @ half(w).astype(np.float64))
    expected = half(half(np.exp(product)) - half(x))
    np.testing.assert_allclose(got, expected, rtol=2 * float(ml_dtypes.finfo(HALF[dtype]).eps))
    assert np.abs(got - (np.exp(x @ w) - x)).max() > 1e-4  # and it is not what float32 gives


def test_an_overflow_between_two_nodes_shows(tmp_path):
    x = np.full((1, 4), 300, np.float32)
    body = "big = Mul (x, x)  y = Sqrt (big)"
    assert np.isinf(run(tmp_path / "a", body, {"x": x})).all()  # 90,000 is beyond 65,504
    np.testing.assert_array_equal(run(tmp_path / "b", body, {"x": x}, keep=("big", "y")), x)
    np.testing.assert_allclose(run(tmp_path / "c", body, {"x": x}, dtype="bfloat16"), x, rtol=2**-7)


def test_what_is_too_small_is_lost_as_it_would_be(tmp_path):
    x = np.full((1, 4), 1e-5, np.float32)
    body = "small = Mul (x, x)  y = Sqrt (small)"
    assert not run(tmp_path / "a", body, {"x": x}).any()
    np.testing.assert_allclose(run(tmp_path / "b", body, {"x": x}, dtype="bfloat16"), x, rtol=2**-7)


@pytest.mark.parametrize("place", ["input", "output"])
def test_an_input_or_output_in_half_precision_is_refused(place):
    kinds = {"input": ("float16", "float"), "output": ("float", "float16")}[place]
    model = ir.from_onnx_text(f"""<ir_version: 11, opset_import: ["": 23]>
        net ({kinds[0]}[n] x) => ({kinds[1]}[n] y) {{ y = Cast <to = {10 if place == "output" else 1}> (x) }}""")
    with pytest.raises(BuildError, match=f"{'x' if place == 'input' else 'y'} is float16 outside") as caught:
        round_values(model)
    assert "half_precision" in caught.value.hint
