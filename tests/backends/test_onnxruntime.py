"""The session's promises: checks, memory, results in the caller's own buffers."""

import numpy as np
import pytest

from trtdiff.backends import BACKENDS, TARGETS, backend, best_target, target_backend
from trtdiff.backends.onnxruntime import OnnxRuntime
from trtdiff.backends.options import BuilderOptions
from trtdiff.errors import ArtefactError, BuildError, MissingDependency, TrtdiffError, UsageError
from trtdiff.types import ShapeProfile, TensorSpec

GRAPH = """<ir_version: 11, opset_import: ["": 23]>
toy (float[window, batch, 4, "height/8"] window, float[window, batch] coefficients, int64[batch] ids)
    => (float[batch, 4, "height/8"] latent, float[batch] total)
<int64[2] last = {2, 3}, int64[1] first = {0}>
{
    spread = Unsqueeze (coefficients, last)
    products = Mul (window, spread)
    latent = ReduceSum <keepdims = 0> (products, first)
    counted = Cast <to = 1> (ids)
    column = ReduceSum <keepdims = 0> (coefficients, first)
    total = Add (column, counted)
}"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    import onnx

    scratch, out = tmp_path_factory.mktemp("scratch"), tmp_path_factory.mktemp("engine")
    onnx.save(onnx.parser.parse_model(GRAPH), scratch / "graph.onnx")
    realised = backend("onnxruntime").build(
        scratch / "graph.onnx", ShapeProfile({}), BuilderOptions(), out, lambda done, total: None
    )
    assert realised["inputs"][1] == "coefficients: float32[window, batch]"
    assert list(scratch.iterdir()) == []
    return out


@pytest.fixture
def session(engine):
    with backend("onnxruntime").load(engine, threads=1) as session:
        yield session


def feeds(slots=3, batch=2, rows=5, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "window": rng.standard_normal((slots, batch, 4, rows)).astype(np.float32),
        "coefficients": rng.standard_normal((slots, batch)).astype(np.float32),
        "ids": np.arange(batch),
    }


def expected(arrays):
    latent = np.einsum("kb,kbch->bch", arrays["coefficients"].astype(np.float64), arrays["window"].astype(np.float64))
    return {"latent": latent, "total": arrays["coefficients"].sum(0) + arrays["ids"]}


def close(got, want):
    return all(np.abs(got[name] - want[name]).max() <= 1e-6 for name in want)


def test_the_contract_reads_back(session):
    assert session.inputs == (
        TensorSpec("window", "float32", ("window", "batch", 4, "height/8")),
        TensorSpec("coefficients", "float32", ("window", "batch")),
        TensorSpec("ids", "int64", ("batch",)),
    )
    assert session.outputs[0] == TensorSpec("latent", "float32", ("batch", 4, "height/8"))


def test_run_gives_new_arrays_by_name(session):
    arrays = feeds()
    got = session.run(arrays)
    assert list(got) == ["latent", "total"]
    assert close(got, expected(arrays))
    strided = {name: np.repeat(array, 2, axis=-1)[..., ::2] for name, array in arrays.items()}
    assert not strided["window"].flags.c_contiguous
    assert close(session.run(strided), expected(arrays))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: a.pop("ids"), "missing: ids"),
        (lambda a: a.update(extra=a["ids"]), "unknown: extra"),
        (lambda a: a.update(ids=a["ids"].astype(np.int32)), "ids is int32, the engine takes int64"),
        (lambda a: a.update(window=a["window"].astype(np.float64)), "window is float64, the engine takes float32"),
        (
            lambda a: a.update(window=a["window"][0]),
            r"window has shape \[2, 4, 5\], the engine takes window: float32\[window",
        ),
        (lambda a: a.update(window=a["window"][:, :, :3]), r"window has shape \[3, 2, 3, 5\]"),
        (lambda a: a.update(ids=np.arange(3)), r"ids has shape \[3\]: batch is 3, but 2 in window"),
    ],
)
def test_wrong_feeds_are_refused_in_words(session, change, says):
    arrays = feeds()
    change(arrays)
    with pytest.raises(UsageError, match=says) as caught:
        session.run(arrays)
    assert "toy" in caught.value.where


def test_allocated_memory_is_zeroed_aligned_and_of_its_own(session):
    for shape, dtype in (((3, 5, 7), "float32"), ((1,), "int64"), ((), "float32")):
        array = session.allocate(shape, dtype)
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.ctypes.data % 64 == 0
        assert not array.any()


def buffers(session, slots=3, batch=2, rows=5):
    sizes = {"window": slots, "batch": batch, "height": rows * 8}
    return {spec.name: session.allocate(spec.shape(sizes), spec.dtype) for spec in (*session.inputs, *session.outputs)}


def test_a_bound_call_reads_and_writes_the_callers_memory(session):
    memory = buffers(session)
    call = session.bind(memory)
    for seed in range(3):  # the same binding, new contents
        arrays = feeds(seed=seed)
        for name, array in arrays.items():
            memory[name][...] = array
        memory["latent"][...] = np.nan
        call()
        assert close(memory, expected(arrays))


def test_outputs_land_exactly_in_their_slots_of_a_log(session):
    """A window that slides over one array, and outputs right behind it: nothing else is touched."""
    log = session.allocate((12, 2, 4, 5), "float32")
    arrays = feeds()
    log[:3] = arrays["window"]
    memory = buffers(session) | {"window": log[0:3], "latent": log[3]}
    memory["coefficients"][...], memory["ids"][...] = arrays["coefficients"], arrays["ids"]
    first, second = session.bind(memory), session.bind(memory | {"window": log[1:4], "latent": log[4]})
    first()
    assert close({"latent": log[3]}, {"latent": expected(arrays)["latent"]})
    assert not log[4:].any()
    second()
    assert close({"latent": log[4]}, {"latent": expected(arrays | {"window": log[1:4]})["latent"]})
    assert not log[5:].any()


def test_a_bound_call_keeps_its_memory_alive(session):
    memory = buffers(session)
    memory["coefficients"][...] = 1
    latent = memory["latent"]
    call = session.bind(memory)
    memory["window"][...] = 1
    memory.clear()
    ballast = [np.full((3, 2, 4, 5), 7, np.float32) for _ in range(100)]  # would land in freed memory
    call()
    assert (latent == 3).all()
    assert len(ballast) == 100


def test_memory_with_gaps_is_refused(session):
    memory = buffers(session)
    memory["latent"] = session.allocate((2, 4, 10), "float32")[..., ::2]
    with pytest.raises(UsageError, match="latent is not contiguous"):
        session.bind(memory)


def test_a_wrong_output_buffer_is_refused(session):
    memory = buffers(session)
    memory["latent"] = session.allocate((2, 4, 6), "float32")
    with pytest.raises(UsageError, match=r"latent has shape .*: height is 48, but 40 in window"):
        session.bind(memory)


def test_a_failure_inside_is_one_of_ours(session, monkeypatch):
    monkeypatch.setattr(session._feeds, "check", lambda arrays: None)
    arrays = feeds()
    arrays["coefficients"] = np.ones((3, 5), np.float32)
    with pytest.raises(TrtdiffError, match="ONNX Runtime failed") as caught:
        session.run(arrays)
    assert "toy" in caught.value.where


def test_a_missing_or_damaged_engine(tmp_path):
    with pytest.raises(ArtefactError, match=r"model.onnx is missing"):
        OnnxRuntime().load(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"nonsense")
    with pytest.raises(ArtefactError, match="refuses the engine"):
        OnnxRuntime().load(tmp_path)


def test_a_graph_without_a_kernel_fails_when_it_is_built(tmp_path):
    import onnx

    scratch, out = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    out.mkdir()
    text = """<ir_version: 11, opset_import: ["": 23, "nowhere": 1]>
        g (float[n] x) => (float[n] y) { y = nowhere.Nothing (x) }"""
    onnx.save(onnx.parser.parse_model(text), scratch / "graph.onnx")
    with pytest.raises(BuildError, match="Nothing"):
        OnnxRuntime().build(scratch / "graph.onnx", ShapeProfile({}), BuilderOptions(), out, lambda done, total: None)


# --- the registry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_knows_its_name_and_extra(name):
    import tomllib
    from pathlib import Path

    made = backend(name)
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert made.name == name
    assert made.extra in extras
    assert made.memory(1000) >= 0
    assert name in TARGETS.values()


def test_unknown_names_list_the_known_ones():
    with pytest.raises(UsageError, match="no backend is called 'tvm'") as caught:
        backend("tvm")
    assert "onnxruntime" in caught.value.hint
    with pytest.raises(UsageError, match="no target is called 'tpu'") as caught:
        target_backend("tpu")
    assert "cpu" in caught.value.hint


def test_the_version_is_known_without_importing_the_library():
    import subprocess
    import sys

    import onnxruntime

    program = """import sys; from trtdiff.backends import target_backend
print(target_backend("cpu").toolchain().version); assert "onnxruntime" not in sys.modules"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == onnxruntime.__version__


def test_a_library_that_is_not_installed(monkeypatch, tmp_path):
    import sys
    from importlib import metadata

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("trtdiff.backends.onnxruntime.metadata.version", absent)
    with pytest.raises(MissingDependency) as caught:
        best_target()
    assert "trtdiff[cpu]" in caught.value.hint
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependency):
        OnnxRuntime().load(tmp_path)
