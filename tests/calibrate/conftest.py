"""A toy export whose denoiser has one layer of every kind, and the same network in float64."""

import json
from contextlib import contextmanager

import numpy as np
import pytest

RNG = np.random.default_rng(5)
WEIGHTS = {
    "kernel": RNG.standard_normal((8, 4, 3, 3)) * 0.3,
    "wq": RNG.standard_normal((8, 8)) * 0.5,
    "wk": RNG.standard_normal((8, 16)) * 0.5,
    "wv": RNG.standard_normal((8, 16)) * 0.5,
    "wo": RNG.standard_normal((8, 8)) * 0.5,
    "last": RNG.standard_normal((4, 8, 1, 1)) * 0.3,
}
WEIGHTS = {name: array.astype(np.float32) for name, array in WEIGHTS.items()}
DENOISER = """<ir_version: 11, opset_import: ["": 23]>
denoiser (float[batch, 4, "height/8", "width/8"] sample, float[batch] timestep,
          float[batch, tokens, 16] encoder_hidden_states)
      => (float[batch, 4, "height/8", "width/8"] prediction)
    <int64[3] flat = {0, 8, -1}, int64[4] split = {0, 0, 2, 4}, int64[3] joined = {0, 0, 8}, int64[3] ends = {1, 2, 3},
     float hundred = {100}>
    { drawn = Conv <pads = [1, 1, 1, 1]> (sample, kernel)
      pixels = Reshape (drawn, flat)
      rows = Transpose <perm = [0, 2, 1]> (pixels)
      wqt = Transpose (wq)
      wkt = Transpose (wk)
      wvt = Transpose (wv)
      wot = Transpose (wo)
      query = MatMul (rows, wqt)
      key = MatMul (encoder_hidden_states, wkt)
      value = MatMul (encoder_hidden_states, wvt)
      q1 = Reshape (query, split)
      k1 = Reshape (key, split)
      v1 = Reshape (value, split)
      q2 = Transpose <perm = [0, 2, 1, 3]> (q1)
      k2 = Transpose <perm = [0, 2, 1, 3]> (k1)
      v2 = Transpose <perm = [0, 2, 1, 3]> (v1)
      heads = Attention (q2, k2, v2)
      turned = Transpose <perm = [0, 2, 1, 3]> (heads)
      seen = Reshape (turned, joined)
      out = MatMul (seen, wot)
      both = Add (out, rows)
      back = Transpose <perm = [0, 2, 1]> (both)
      size = Shape (drawn)
      picture = Reshape (back, size)
      scaled = Div (timestep, hundred)
      spread = Unsqueeze (scaled, ends)
      late = Add (picture, spread)
      done = Conv (late, last)
      prediction = Tanh (done) }"""
MOVED = {"pixels", "rows", "q1", "k1", "v1", "q2", "k2", "v2", "turned", "seen", "back", "picture", "spread"}
"""Values that are another's numbers."""


def convolution(x, kernel):
    """Same padding for an odd kernel, in float64."""
    rows, columns = kernel.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (rows // 2,) * 2, (columns // 2,) * 2))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (rows, columns), axis=(2, 3))
    return np.einsum("bchwij,ocij->bohw", windows, kernel)


def attention(query, key, value):  # each [B, tokens, 8]: two heads
    query, key, value = (array.reshape(len(array), -1, 2, 4).swapaxes(1, 2) for array in (query, key, value))
    scores = query @ key.swapaxes(-1, -2) / 2
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ value


def network(feeds):
    """Every value of the denoiser, by name."""
    w = {name: array.astype(np.float64) for name, array in WEIGHTS.items()}
    v = {name: array.astype(np.float64) for name, array in feeds.items()}
    v["drawn"] = convolution(v["sample"], w["kernel"])
    v["rows"] = v["drawn"].reshape(*v["drawn"].shape[:2], -1).swapaxes(1, 2)
    v["query"] = v["rows"] @ w["wq"].T
    v["key"] = v["encoder_hidden_states"] @ w["wk"].T
    v["value"] = v["encoder_hidden_states"] @ w["wv"].T
    v["heads"] = attention(v["query"], v["key"], v["value"])
    v["seen"] = v["heads"].swapaxes(1, 2).reshape(v["rows"].shape)
    v["out"] = v["seen"] @ w["wo"].T
    v["both"] = v["out"] + v["rows"]
    v["scaled"] = v["timestep"] / 100
    v["late"] = v["both"].swapaxes(1, 2).reshape(v["drawn"].shape) + v["scaled"][:, None, None, None]
    v["done"] = convolution(v["late"], w["last"])
    v["prediction"] = np.tanh(v["done"])
    return v


LAYERS = {"drawn": "sample", "query": "rows", "key": "encoder_hidden_states", "value": "encoder_hidden_states",
          "out": "seen", "done": "late"}  # fmt: skip
"""Result of a layer with weights → its input."""


@pytest.fixture(scope="session")
def toy():
    """The network in float64, its weights, and the inputs of its layers."""
    from types import SimpleNamespace

    return SimpleNamespace(
        network=network, weights=WEIGHTS, layers=LAYERS, moved=MOVED, convolution=convolution, attention=attention
    )


def write_denoiser(path, weights=WEIGHTS):
    import onnx_ir as ir

    from trtdiff.export.graph import write_graph

    model = ir.from_onnx_text(DENOISER)
    for node in model.graph:
        node.name = f"blocks.{node.outputs[0].name}/{node.op_type}"
        node.metadata_props["module"] = f"blocks.{node.outputs[0].name}"
        for value in node.inputs:
            if value is not None and value.name in weights and not value.is_initializer():
                value.const_value = ir.tensor(weights[value.name], name=value.name)
                value.shape = value.const_value.shape
                model.graph.register_initializer(value)
    write_graph(model, path)


@pytest.fixture(scope="session")
def toy_maker(export_maker):
    """`toy_maker(folder, weights)` writes the export; weights by default are those of the float64 network."""

    def make(folder, weights=WEIGHTS):
        import tokenizers

        from trtdiff.digest import file_digest

        export_maker(folder)
        words = ["!", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
        made = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>")
        )
        made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
        made.save(str(folder / "tokenizers/tokenizer.json"))
        write_denoiser(folder / "denoiser.onnx", weights)
        about = json.loads((folder / "export.json").read_text())
        about["tokenizer_sha256"]["tokenizer"] = file_digest(folder / "tokenizers/tokenizer.json")
        for component in about["components"]:
            if component["name"] == "denoiser":
                component["graph_sha256"] = file_digest(folder / "denoiser.onnx")
        (folder / "export.json").write_text(json.dumps(about))
        return folder

    return make


@pytest.fixture(scope="session")
def toy_export(toy_maker, tmp_path_factory):
    """The export, whose native size is 64 by 64 pixels. Tests do not change it."""
    return toy_maker(tmp_path_factory.mktemp("exports") / "toy")


FEW = {"samples": 8, "steps": 8, "bands": 4, "prompts": ["a", "bc", "def"], "negative": "x", "guidance": 3.0}
"""Settings of a calibration that takes a second."""


@pytest.fixture(scope="session")
def few():
    return dict(FEW)


@contextmanager
def _edited(file):
    """Give the float32 tensors of a safetensors file by name, to change where they lie; offsets stay as they were."""
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    view = memoryview(raw)[start:]
    yield {
        name: np.frombuffer(view[slice(*about["data_offsets"])], np.float32).reshape(about["shape"])
        for name, about in header.items()
    }
    file.write_bytes(raw)


@pytest.fixture(scope="session")
def edited():
    """`with edited(file) as tensors:` changes weights of an export, which refers to them by offset."""
    return _edited
