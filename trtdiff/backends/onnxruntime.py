"""ONNX Runtime on the CPU: the backend that runs everywhere, and the reference the others are compared with.

An engine is the lowered graph itself, `model.onnx`, with its weights in one safetensors file beside it. ONNX Runtime
maps that file instead of reading it, and optimizes the graph when it opens it. (Its offline-optimized format was tried:
see `build`.)
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from trtdiff.backends.base import Progress, Toolchain
from trtdiff.backends.check import Contract
from trtdiff.backends.options import BuilderOptions
from trtdiff.digest import move
from trtdiff.errors import ArtefactError, BuildError, MissingDependency, TrtdiffError, UsageError
from trtdiff.machine import physical_cores
from trtdiff.passes.eight_bits import EightBits
from trtdiff.types import Array, ShapeProfile, TensorSpec

if TYPE_CHECKING:
    from trtdiff.passes.statistics import Place

MODEL = "model.onnx"
ALIGNMENT = 64
_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")
_TYPES = {"float": "float32", "double": "float64"}


class OnnxRuntime:
    """ONNX Runtime's CPU execution provider."""

    name = "onnxruntime"
    target = "cpu"
    extra = "cpu"
    device = "cpu"
    bases: tuple[str, ...] = ("float32",)
    formats: frozenset[EightBits] = frozenset({"int8", "float8"})
    sums = "matmul"
    fuses_attention = True  # by `cpu_forms`: one operator that works on blocks of rows
    keeps_graph = True
    passes: tuple[str, ...] = (
        "trtdiff.passes.transpose_weights:transpose_weights",
        "trtdiff.passes.cpu_forms:cpu_forms",
    )

    def __init__(self, device: str = "cpu") -> None:
        """Refuse any device but `cpu`."""
        if device != self.device:
            raise UsageError(f"target {self.target} takes no device {device!r}", where="--target",
                             hint=f"write --target {self.target}")  # fmt: skip

    def toolchain(self) -> Toolchain:
        """Read the installed version, without importing the library.

        The device is any CPU: no optimization that depends on its instruction set is stored in an engine.
        """
        for distribution in _DISTRIBUTIONS:
            try:
                return Toolchain(self.name, metadata.version(distribution), self.device)
            except metadata.PackageNotFoundError:
                continue
        raise _missing()

    def refusal(self, option: str) -> str:  # noqa: ARG002 - none of them
        """Refuse all: ONNX Runtime optimizes a graph when it opens it, and stores nothing."""
        return "ONNX Runtime compiles nothing ahead of time"

    def impossible(self, precision: str, formats: frozenset[str] = frozenset()) -> str:  # noqa: ARG002
        """Refuse none."""
        return ""

    def memory(self, weights: int) -> int:
        """Estimate the peak bytes of `build`, beyond what lowering the graph takes: it maps weights, copies none."""
        return 0 * weights

    def seconds(self, weights: int) -> float:
        """Estimate: it only opens the graph (measured: 0.5 s for 671 MB of weights)."""
        return 1 + weights / 2e9

    def build(
        self,
        graph: Path,
        profile: ShapeProfile,  # noqa: ARG002 - it takes any size
        options: BuilderOptions,  # noqa: ARG002 - it refuses all
        out: Path,
        progress: Progress,  # noqa: ARG002 - it takes no time
    ) -> Mapping[str, Any]:
        """Move the lowered graph and its weights into `out`, and let ONNX Runtime accept it without optimizing.

        Its offline-optimized format is not used: a start of a 3 M UNet takes 0.05 s of processor time instead of 0.20,
        one with 671 MB of weights 0.92 s instead of 1.03 (0.52 with packed weights, which double the file), but such a
        graph is laid out for the vector instructions of the machine that wrote it.
        """
        for file in sorted(graph.parent.iterdir()):
            move(file, out / (MODEL if file == graph else file.name))
        with self._open(out, threads=1, accept_only=True) as session:
            return {
                "inputs": [str(spec) for spec in session.inputs],
                "outputs": [str(spec) for spec in session.outputs],
            }

    def runnable(self) -> str:
        """Run wherever it is installed."""
        try:
            self.toolchain()
        except MissingDependency as error:
            return f"{error.message}; {error.hint}"
        return ""

    def mismatch(self, spec: Mapping[str, Any]) -> str:  # noqa: ARG002 - an engine is a graph
        """Accept engines of every version: they are ONNX graphs."""
        return ""

    def load(self, engine: Path, *, threads: int | None = None) -> "OnnxRuntimeSession":
        """Open an engine folder. `threads`: default one a physical core."""
        return self._open(engine, threads=threads or physical_cores())

    def _options(self, ort: Any, threads: int) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.force_spinning_stop", "1")  # idle sessions leave the cores alone
        return options

    def _open(self, engine: Path, *, threads: int, accept_only: bool = False) -> "OnnxRuntimeSession":
        ort = _import()
        model = engine / MODEL
        if not model.is_file():
            raise ArtefactError(
                f"no engine here: {MODEL} is missing", where=str(engine), hint="build again with --force"
            )
        options = self._options(ort, threads)
        options.log_severity_level = 3 if accept_only else 4  # whatever fails is raised as well
        if accept_only:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.add_session_config_entry("session.disable_prepacking", "1")
        try:
            inner = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # noqa: BLE001 - ONNX Runtime raises its own unrelated classes
            kind, hint = (BuildError, "") if accept_only else (ArtefactError, "build again with --force")
            raise kind(f"ONNX Runtime refuses the engine: {error}", where=str(model), hint=hint) from None
        where = f"engine {inner.get_modelmeta().graph_name or engine.parent.name}"

        def first_non_finite(feeds: Mapping[str, Array]) -> "Place | None":
            return _first_non_finite(model, self._options(ort, threads), feeds)

        return OnnxRuntimeSession(inner, where=where, first_non_finite=first_non_finite)


class OnnxRuntimeSession:
    """One opened engine."""

    def __init__(
        self, inner: Any, *, where: str, first_non_finite: Callable[[Mapping[str, Array]], "Place | None"]
    ) -> None:
        from onnxruntime.capi import _pybind_state as binding

        self._inner = inner._sess  # noqa: SLF001 - the wrapper around it costs more than the call itself
        self._wrapper = inner
        self._new_binding: Any = binding.SessionIOBinding
        self._value: Any = binding.OrtValue.ortvalue_from_numpy
        self._cpu = binding.OrtDevice(binding.OrtDevice.cpu(), binding.OrtDevice.default_memory(), 0)
        self._where = where
        self._first_non_finite = first_non_finite
        self.inputs: Sequence[TensorSpec] = tuple(map(_spec, inner.get_inputs()))
        self.outputs: Sequence[TensorSpec] = tuple(map(_spec, inner.get_outputs()))
        self._input_names = [spec.name for spec in self.inputs]
        self._output_names = [spec.name for spec in self.outputs]
        self._feeds = Contract(self.inputs, where=where)
        self._buffers = Contract((*self.inputs, *self.outputs), where=where, contiguous=True)

    def allocate(self, shape: Sequence[int], dtype: str) -> Array:
        """Zeroed memory, aligned to a cache line (64 bytes)."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        raw = np.zeros(size + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + size].view(dtype).reshape(shape)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Execute once; checks names, types and shapes, returns new arrays by output name."""
        self._feeds.check(feeds)
        contiguous = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        try:
            results = self._wrapper.run(self._output_names, contiguous)
        except Exception as error:  # noqa: BLE001 - ONNX Runtime raises its own unrelated classes
            raise self._failed(error) from None
        return dict(zip(self._output_names, results, strict=True))

    def bind(self, buffers: Mapping[str, Array]) -> Callable[[], None]:
        """Prepare one execution on exactly these buffers; the returned call keeps them alive and copies nothing."""
        self._buffers.check(buffers)
        value, cpu = self._value, self._cpu
        binding = self._new_binding(self._inner)
        for name in self._input_names:
            binding.bind_ortvalue_input(name, value(buffers[name], cpu))
        for name in self._output_names:
            binding.bind_ortvalue_output(name, value(buffers[name], cpu))
        alive = dict(buffers)  # an OrtValue made from a numpy array points to its memory and does not own it
        execute = self._inner.run_with_iobinding

        def call(_alive: dict[str, Array] = alive) -> None:
            try:
                execute(binding, None)
            except Exception as error:  # noqa: BLE001 - as above
                raise self._failed(error) from None

        return call

    def first_non_finite(self, feeds: Mapping[str, Array]) -> "Place | None":
        """Run the engine once more, with every value watched; see `LooksInside`. Takes the memory of a second session.

        Values are named as the engine's graph names them; what ONNX Runtime fuses when it opens the graph is computed
        in its parts where a part is watched.
        """
        self._feeds.check(feeds)
        return self._first_non_finite({name: np.ascontiguousarray(array) for name, array in feeds.items()})

    def _failed(self, error: Exception) -> TrtdiffError:
        text = str(error)
        hint = "use a smaller batch or image" if "alloc" in text.lower() else ""
        return TrtdiffError(f"ONNX Runtime failed: {text}", where=self._where, hint=hint)

    def close(self) -> None:
        """Free the engine. Calls that were bound before must not be used any more."""
        self._inner = self._wrapper = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _first_non_finite(model: Path, options: Any, feeds: Mapping[str, Array]) -> "Place | None":
    ort = _import()
    try:
        import onnx_ir as ir
    except ImportError:
        raise MissingDependency("onnx-ir is not installed", hint="pip install 'trtdiff[compile]'") from None
    from trtdiff.passes.flag_non_finite import flag_non_finite
    from trtdiff.passes.statistics import STATISTICS, amax

    graph = ir.load(model)
    places = flag_non_finite(graph)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(model.parent))
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED  # the usual order keeps every value until the end
    watched = ort.InferenceSession(ir.to_proto(graph).SerializeToString(), options, providers=["CPUExecutionProvider"])
    (statistics,) = watched.run([STATISTICS], feeds)
    finite = np.isfinite(amax(statistics))
    return None if finite.all() else places[int(np.argmin(finite))]


def _import() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise _missing() from None
    onnxruntime.disable_telemetry_events()
    return onnxruntime


def _missing() -> MissingDependency:
    return MissingDependency("onnxruntime is not installed", hint="pip install 'trtdiff[cpu]'")


def _spec(argument: Any) -> TensorSpec:
    element = argument.type.removeprefix("tensor(").removesuffix(")")
    dims = tuple("?" if dim is None else dim for dim in argument.shape)
    return TensorSpec(argument.name, _TYPES.get(element, element), dims)
