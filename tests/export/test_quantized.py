"""Weights that another library has quantized are no weights, and are refused."""

from pathlib import Path

import pytest

from trtdiff.errors import CheckpointError
from trtdiff.export.quantized import refuse_integers
from trtdiff.export.safetensors_index import TensorRef

ir = pytest.importorskip("onnx_ir")


def _model():
    """A graph with a float weight and integers of its own."""
    model = ir.from_onnx_text(
        '<ir_version: 11, opset_import: ["": 23]> g (float[1, 4] x) => (float[1, 4] y) { y = MatMul (x, linear) }'
    )
    for name, dtype, shape in (("linear", ir.DataType.FLOAT, [4, 4]), ("position_ids", ir.DataType.INT64, [1, 7])):
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        model.graph.initializers[name] = value
    return model


def _ref(dtype, shape):
    return TensorRef(Path("unet/weights.safetensors"), dtype, shape, 0, 1)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool", "int64"])
def test_integers_where_a_graph_computes_with_floats_are_refused(dtype):
    tensors = {"linear": _ref(dtype, (4, 4)), "position_ids": _ref("int64", (1, 7))}
    with pytest.raises(CheckpointError, match=f"1 weights are stored as {dtype}, not as floats: linear") as caught:
        refuse_integers(_model(), tensors)
    assert caught.value.where == "unet/weights.safetensors"
    assert "16 or 32 bits" in caught.value.hint


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_floats_and_integers_of_the_graph_are_taken(dtype):
    refuse_integers(_model(), {"linear": _ref(dtype, (4, 4)), "position_ids": _ref("int64", (1, 7))})


def test_a_checkpoint_with_integer_weights_is_refused(tiny_checkpoint, tmp_path):
    import shutil

    import numpy as np
    from safetensors.numpy import load_file, save_file

    from trtdiff.checkpoint import Checkpoint
    from trtdiff.export.export import export_checkpoint

    folder = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    file = folder / "vae/diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["decoder.conv_in.weight"] = np.ones(weights["decoder.conv_in.weight"].shape, np.int8)
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=r"stored as int8, not as floats: decoder\.conv_in"):
        export_checkpoint(Checkpoint.open(str(folder)), tmp_path / "out", components=["vae_decoder"], check=False)
    assert not (tmp_path / "out").exists()
