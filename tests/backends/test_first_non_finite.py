"""A session names the layer where the first value that is not finite comes from, and says so where it cannot."""

import sys

import numpy as np
import pytest

from trtdiff.backends import backend
from trtdiff.backends.base import LooksInside
from trtdiff.backends.blame import first_non_finite
from trtdiff.backends.options import BuilderOptions
from trtdiff.errors import MissingDependency, UsageError
from trtdiff.lowered import write_graph
from trtdiff.lowering import named
from trtdiff.passes.half_precision import half_precision
from trtdiff.types import ShapeProfile

ir = pytest.importorskip("onnx_ir")
NET = """<ir_version: 11, opset_import: ["": 23]>
    net (float[n, 400] x) => (float[n, 400] y)
    <float[400, 400] weight, float[n, 400] a, float[n, 400] b>
    { a = MatMul (x, weight)
      b = Mul (a, a)
      y = Sqrt (b) }"""


@pytest.fixture(scope="module", params=["onnxruntime", "rounded"])
def engine(request, tmp_path_factory):
    """Weights of 640 kB in a file of their own: the identity, 300 times."""
    model = ir.from_onnx_text(NET)
    for node in model.graph:
        node.name = f"net.{node.outputs[0].name}/{node.op_type}"
        node.metadata_props["module"] = f"net.{node.outputs[0].name}"
    weight = model.graph[0].inputs[1]
    weight.const_value = ir.tensor(300 * np.eye(400, dtype=np.float32), name="weight")
    model.graph.register_initializer(weight)
    chosen = backend(request.param)
    if request.param == "rounded":
        half_precision(model, dtype="float16")
    for name, *options in map(str.split, chosen.passes):
        named(name)(model, **dict(option.split("=") for option in options))
    scratch, out = tmp_path_factory.mktemp("scratch"), tmp_path_factory.mktemp("engine")
    chosen.build(write_graph(model, scratch), ShapeProfile({}), BuilderOptions(), out, lambda done, total: None)
    assert (out / "weights.safetensors").stat().st_size > 300_000
    return chosen, out


@pytest.fixture
def session(engine):
    chosen, out = engine
    with chosen.load(out, threads=1) as session:
        yield session


def test_the_layer_is_named(engine, session):
    fine, large = (
        {"x": np.full((2, 400), value, np.float32)} for value in (0.5, {"rounded": 1}.get(engine[0].name, 1e18))
    )
    assert session.first_non_finite(fine) is None
    assert np.isfinite(session.run(fine)["y"]).all()
    assert np.isinf(session.run(large)["y"]).all()  # 300 squared is beyond fp16, 3e20 squared beyond float32
    place = session.first_non_finite(large)
    assert (place.node, place.module) == ("net.b/Mul", "net.b")
    assert first_non_finite(session, large) == "first in net.b (node net.b/Mul)"
    assert first_non_finite(session, fine) == "in no layer when it is run again"


def test_an_engine_is_left_as_it_was(engine, session):
    before = {file.name: file.read_bytes() for file in engine[1].iterdir()}
    session.first_non_finite({"x": np.ones((1, 400), np.float32)})
    assert {file.name: file.read_bytes() for file in engine[1].iterdir()} == before


def test_wrong_feeds_are_refused(session):
    with pytest.raises(UsageError, match="missing: x"):
        session.first_non_finite({})


def test_without_onnx_ir_the_message_says_so(session, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    feeds = {"x": np.full((1, 400), np.inf, np.float32)}
    with pytest.raises(MissingDependency, match="onnx-ir"):
        session.first_non_finite(feeds)
    said = first_non_finite(session, feeds)
    assert "not known" in said
    assert "trtdiff[compile]" in said


def test_a_session_that_cannot_look_inside_says_so():
    class Blind:
        def run(self, feeds):
            return dict(feeds)

    assert not isinstance(Blind(), LooksInside)
    assert first_non_finite(Blind(), {}) == "this backend cannot say in which layer first"


def test_a_failure_to_look_inside_does_not_take_the_place_of_what_it_explains():
    class Small:
        def first_non_finite(self, feeds):
            raise RuntimeError("bad allocation")

        def run(self, feeds):
            return dict(feeds)

    assert isinstance(Small(), LooksInside)
    assert first_non_finite(Small(), {}) == "in which layer first is not known: looking for it failed (bad allocation)"
