"""The backend for the GPU of this machine. Driver and library are doubles: this checks bookkeeping, not TensorRT."""

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest

from trtdiff.backends import backend, target_backend
from trtdiff.backends.gpu import Gpu, gpus, this_gpu
from trtdiff.backends.options import BuilderOptions
from trtdiff.backends.tensorrt_builder import apply_options
from trtdiff.errors import MissingDependency, UsageError

L4 = Gpu("NVIDIA L4", 89)
VERSION = "10.13.0.35"


class Driver:
    """CUDA's driver interface, with GPUs of compute capability 8.9."""

    def __init__(self, status=0, failing="cuInit", count=1):
        self.status, self.failing, self.count = status, failing, count

    def _end(self, call):
        return self.status if call == self.failing else 0

    def cuInit(self, flags):  # noqa: N802
        return self._end("cuInit")

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = self.count
        return self._end("cuDeviceGetCount")

    def cuDeviceGet(self, device, number):  # noqa: N802
        assert number < self.count
        return self._end("cuDeviceGet")

    def cuDeviceGetName(self, name, size, device):  # noqa: N802
        name.value = b"NVIDIA L4"
        return 0

    def cuDeviceGetAttribute(self, number, attribute, device):  # noqa: N802
        number._obj.value = {75: 8, 76: 9}[attribute]
        return 0


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr("trtdiff.backends.tensorrt.this_gpu", lambda: L4)
    monkeypatch.setattr("trtdiff.backends.tensorrt.installed", lambda names: {"tensorrt-cu13": VERSION})


def test_the_driver_is_asked_for_name_and_compute_capability():
    assert this_gpu(lambda name: Driver()) == L4
    assert L4.words == "NVIDIA L4 (sm89)"
    assert gpus(lambda name: Driver(count=2)) == (L4, L4)


def no_driver(name):
    raise OSError


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (no_driver, "no NVIDIA driver"),
        (lambda name: Driver(100), "no GPU that it may use"),
        (lambda name: Driver(count=0), "no GPU that it may use"),
        (lambda name: Driver(3, "cuDeviceGetCount"), "does not answer .error 3"),
        (lambda name: Driver(999), "does not answer .error 999"),
        (lambda name: Driver(3, "cuDeviceGet"), "does not answer .error 3"),
    ],
)
def test_no_driver_or_no_gpu_says_so_and_what_to_do(load, reason):
    with pytest.raises(MissingDependency, match=reason) as caught:
        this_gpu(load)
    assert "--target rtx:sm89" in caught.value.hint
    assert caught.value.exit_code == 5


def test_the_toolchain_is_the_version_and_the_gpu(on_a_gpu):
    tools = target_backend("tensorrt").toolchain()
    details = {"gpu": "NVIDIA L4", "packages": f"tensorrt-cu13 {VERSION}"}  # CUDA 12's and 13's are other libraries
    assert (tools.version, tools.device, tools.details) == (VERSION, "sm89", details)
    assert target_backend("tensorrt:sm89").toolchain() == tools
    with pytest.raises(UsageError, match="not sm90") as caught:
        target_backend("tensorrt:sm90").toolchain()
    assert "--target rtx:sm90" in caught.value.hint


def test_no_library_is_said_with_the_extra(on_a_gpu, monkeypatch):
    monkeypatch.setattr("trtdiff.backends.tensorrt.installed", lambda names: {})
    with pytest.raises(MissingDependency, match="TensorRT is not installed") as caught:
        backend("tensorrt").toolchain()
    assert "trtdiff[gpu]" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "module", "product", "extra"),
    [("tensorrt", "tensorrt", "TensorRT", "gpu"), ("tensorrt-rtx", "tensorrt_rtx", "tensorrt-rtx", "rtx")],
)
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "raise OSError('libcudart.so.13: cannot open shared object file')",
            "cannot be imported: libcudart.so.13: can",
        ),
        ("raise ImportError('libnvinfer.so.10: no such file')", "cannot be imported: libnvinfer.so.10: no such file"),
        ("import of_its_own_bindings", "cannot be imported: No module named 'of_its_own_bindings'"),
        (None, "is not installed"),
    ],
)
def test_a_broken_install_is_told_from_none(tmp_path, monkeypatch, name, module, product, extra, line, reason):
    monkeypatch.delitem(sys.modules, module, raising=False)
    if line is None:
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
    else:
        (tmp_path / f"{module}.py").write_text(line)
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependency) as caught:
        import_module(type(backend(name)).__module__)._import()
    assert caught.value.message.startswith(f"{product} is")
    assert reason in caught.value.message
    assert ("not installed" in caught.value.message) == (line is None)
    assert f"trtdiff[{extra}]" in caught.value.hint


@pytest.mark.parametrize(
    ("number", "reason"), [(75, "engines for other GPUs are built on sm80 and later, A GPU (sm75) is here"), (80, "")]
)
def test_hardware_compatible_is_refused_before_anything_is_built(on_a_gpu, monkeypatch, number, reason):
    monkeypatch.setattr("trtdiff.backends.tensorrt.this_gpu", lambda: Gpu("A GPU", number))
    assert backend("tensorrt").refusal("hardware_compatible") == reason
    assert backend("tensorrt").refusal("version_compatible") == ""


@pytest.mark.parametrize(
    ("number", "reason"), [(87, "sm87 has no float8; GPUs from sm89 on have it"), (89, ""), (90, "")]
)
def test_float8_is_refused_on_gpus_that_have_none(on_a_gpu, monkeypatch, number, reason):
    monkeypatch.setattr("trtdiff.backends.tensorrt.this_gpu", lambda: Gpu("A GPU", number))
    assert backend("tensorrt").impossible("of my own", frozenset({"float8"})) == reason
    assert backend("tensorrt").impossible("fp16") == ""


SPEC = {"backend_version": VERSION, "device": "sm89", "options": {}}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"backend_version": "10.12.0.1"}, f"built with TensorRT 10.12.0.1, {VERSION} is installed"),
        ({"backend_version": "10.9.0.1", "options": {"version_compatible": True}}, ""),
        ({"backend_version": "11.4.0.106", "options": {"version_compatible": True}}, "built with TensorRT 11.4.0.106"),
        ({"device": "sm90"}, "built for sm90, NVIDIA L4 (sm89) is here"),
        ({"device": "sm90", "options": {"hardware_compatible": True}}, ""),
        ({"device": "sm90", "options": {"version_compatible": True}}, "built for sm90"),
        ({"backend_version": "10.12.0.1", "options": {"hardware_compatible": True}}, "built with TensorRT 10.12.0.1"),
    ],
)
def test_engines_of_other_versions_and_gpus_are_refused_unless_built_for_it(on_a_gpu, changed, reason):
    found = backend("tensorrt").mismatch({**SPEC, **changed})
    assert reason in found
    assert bool(found) == bool(reason)


def test_hardware_compatible_engines_need_ampere(on_a_gpu, monkeypatch):
    monkeypatch.setattr("trtdiff.backends.tensorrt.this_gpu", lambda: Gpu("NVIDIA T4", 75))
    spec = {**SPEC, "options": {"hardware_compatible": True}}
    assert "NVIDIA T4 (sm75) is here" in backend("tensorrt").mismatch(spec)


def test_engines_do_not_run_yet(tmp_path):
    for name in ("tensorrt", "tensorrt-rtx"):
        with pytest.raises(MissingDependency, match="does not run them yet") as caught:
            backend(name).load(tmp_path)
        assert caught.value.message == backend(name).runnable()


# --- options, on a double that records -------------------------------------------------------------------------------


class Config(SimpleNamespace):
    def set_flag(self, flag):
        self.flags = [*getattr(self, "flags", []), flag]


LIBRARY = SimpleNamespace(
    __name__="tensorrt",
    __version__=VERSION,
    BuilderFlag=SimpleNamespace(VERSION_COMPATIBLE="vc"),
    HardwareCompatibilityLevel=SimpleNamespace(AMPERE_PLUS="ampere"),
)


def test_compatible_engines_are_asked_for_by_flag_and_level():
    config = Config()
    apply_options(LIBRARY, config, BuilderOptions(version_compatible=True, hardware_compatible=True))
    assert config == Config(flags=["vc"], hardware_compatibility_level="ampere")


def test_an_option_that_the_library_lacks_is_refused_by_name():
    with pytest.raises(UsageError, match=rf"tensorrt {VERSION} has no BuilderFlag\.WEIGHT_STREAMING") as caught:
        apply_options(LIBRARY, Config(), BuilderOptions(weight_streaming=True))
    assert caught.value.where == "--weight-streaming"
