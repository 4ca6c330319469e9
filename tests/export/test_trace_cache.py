"""Graphs that were traced before."""

import dataclasses
import json
import os
import shutil

import pytest

from trtdiff.checkpoint import Checkpoint
from trtdiff.export import trace as tracing
from trtdiff.export import trace_cache
from trtdiff.export.export import export_checkpoint
from trtdiff.export.folder import export_code
from trtdiff.families import family
from trtdiff.families.base import ComponentSpec
from trtdiff.types import TensorSpec

pytest.importorskip("diffusers")
SPEC = ComponentSpec(
    name="toy", folder="toy", inputs=(TensorSpec("x", "float32", ("n",)),),
    outputs=(TensorSpec("y", "float32", ("n",)),), build=dict, prefix="toy",
)  # fmt: skip


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache that is this test's alone: its folder of graphs."""
    monkeypatch.setenv("TRTDIFF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/graphs"


@pytest.fixture
def traced(monkeypatch):
    """The names of the components that were traced."""
    seen, real = [], tracing.trace

    def noted(spec, config):
        seen.append(spec.name)
        return real(spec, config)

    monkeypatch.setattr(tracing, "trace", noted)
    return seen


@pytest.fixture
def export(tiny_checkpoint, tmp_path):
    """`export(name, checkpoint, force=True)` exports the text encoder."""

    def make(name, checkpoint=tiny_checkpoint, **options):
        return export_checkpoint(
            Checkpoint.open(str(checkpoint)), tmp_path / name, components=["text_encoder"],
            **{"check": False, **options},
        )  # fmt: skip

    return make


def test_the_second_export_is_not_traced_and_has_the_same_bytes(cache, traced, export):
    first, second = export("first"), export("second")
    assert traced == ["text_encoder"]
    assert (first.reports["text_encoder"].traced, second.reports["text_encoder"].traced) == (True, False)
    assert [(made.folder / "text_encoder.onnx").read_bytes() for made in (first, second)] == [
        (first.folder / "text_encoder.onnx").read_bytes()
    ] * 2
    assert len(list(cache.glob("*.onnx"))) == 1


def test_other_weights_of_the_same_configs_share_a_graph(cache, traced, export, tiny_checkpoint, tmp_path):
    """And are compared with PyTorch nevertheless."""
    from safetensors.numpy import load_file, save_file

    export("first")
    tuned = shutil.copytree(tiny_checkpoint, tmp_path / "tuned")
    file = tuned / "text_encoder/model.safetensors"
    save_file({name: array * 1.5 if array.dtype.kind == "f" else array for name, array in load_file(file).items()},
              file, metadata={"format": "pt"})  # fmt: skip
    config = json.loads((tuned / "text_encoder/config.json").read_text())
    (tuned / "text_encoder/config.json").write_text(json.dumps({**config, "_name_or_path": "elsewhere"}))
    second = export("second", tuned, dtype="float16", check=True)
    alone = export("alone", tuned, dtype="float16", force=True)
    assert traced == ["text_encoder"] * 2
    assert all(error < 1e-4 for point in second.reports["text_encoder"].checks for error in point.relative_l2.values())
    assert (second.folder / "text_encoder.onnx").read_bytes() == (alone.folder / "text_encoder.onnx").read_bytes()


def test_another_config_code_or_contract_is_another_graph(cache, tiny_checkpoint):
    known = family("stable-diffusion")
    configs = Checkpoint.open(str(tiny_checkpoint)).configs
    spec = next(spec for spec in known.components(configs) if spec.name == "text_encoder")
    config, code = configs["text_encoder"], export_code(known)
    key = trace_cache._key(spec, config, code)
    assert key == trace_cache._key(spec, {**config, "transformers_version": "0"}, code)
    others = {
        trace_cache._key(spec, {**config, "hidden_act": "gelu"}, code),
        trace_cache._key(spec, config, "other"),
        trace_cache._key(dataclasses.replace(spec, inputs=spec.inputs[:1]), config, code),
        trace_cache._key(dataclasses.replace(spec, build=lambda config: None), config, code),
    }
    assert len(others | {key}) == 5


# --- with a graph of one node ----------------------------------------------------------------------------------------


@pytest.fixture
def toy():
    """`toy()` asks for the graph of a component of one node: whether it was there; `toy.model` is the last answer."""
    import onnx_ir as ir

    def make():
        model = ir.from_onnx_text(
            '<ir_version: 11, opset_import: ["": 23]> toy (float[n] x) => (float[n] y) { y = Add (x, w) }'
        )
        weight = next(iter(model.graph)).inputs[1]
        weight.shape, weight.dtype = ir.Shape([1]), ir.DataType.FLOAT16
        model.graph.initializers.add(weight)
        return model

    def ask(**options) -> bool:
        ask.model, found = trace_cache.traced_before(SPEC, {}, "code", make, **options)
        return found

    return ask


def test_weights_have_no_value_wherever_the_graph_comes_from(cache, toy):
    assert [toy(), toy(), toy(fresh=True)] == [False, True, False]
    toy()
    (weight,) = toy.model.graph.initializers.values()
    assert (weight.name, weight.const_value, weight.dtype.name, list(weight.shape)) == ("w", None, "FLOAT16", [1])


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_graph_is_made_anew(damage, cache, toy):
    toy()
    (file,) = cache.glob("*.onnx")
    raw = bytearray(file.read_bytes())
    raw[-2] ^= 1
    file.write_bytes({"cut": raw[:-9], "flipped": raw, "empty": b""}[damage])
    assert [toy(), toy()] == [False, True]


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path, monkeypatch, toy):
    (tmp_path / "cache").write_text("a file, where a folder should be")
    monkeypatch.setenv("TRTDIFF_CACHE", str(tmp_path / "cache"))
    assert [toy(), toy()] == [False, False]


def test_only_the_latest_graphs_are_kept(cache, monkeypatch, toy):
    monkeypatch.setattr(trace_cache, "KEPT", 2)
    cache.mkdir(parents=True)
    for when, name in enumerate(("older", "old")):
        (cache / f"{name}.onnx").touch()
        os.utime(cache / f"{name}.onnx", (when, when))
    toy()
    assert (cache / "old.onnx").exists()
    assert not (cache / "older.onnx").exists()
    assert toy()
