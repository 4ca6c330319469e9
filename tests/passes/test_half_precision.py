"""The graph that computes in half precision: what is cast, what stays, and that every node type-checks."""

import json

import numpy as np
import pytest

from trtdiff.errors import BuildError
from trtdiff.lowered import write_graph
from trtdiff.passes.half_precision import half_precision
from trtdiff.passes.mark_islands import mark_islands

ir = pytest.importorskip("onnx_ir")
onnx = pytest.importorskip("onnx")

NETWORK = """
    hidden = Cast <to = 1> (w)
    rate = Cast <to = 1> (r)
    angle = Mul (timestep, rate)
    wave = Sin (angle)
    row = MatMul (wave, hidden)
    mixed = Add (x, row)
    y = Tanh (mixed)
"""
MODULES = {"angle": "time_proj", "wave": "time_proj", "row": "time_embedding", "mixed": "block.0", "y": "block.1"}


def make(folder, body, inputs, *, weights=None, outputs="float[n, 4] y", modules=MODULES):
    """A model from ONNX text, its weights in a safetensors file, its nodes with the modules they came from."""
    from safetensors.numpy import save_file

    model = ir.from_onnx_text(f'<ir_version: 11, opset_import: ["": 23]>\nnet ({inputs}) => ({outputs}) {{ {body} }}')
    folder.mkdir(exist_ok=True)
    if weights:
        save_file(weights, folder / "w.safetensors")
        raw = (folder / "w.safetensors").read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        kinds = {"F16": ir.DataType.FLOAT16, "F32": ir.DataType.FLOAT, "BF16": ir.DataType.BFLOAT16}
        for value in [value for node in model.graph for value in node.inputs if value and value.name in weights]:
            entry = header[value.name]
            begin, end = entry["data_offsets"]
            value.const_value = ir.ExternalTensor(
                "w.safetensors", start + begin, end - begin, kinds[entry["dtype"]],
                shape=ir.Shape(entry["shape"]), name=value.name, base_dir=folder,
            )  # fmt: skip
            value.dtype, value.shape = kinds[entry["dtype"]], ir.Shape(entry["shape"])
            if value.name not in model.graph.initializers:
                model.graph.register_initializer(value)
    for node in model.graph:
        for value in node.outputs:
            if value.dtype is None:
                value.dtype = ir.DataType.FLOAT
        node.metadata_props["module"] = modules.get(node.outputs[0].name, "")
        node.name = node.outputs[0].name
    return model


def kept(model, *patterns, dtype="float16"):
    """Mark islands by module, and the waves; gives what was marked."""
    return mark_islands(model, dtype=dtype, patterns=dict.fromkeys(patterns, "asked for"), ranges={})


def written(model, folder):
    """Write it, and let onnx check every node's types. Gives path and model."""
    folder.mkdir()
    path = write_graph(model, folder)
    onnx.checker.check_model(str(path), full_check=True)
    return path, onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False), strict_mode=True)


def types(model):
    values = [*model.graph.value_info, *model.graph.output, *model.graph.input]
    return {value.name: onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type) for value in values}


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    return {"w": rng.standard_normal((4, 4)).astype(np.float16), "r": np.ones(4, np.float16)}


def network(folder, weights):
    return make(folder, NETWORK, "float[n, 4] x, float[n, 1] timestep", weights=weights)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_everything_but_the_timestep_s_waves_is_half(tmp_path, weights, dtype):
    model = network(tmp_path / "in", weights)
    kept(model, dtype=dtype)
    half_precision(model, dtype=dtype)
    _, model = written(model, tmp_path / "out")
    found = types(model)
    assert {name: found[name] for name in ("x", "timestep", "y")} == dict.fromkeys(("x", "timestep", "y"), "FLOAT")
    assert {found[name] for name in ("angle", "wave")} == {"FLOAT"}
    assert {found[name] for name in ("row", "mixed")} == {dtype.upper()}


def test_stored_halves_are_read_as_they_lie_and_others_are_converted(tmp_path, weights):
    model = network(tmp_path / "in", weights)
    kept(model)
    half_precision(model, dtype="float16")
    path, onnx_model = written(model, tmp_path / "out")
    assert [tensor.name for tensor in onnx_model.graph.initializer] == ["w", "r"]  # r for the waves, in float32
    full = {"w": weights["w"].astype(np.float32) * 1.0001, "r": weights["r"].astype(np.float32)}
    body = NETWORK.replace("hidden = Cast <to = 1> (w)\n", "").replace("rate = Cast <to = 1> (r)\n", "")
    body = body.replace("hidden", "w").replace("rate", "r")
    model = make(tmp_path / "full", body, "float[n, 4] x, float[n, 1] timestep", weights=full)
    kept(model)
    half_precision(model, dtype="float16")
    path, onnx_model = written(model, tmp_path / "out2")
    (converted,) = [tensor for tensor in onnx_model.graph.initializer if tensor.name != "r"]
    loaded = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    np.testing.assert_array_equal(loaded[converted.name], full["w"].astype(np.float16))


def test_kept_modules_stay_in_float32_and_neighbours_share_their_casts(tmp_path, weights):
    model = network(tmp_path / "in", weights)
    kept(model, "block.*", "time_embedding")
    half_precision(model)
    _, model = written(model, tmp_path / "out")
    found = types(model)
    assert {found[name] for name in ("angle", "wave", "row", "mixed", "y")} == {"FLOAT"}
    assert [node.output[0] for node in model.graph.node if node.op_type == "Cast"] == ["hidden", "rate"]


def test_a_value_is_cast_once_for_all_its_readers_and_never_back_and_forth(tmp_path):
    body = "a = Tanh (x)  b = Exp (a)  c = Neg (a)  d = Add (b, c)  e = Mul (d, a)  y = Abs (e)"
    model = make(tmp_path / "in", body, "float[n, 4] x", modules={"b": "island.1", "c": "island.2", "d": "island.3"})
    kept(model, "island.*")
    half_precision(model)
    _, model = written(model, tmp_path / "out")
    casts = [(node.input[0], node.output[0]) for node in model.graph.node if node.op_type == "Cast"]
    # down into half: x, d; up into the island: a; and the output
    assert sorted(source for source, _ in casts) == ["a", "d", "x", "y/float16"]


def test_what_only_float32_may_be_stays_so(tmp_path):
    """The scales of a Resize are float32 by definition, whatever is resized."""
    body = 'y = Resize <mode = "nearest"> (x, , scales)'
    model = make(tmp_path / "in", body, "float[1, 1, 2, 2] x, float[4] scales", outputs="float[1, 1, h, w] y")
    half_precision(model)
    _, model = written(model, tmp_path / "out")
    (resize,) = [node for node in model.graph.node if node.op_type == "Resize"]
    assert types(model)[resize.input[0]] == "FLOAT16"
    assert resize.input[2] == "scales"


def test_a_weight_beyond_the_range_is_an_error_that_names_it_and_an_infinity_is_not(tmp_path):
    body = "hidden = Cast <to = 1> (w)  y = Add (x, hidden)"
    for value, fits in ((7e4, False), (-7e4, False), (-np.inf, True), (6.5e4, True)):
        weights = {"w": np.full((300, 4), value, np.float32)}
        model = make(tmp_path / "in", body, "float[300, 4] x", weights=weights, outputs="float[300, 4] y")
        half_precision(model)
        folder = tmp_path / f"out{value}"
        if fits:
            written(model, folder)
            continue
        folder.mkdir()
        with pytest.raises(BuildError, match="float16 ends at") as caught:
            write_graph(model, folder)
        assert "weight w" in caught.value.where


def test_constants_that_nodes_hold_are_rounded_or_cast(tmp_path):
    body = (
        "c = Constant <value_float = 2.0> ()  d = Constant <value = float[2] {1, 3}> ()  e = Mul (x, c)  y = Add (e, d)"
    )
    model = make(tmp_path / "in", body, "float[n, 2] x", outputs="float[n, 2] y")
    half_precision(model)
    _, model = written(model, tmp_path / "out")
    found = types(model)
    assert (found["c"], found["d"], found["e"]) == ("FLOAT", "FLOAT16", "FLOAT16")
