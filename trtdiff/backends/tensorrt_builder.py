"""Compile a graph with TensorRT's Python API: what the backends `tensorrt-rtx` and `tensorrt` share.

Both libraries are one API under two module names. The network is strongly typed: types stand in the graph, and nowhere
else. What the compiler realised is read from its own log: built with detailed verbosity, it prints every layer with the
types of what goes in and out, and the ONNX nodes it came from, without a GPU.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtdiff.errors import BuildError, StorageError
from trtdiff.types import ShapeProfile, dim_value

PLAN = "engine.plan"
"""The compiled engine's file."""
FLOATS = {"Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "FP8": "float8", "Int8": "int8"}
"""Types as the log writes them → as we do."""
ARITHMETIC = ("correlation", "gemm", "convolution", "matrix", "attention", "fmha")
"""Parts of layer types that do the work: convolutions, matrix products, attention."""

_LAYER = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<kind>[^,]+), Inputs: \[(?P<inputs>.*?)\], Constants: "
                    r".*?Outputs: \[(?P<outputs>.*?)\], TacticName")  # fmt: skip
_TYPE = re.compile(r"Datatype: (\w+)")
_NODE = re.compile(r"\[ONNX Layer: ([^\]]+)\]")


@dataclass(frozen=True)
class Layer:
    """One layer that the compiler made."""

    name: str
    kind: str
    reads: str
    """Type of its first input, in our words; empty where it reads none."""
    writes: str
    nodes: tuple[str, ...]
    """ONNX nodes that it computes."""

    @property
    def computes(self) -> bool:
        """Whether it is a convolution, a matrix product or attention."""
        return any(word in self.kind.lower() for word in ARITHMETIC)


@dataclass
class Log:
    """What the compiler said: errors, warnings, and the layers it listed."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)

    def take(self, severity: str, text: str) -> None:
        """Keep one message; `severity` is the library's name of it."""
        if "ERROR" in severity:
            self.errors.append(text)
        elif severity == "WARNING":
            self.warnings.append(text)
        elif "LayerType: " in text:
            self.layers += read_layers(text)


def read_layers(text: str) -> list[Layer]:
    """Read layers as TensorRT's detailed log writes them, one a line."""
    found = []
    for line in text.splitlines():
        match = _LAYER.match(line)
        if match:
            reads, writes = (_first_type(match[side]) for side in ("inputs", "outputs"))
            found.append(Layer(match["name"], match["kind"], reads, writes, tuple(_NODE.findall(line))))
    return found


def _first_type(tensors: str) -> str:
    found = [FLOATS[name] for name in _TYPE.findall(tensors) if name in FLOATS]
    return found[0] if found else ""


def compile_graph(
    trt: Any, graph: Path, profile: ShapeProfile, out: Path, *, configure: Callable[[Any], None]
) -> Mapping[str, Any]:
    """Parse the ONNX file, build it and write `out`/engine.plan; returns what was realised.

    `trt` is the library's module. `configure` sets what the backends differ in, on the builder's config. Raises
    BuildError with the node, its PyTorch module, types and shapes where the library names one; StorageError for a full
    disk.
    """
    log = Log()
    builder = trt.Builder(_logger(trt, log))
    network = builder.create_network(_strongly_typed(trt))
    parser = trt.OnnxParser(network, builder.logger)
    if not parser.parse_from_file(str(graph)):
        raise _refused(graph, [parser.get_error(index) for index in range(parser.num_errors)])
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.clear_flag(trt.BuilderFlag.TF32)  # float32 islands are there for their precision
    configure(config)
    config.add_optimization_profile(_profile(builder, network, graph, profile))
    writer = _plan_writer(trt, out / PLAN)
    try:
        built = builder.build_serialized_network_to_stream(network, config, writer)
    finally:
        writer.close()
    if writer.problem is not None:
        raise StorageError(f"the engine could not be written: {writer.problem.strerror}", where=str(out / PLAN),
                           hint="free some space or choose another folder with --store")  # fmt: skip
    if not built:
        raise _failed(graph, log)
    return _realised(log, writer.size)


def _logger(trt: Any, log: Log) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            log.take(severity.name, message)

    return Logger()


def _strongly_typed(trt: Any) -> int:
    """Give the flags of a strongly typed network: TensorRT 10's; later versions know no other kind."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _plan_writer(trt: Any, path: Path) -> Any:
    """Write the plan as it is made, so that it is not held in memory a second time."""

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
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


def _realised(log: Log, size: int) -> dict[str, Any]:
    """Sum up the layers; say so where there was no list of them."""
    realised: dict[str, Any] = {"plan_bytes": size, "warnings": list(dict.fromkeys(log.warnings))[:20]}
    if not log.layers:
        return {**realised, "layers": "not verified: the compiler listed none"}
    working = [layer for layer in log.layers if layer.computes]
    return {
        **realised,
        "layers": len(log.layers),
        "types": dict(Counter(layer.writes for layer in log.layers if layer.writes).most_common()),
        "arithmetic": dict(Counter(layer.reads for layer in working if layer.reads).most_common()),
    }


# --- failures --------------------------------------------------------------------------------------------------------


def _refused(graph: Path, errors: list[Any]) -> BuildError:
    """Say which node the parser refuses, where it came from, and what it was given."""
    first = errors[0] if errors else None
    if first is None:
        return BuildError("the parser refuses the graph and does not say why", where=str(graph))
    place = describe_node(graph, first.node_name(), first.node_operator())
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return BuildError(
        f"TensorRT's parser refuses the graph: {first.desc()}{more}", where=place,
        hint="keep that module in float32 or build for another target; if it ought to work, please report the node"
    )  # fmt: skip


def _failed(graph: Path, log: Log) -> BuildError:
    """Say what the builder complained about, and the node that it names if it names one."""
    text = "\n    ".join(log.errors[-4:]) or "it gives no reason"
    names = _node_names(graph)
    named = next((name for name in sorted(names, key=len, reverse=True) if name and name in text), "")
    return BuildError(
        f"TensorRT cannot build the engine:\n    {text}",
        where=describe_node(graph, named, names.get(named, "")) if named else str(graph),
        hint="try --precision bf16, a smaller profile, or another target",
    )


def _node_names(graph: Path) -> dict[str, str]:
    import onnx

    return {node.name: node.op_type for node in onnx.load(graph, load_external_data=False).graph.node}


def describe_node(graph: Path, name: str, operator: str) -> str:
    """Give a node in words: operator, name, PyTorch module, and the types and shapes of its inputs where known."""
    import onnx

    model = onnx.load(graph, load_external_data=False)
    node = next((node for node in model.graph.node if node.name == name), None)
    if node is None:
        return f"node {operator} {name}".rstrip()
    module = next((entry.value for entry in node.metadata_props if entry.key == "module"), "")
    known = {value.name: value for value in [*model.graph.value_info, *model.graph.input]}
    inputs = ", ".join(_words(known[value]) for value in node.input if value in known)
    words = [f"node {node.op_type} {node.name}", module and f"module {module}", inputs and f"inputs {inputs}"]
    return "; ".join(filter(None, words))


def _words(value: Any) -> str:
    import onnx

    tensor = value.type.tensor_type
    dims = ", ".join(dim.dim_param or str(dim.dim_value) for dim in tensor.shape.dim)
    return f"{value.name}: {onnx.TensorProto.DataType.Name(tensor.elem_type).lower()}[{dims}]"
