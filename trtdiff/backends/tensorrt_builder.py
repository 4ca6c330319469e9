"""Compile a graph with TensorRT's Python API: what the backends `tensorrt-rtx` and `tensorrt` share.

Both libraries are one API under two module names. The network is strongly typed: types stand in the graph, and nowhere
else. TensorRT 10.13 and later, 11, and TensorRT for RTX go one way; where they differ, the module is asked what it has.

Polygraphy's loaders speak to either library too, but choose it for the whole process by an environment variable, hold
the plan in memory, and raise without the node; its tools for ONNX add nothing to what `passes` has. It is not used.
"""

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from trtdiff.backends.attention import mark_decomposable
from trtdiff.backends.mapped_files import dropping_pages
from trtdiff.backends.options import BuilderOptions, flag
from trtdiff.backends.tensorrt_failures import Graph, failed, refused
from trtdiff.backends.tensorrt_layers import (
    ANNOUNCED,
    Layer,
    inspected_layers,
    read_layers,
    summed_up,
    with_modules,
    write_layers_file,
)
from trtdiff.backends.tensorrt_precision import compared
from trtdiff.backends.tensorrt_progress import Told, monitor
from trtdiff.backends.tensorrt_quantized import quantized
from trtdiff.backends.timing_cache import Key, keep_times, use_times
from trtdiff.errors import BuildError, StorageError, TrtdiffError, UsageError
from trtdiff.lowered import read_graph
from trtdiff.passes.decompose_attention import ALL, decompose_attention
from trtdiff.types import ShapeProfile, dim_value

PLAN = "engine.plan"
"""The compiled engine's file."""
_WARNINGS = 20
"""How many warnings of the compiler a manifest keeps."""


@dataclass
class Log:
    """What the compiler said: errors, warnings, and the layers it listed; and what we say ourselves."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    announced: int = 0
    """How many layers it listed; all of them are in `layers` where their lines could be read."""
    remarks: list[str] = field(default_factory=list)
    """What there is to say besides."""

    def take(self, severity: str, text: str) -> None:
        """Keep one message; `severity` is the library's name of it."""
        if "ERROR" in severity:
            self.errors.append(text)
        elif severity == "WARNING":
            self.warnings.append(text)
        elif ANNOUNCED in text:
            self.announced += text.count(ANNOUNCED)
            self.layers += read_layers(text)


def compile_graph(
    trt: Any,
    graph: Path,
    profile: ShapeProfile,
    options: BuilderOptions,
    out: Path,
    *,
    progress: Callable[[int, int], None],
    shares: Mapping[str, float],
    configure: Callable[[Any], None] = lambda config: None,  # noqa: ARG005
    times: Key | None = None,
) -> Mapping[str, Any]:
    """Parse the ONNX file, build it, write `out`/engine.plan and `out`/layers.json; returns what was realised.

    `trt` is the library's module. `shares` are how much its phases, the weights that it has `read` and the plan that is
    `written` count as progress. `configure` sets what the backends differ in, on the builder's config; `times` is
    what a timing cache is kept for. Raises BuildError with the node, its PyTorch module, types and shapes where the
    library names one; StorageError for a full disk; UsageError for an option that the library does not have; whatever
    `progress` raises, once the library has stopped.
    """
    log = Log()
    logger = _logger(trt)
    logger.listener = log
    builder = trt.Builder(logger)
    network = builder.create_network(_strongly_typed(trt))
    graph = _parse(trt, graph, network, logger)
    mark_decomposable(trt, network)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.clear_flag(trt.BuilderFlag.TF32)  # float32 islands are there for their precision
    apply_options(trt, config, options)
    configure(config)
    measured = None
    if options.timing_cache is not None and times is not None:
        measured = use_times(config, options.timing_cache, times)
    config.add_optimization_profile(_profile(builder, network, graph, profile))
    told = Told(progress, shares)
    watch = config.progress_monitor = monitor(trt, told, "phases")  # noqa: F841 - the library does not keep it alive
    weights = max(1, sum(file.stat().st_size for file in graph.parent.iterdir()))
    writer = _plan_writer(trt, out / PLAN, lambda size: told.tell("written", size / weights))
    with dropping_pages(graph.parent, lambda size: told.tell("read", size / weights)):
        built = _write_plan(builder, network, config, writer)
    if told.problem is not None:
        raise told.problem
    if writer.problem is not None:
        raise StorageError(f"the engine could not be written: {writer.problem.strerror}", where=str(writer.path),
                           hint="free some space or choose another folder with --store")  # fmt: skip
    if not built:
        raise failed(graph, log.errors)
    told.finish()
    if options.timing_cache is not None and times is not None:
        try:
            keep_times(config, measured, options.timing_cache, times)
        except Exception as error:  # noqa: BLE001 - the engine is there, and costs more than the times
            log.remarks.append(f"the measured times were not kept: {_line(error)}")
    return {"plan_bytes": writer.size, **_realised(trt, logger, graph, out, profile)}


def peak_memory(weights: int) -> int:
    """Estimate the peak bytes of a build with so many bytes of weights: two copies in half precision, and the library.

    Of what `scripts/bench_rtx.py` measures, the whole worker's estimate is 2 to 8 % above for UNets.
    """
    return int(300e6 + 1.05 * weights)


def apply_options(trt: Any, config: Any, options: BuilderOptions) -> None:
    """Set what was asked for on a builder's config. Raises UsageError for what the library does not have."""
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace)
    for option in ("weight_streaming", "version_compatible"):
        if getattr(options, option):
            config.set_flag(_member(trt, "BuilderFlag", option.upper(), option))
    if options.hardware_compatible:
        config.hardware_compatibility_level = _member(
            trt, "HardwareCompatibilityLevel", "AMPERE_PLUS", "hardware_compatible"
        )


def _member(trt: Any, kind: str, name: str, option: str) -> Any:
    found = getattr(getattr(trt, kind, None), name, None)
    if found is None:
        raise UsageError(f"{trt.__name__} {trt.__version__} has no {kind}.{name}", where=flag(option),
                         hint="leave the option out, or install a version that has it")  # fmt: skip
    return found


@cache
def _logger(trt: Any) -> Any:
    """Make the logger of this process, whose `listener` takes the messages: the library keeps the first it is given."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.listener = Log()

        def log(self, severity: Any, message: str) -> None:
            self.listener.take(severity.name, message)

    return Logger()


def _strongly_typed(trt: Any) -> int:
    """Give the flags of a strongly typed network: TensorRT 10's; later versions know no other kind."""
    named = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if named is None else 1 << int(named)


# --- building --------------------------------------------------------------------------------------------------------


def _parse(trt: Any, graph: Path, network: Any, logger: Any) -> Path:
    """Parse the ONNX file into an empty network; returns the file that was parsed, another one where it had to be."""
    parser = trt.OnnxParser(network, logger)
    log = logger.listener
    if not parser.supports_operator("Attention") and any(node.op_type == "Attention" for node in Graph(graph).nodes):
        graph = _without_attention(graph)
        log.remarks.append(f"{trt.__name__} {trt.__version__} does not know attention as one operator: it is computed "
                           "in parts, its scores held whole; TensorRT knows it from 10.14 on")  # fmt: skip
    if not parser.parse_from_file(str(graph)):
        raise refused(graph, [parser.get_error(index) for index in range(parser.num_errors)], log.errors)
    if not network.num_outputs:  # an empty file parses as an empty graph
        raise refused(graph, [], log.errors)
    return graph


def _without_attention(graph: Path) -> Path:
    """Write the graph beside itself with every attention decomposed; returns that file, of the same weights."""
    import onnx_ir as ir

    model, written = read_graph(graph), graph.with_name("without_attention.onnx")
    decompose_attention(model, target=ALL)
    ir.save(model, written)
    return written


def _write_plan(builder: Any, network: Any, config: Any, writer: Any) -> bool:
    """Build and write the plan; false where the library failed and said why in its log."""
    try:
        if hasattr(builder, "build_serialized_network_to_stream"):
            return bool(builder.build_serialized_network_to_stream(network, config, writer))
        plan = builder.build_serialized_network(network, config)
        return plan is not None and bool(writer.write(plan))
    finally:
        writer.close()


def _plan_writer(trt: Any, path: Path, wrote: Callable[[int], None]) -> Any:
    """Write the plan as it is made, and tell how much there is of it; a whole one is not held in Python."""

    class Writer(getattr(trt, "IStreamWriter", object)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.path = path
            self.file = path.open("xb")
            self.size = 0
            self.problem: OSError | None = None

        def write(self, data: bytes) -> int:
            try:
                written = self.file.write(data)
            except OSError as error:  # it cannot pass through the library
                self.problem = error
                return 0
            self.size += written
            wrote(self.size)
            return written

        def close(self) -> None:
            try:
                self.file.close()
            except OSError as error:
                self.problem = self.problem or error

    return Writer()


def _profile(builder: Any, network: Any, graph: Path, profile: ShapeProfile) -> Any:
    """Give every input its least, tuned and largest shape."""
    made = builder.create_optimization_profile()
    dims = _symbolic_dims(graph)
    for index in range(network.num_inputs):
        name = network.get_input(index).name
        points = [profile.sizes(point) for point in ("min", "opt", "max")]
        shapes = [tuple(dim_value(dim, sizes, where=f"input {name}") for dim in dims[name]) for sizes in points]
        made.set_shape(name, *shapes)
    return made


def _symbolic_dims(graph: Path) -> dict[str, tuple[int | str, ...]]:
    import onnx

    inputs = onnx.load(graph, load_external_data=False).graph.input
    return {
        value.name: tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for value in inputs
    }


# --- what came of it -------------------------------------------------------------------------------------------------


def _realised(trt: Any, logger: Any, graph: Path, out: Path, profile: ShapeProfile) -> dict[str, Any]:
    """Write `layers.json`, and sum up the layers; `remarks` are what we say ourselves, `warnings` the compiler's."""
    compiled, log = Graph(graph), logger.listener
    layers = with_modules(_listed(trt, logger, out / PLAN), compiled.modules)
    if layers:
        write_layers_file(out, layers)
    found = compared(layers, compiled)
    doubt = [f"the precision of this engine is {found['precision']}"] if "precision" in found else []
    eight = quantized(layers, compiled, profile.sizes("opt"))
    if uncounted := eight.pop("uncounted", ""):
        doubt.append(f"what computes in 8 bits is not counted in full: {uncounted}")
    warnings = list(dict.fromkeys(log.warnings))[:_WARNINGS]
    return {"remarks": [*doubt, *log.remarks], "warnings": warnings, **summed_up(layers), **found, **eight}


def _listed(trt: Any, logger: Any, plan: Path) -> list[Layer]:
    """Give the layers that were read from the log; where that is not all of them, those the engine itself tells.

    Where it tells none, a remark says why.
    """
    log = logger.listener
    if log.layers and len(log.layers) == log.announced:
        return list(log.layers)
    try:
        return _inspected(trt, logger, plan)
    except Exception as error:  # noqa: BLE001 - the engine is built; its layers are only looked at
        log.remarks.append(f"of {log.announced} layers that the compiler listed, {len(log.layers)} could be read; the "
                           f"engine cannot be asked instead: {_line(error)}")  # fmt: skip
        return list(log.layers)


def _inspected(trt: Any, logger: Any, plan: Path) -> list[Layer]:
    """Ask the engine itself for its layers, where a GPU is there to load it. Raises BuildError where it tells none."""
    with plan.open("rb") as file:
        engine = trt.Runtime(logger).deserialize_cuda_engine(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if engine is None:
        raise BuildError(f"it does not load here: {(logger.listener.errors or ['no reason is given'])[-1]}")
    found = inspected_layers(engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON))
    if not found:
        raise BuildError("its inspector gives names at most")
    return found


def _line(error: Exception) -> str:
    """Give an error in one line; ours without what there is to do."""
    if isinstance(error, TrtdiffError):
        return f"{error.message} ({error.where})" if error.where else error.message
    return f"{type(error).__name__}: {error}"
