"""Weights keep their values when they are widened, and one tensor is in memory at a time."""

import json

import numpy as np
import pytest

from trtdiff.digest import file_digest
from trtdiff.errors import BuildError
from trtdiff.lowered import write_graph
from trtdiff.passes.widen_weights import widen_weights

ir = pytest.importorskip("onnx_ir")
DTYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16, "float32": ir.DataType.FLOAT}


def model_of(folder, tensors, *, cast=True, extra_use=False):
    """y = x + Σ weights, each read from one safetensors file, through a Cast."""
    from safetensors.numpy import save_file

    folder.mkdir()
    save_file(tensors, folder / "weights.safetensors")
    raw = (folder / "weights.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    value = ir.val("x", dtype=ir.DataType.FLOAT, shape=[4, 400])
    inputs, nodes, initializers = [value], [], []
    for name, array in tensors.items():
        begin, end = header[name]["data_offsets"]
        dtype = DTYPES[array.dtype.name]
        tensor = ir.ExternalTensor(
            "weights.safetensors",
            start + begin,
            end - begin,
            dtype,
            shape=ir.Shape(array.shape),
            name=name,
            base_dir=folder,
        )
        weight = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(dtype), const_value=tensor)
        initializers.append(weight)
        if cast:
            nodes.append(ir.node("Cast", [weight], {"to": 1}))
            weight = nodes[-1].outputs[0]
        nodes.append(ir.node("Add", [value, weight]))
        value = nodes[-1].outputs[0]
        if extra_use:
            nodes.append(ir.node("Shape", [initializers[-1]]))
    value.name, value.shape, value.type = "y", ir.Shape([4, 400]), ir.TensorType(ir.DataType.FLOAT)
    return ir.Model(
        ir.Graph(inputs, [value], nodes=nodes, initializers=initializers, opset_imports={"": 23}, name="sum"),
        ir_version=11,
    )


def outputs(folder, x):
    import onnxruntime as ort

    return ort.InferenceSession(str(folder / "graph.onnx"), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


def random(*shape, dtype=np.float16):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_casts_are_gone_and_values_are_the_same(tmp_path, dtype):
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    tensors = {"a": random(4, 400, dtype=kind), "b": random(400, dtype=kind), "small": random(1, dtype=kind)}
    if dtype == "bfloat16":
        pytest.importorskip("safetensors", minversion="0.5")
    model = model_of(tmp_path / "export", tensors)
    widen_weights(model)
    assert [node.op_type for node in model.graph] == ["Add"] * 3
    (tmp_path / "out").mkdir()
    write_graph(model, tmp_path / "out")
    x = random(4, 400, dtype=np.float32)
    want = x
    for array in tensors.values():
        want = want + array.astype(np.float32)
    assert np.array_equal(outputs(tmp_path / "out", x), want)


def test_the_file_is_safetensors_page_aligned_and_its_digest_is_known(tmp_path, monkeypatch):
    from safetensors.numpy import load_file

    tensors = {"a": random(4, 400), "b": random(400)}
    model = model_of(tmp_path / "export", tensors)
    widen_weights(model)
    (tmp_path / "out").mkdir()
    seen = []
    write_graph(model, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    path = tmp_path / "out/weights.safetensors"
    again = load_file(path)
    assert {name.removesuffix(".float32"): array.dtype for name, array in again.items()} == {
        "a": "float32",
        "b": "float32",
    }
    assert np.array_equal(again["a.float32"], tensors["a"].astype(np.float32))
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 4096 == 0
    assert seen == [(6400, 8000), (8000, 8000)]
    assert file_digest(path) == file_digest(path, fresh=True)


def test_an_initializer_with_another_use_stays(tmp_path):
    model = model_of(tmp_path / "export", {"a": random(4, 400)}, extra_use=True)
    widen_weights(model)
    assert {name: value.dtype.name for name, value in model.graph.initializers.items()} == {
        "a": "FLOAT16",
        "a.float32": "FLOAT",
    }


def test_untouched_weights_are_copied_whole(tmp_path):
    model = model_of(tmp_path / "export", {"a": random(4, 400, dtype=np.float32)}, cast=False)
    widen_weights(model)
    (tmp_path / "out").mkdir()
    write_graph(model, tmp_path / "out")
    assert (tmp_path / "out/weights.safetensors").read_bytes() == (tmp_path / "export/weights.safetensors").read_bytes()
    x = random(4, 400, dtype=np.float32)
    assert outputs(tmp_path / "out", x).shape == (4, 400)


def test_what_is_read_once_refers_to_weights_that_no_pass_touched(tmp_path):
    model = model_of(tmp_path / "export", {"w": random(4, 400, dtype=np.float32)}, cast=False)
    (tmp_path / "out").mkdir()
    write_graph(model, tmp_path / "out", keep=False)
    weights = tmp_path / "out/weights.safetensors"
    assert weights.is_symlink()
    assert weights.resolve() == (tmp_path / "export/weights.safetensors").resolve()


def test_what_is_read_once_has_the_weights_that_a_pass_changed(tmp_path):
    for keep in (True, False):
        model = model_of(tmp_path / f"export {keep}", {"w": random(4, 400)})
        widen_weights(model)
        (tmp_path / str(keep)).mkdir()
        write_graph(model, tmp_path / str(keep), keep=keep)
    once, kept = (tmp_path / f"{keep}/weights.safetensors" for keep in (False, True))
    assert not once.is_symlink()
    assert once.read_bytes() == kept.read_bytes()


def test_peak_memory_is_a_few_copies_of_one_tensor(tmp_path):
    import tracemalloc

    model = model_of(tmp_path / "export", {f"w{n}": random(4, 400) for n in range(2)})
    big = {f"w{n}": np.ones((1 << 20,), np.float16) for n in range(24)}  # 2 MB each, 4 MB wide
    model = model_of(tmp_path / "big", big)
    widen_weights(model)
    (tmp_path / "out").mkdir()
    tracemalloc.start()
    write_graph(model, tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * (4 << 20)  # measured 8.5 MB of the 96 MB that are written


def test_a_weight_file_that_is_too_short(tmp_path):
    model = model_of(tmp_path / "export", {"a": random(4, 400, dtype=np.float32), "b": random(4, 400)}, cast=False)
    with (tmp_path / "export/weights.safetensors").open("r+b") as file:
        file.truncate(1000)
    (tmp_path / "out").mkdir()
    with pytest.raises((BuildError, ValueError)):
        write_graph(model, tmp_path / "out")
