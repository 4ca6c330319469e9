"""What TensorRT's parser and builder refuse, in words that help: the node, its PyTorch module, types and shapes.

And why the library itself cannot be used.

The parser names the node. The builder names layers, nodes, or the two ends of a fused region, or nothing at all: an
attention without a kernel is found by looking which ones the graph has. What the library says about a GPU that is not
there is left out, as long as it says anything else.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdiff.errors import BuildError, MissingDependency

if TYPE_CHECKING:
    import onnx

_NODES = 3
"""How many nodes one message describes."""
_LINES = 4
_NO_DRIVER = re.compile(r"catchCudaError|ScopedCudaStream|getCurrentCC")
_ONNX_LAYER = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_NO_KERNEL = "not supported by a dedicated kernel"
_NO_CAUSE = "it gives no reason"

HINTS = {
    _NO_KERNEL: "this version has attention kernels for fp16 and bf16 alone, and not for every head size: build in one "
    "of these, or with a version that may decompose attention",
    r"must (?:all )?(?:be of the|have) same (?:input )?type|first input has type": "its inputs were left in different "
    "types: please report the node and the precision",
    "WeightsContext|Failed to import initializer": "export again: the graph's weights are not what it says",
    "UNSUPPORTED_NODE|Plugin not found|No importer": "TensorRT does not know this operator or this form of it: build "
    "with --target cpu, or report the node",
    "values for profile|violate shape constraints": "the shapes do not fit each other at that point of the profile: "
    "choose other sizes with --profile",
    "HW-specific datatypes: b16": "GPUs before sm80 do not know bfloat16: build with --precision fp16, or leave them "
    "out of --target",
    "HW-specific datatypes: fp8": "GPUs before sm89 do not know float8: build with another --precision, or leave them "
    "out of --target",
    "for Turing": "leave sm75 out of --target, or build with --precision fp16",
    "[Oo]ut ?[Oo]f ?[Mm]emory|insufficient memory|bad_alloc": "choose a smaller profile, or more memory",
    "Could not find any implementation": "allow more with --workspace, or choose a smaller profile",
    "MODEL_DESERIALIZE_FAILED|Failed to parse the ONNX model": "export again: the file is damaged, or no ONNX file",
    "dimension|conformable|channel size|Shape Error": "the shapes do not fit each other: please report "
    "the node and the profile",
    "cudaError": "it wants a GPU with a driver: build where there is one",
}
"""What the library says, as a regular expression → what to do; the first that is found holds."""
_REPORT = "if it ought to work, please report the node; --target cpu builds without TensorRT"


class Graph:
    """An ONNX file without its weights, for looking things up in. One that cannot be read has no nodes."""

    def __init__(self, path: Path) -> None:
        import onnx

        self.path = path
        try:
            self.model = onnx.load(path, load_external_data=False)
        except Exception:  # noqa: BLE001 - protobuf has classes of its own; what is said is then about the file
            self.model = onnx.ModelProto()

    @property
    def nodes(self) -> "Sequence[onnx.NodeProto]":
        """Every node, in order."""
        return list(self.model.graph.node)

    @cached_property
    def types(self) -> Mapping[str, str]:
        """Type and shape of every tensor in words, where the file states them or they can be inferred."""
        import onnx

        stated = _types(self.model.graph)
        try:
            inferred = _types(onnx.shape_inference.infer_shapes(self.model).graph)
        except Exception:  # noqa: BLE001 - a graph that is refused may well be one that cannot be inferred
            inferred = {}
        return {**inferred, **stated}

    @property
    def modules(self) -> dict[str, str]:
        """PyTorch module of every node that has one."""
        return {node.name: module for node in self.nodes if (module := _module(node))}

    def describe(self, name: str, operator: str = "") -> str:
        """Give a node in words: operator, name, PyTorch module, and what goes in and out with types and shapes."""
        node = next((node for node in self.nodes if node.name == name), None)
        return f"node {operator} {name}".rstrip() if node is None else self._words(node)

    def named_in(self, text: str) -> "list[onnx.NodeProto]":
        """Find nodes that a message names: as ONNX layers, else by their names, in the order of the message."""
        layers = set(_ONNX_LAYER.findall(text))
        found = [node for node in self.nodes if node.name in layers]
        if not found:
            places = ((_place(node.name, text), node) for node in self.nodes if node.name and node.name in text)
            found = [node for place, node in sorted(places, key=lambda item: item[0]) if place >= 0]
        return found

    def where(self, nodes: "Iterable[onnx.NodeProto]") -> str:
        """Describe a few nodes, alike ones once; the file where there are none."""
        alike: dict[tuple[str, ...], list[onnx.NodeProto]] = {}
        for node in nodes:
            alike.setdefault((node.op_type, *(_kind(self.types.get(name, name)) for name in node.input)), []).append(
                node
            )
        words = [
            self._words(first) + (f" (and {len(others)} like it)" if others else "")
            for first, *others in list(alike.values())[:_NODES]
        ]
        more = f"\n         and {len(alike) - _NODES} more kinds" if len(alike) > _NODES else ""
        return "\n         ".join(words) + more or str(self.path)

    def _words(self, node: "onnx.NodeProto") -> str:
        module = _module(node)
        sides = [
            f"{side} {', '.join(filter(None, (self._value(name) for name in names)))}"
            for side, names in (("inputs", node.input), ("outputs", node.output))
            if any(names)
        ]
        return "; ".join(filter(None, [f"node {node.op_type} {node.name}", module and f"module {module}", *sides]))

    def _value(self, name: str) -> str:
        return f"{name}: {self.types[name]}" if name in self.types else name


def not_installed(product: str, extra: str) -> MissingDependency:
    """Say that a library is not installed, and how to install it."""
    return MissingDependency(f"{product} is not installed", hint=f"pip install 'trtdiff[{extra}]'")


def not_imported(error: Exception, module: str, product: str, extra: str) -> MissingDependency:
    """Say why importing a library's module failed: it is not installed, or something that it needs is not."""
    if isinstance(error, ModuleNotFoundError) and error.name == module:
        return not_installed(product, extra)
    return MissingDependency(
        f"{product} is installed and cannot be imported: {error}", where=f"import {module}",
        hint=f"install what it misses, or all of it anew: pip install --force-reinstall 'trtdiff[{extra}]'"
    )  # fmt: skip


def refused(path: Path, errors: Sequence[Any], said: Sequence[str]) -> BuildError:
    """Say which node the parser refuses, where it came from, and what it was given.

    `errors` are the parser's own, `said` what it logged besides.
    """
    first = errors[0] if errors else None
    if first is None:
        return BuildError("TensorRT's parser refuses the graph and does not say why", where=str(path), hint=_REPORT)
    graph = Graph(path)
    code = first.code().name
    text = _cause([re.sub(r"^Invalid Node - .*\n?", "", first.desc())])
    if text in {"false", _NO_CAUSE}:  # its check of the operator, as source text
        text = f"it does not support the operator {first.node_operator()}"
    beside = next((line for line in said if "WeightsContext" in line), "")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    name = first.node_name()
    return BuildError(
        f"TensorRT's parser refuses the graph: {text}{f' ({beside})' if beside else ''}{more}",
        where=graph.describe(name, first.node_operator()) if name else str(path),
        hint=_hint(f"{code} {text} {beside}"),
    )


def failed(path: Path, said: Sequence[str]) -> BuildError:
    """Say what the builder complained about, and the nodes that it names, or that it must mean."""
    text = _cause(said)
    graph = Graph(path)
    nodes = graph.named_in(text)
    if not nodes and _NO_KERNEL in text:
        nodes = [node for node in graph.nodes if node.op_type == "Attention"]
    return BuildError(f"TensorRT cannot build the engine: {text}", where=graph.where(nodes), hint=_hint(text))


def _cause(said: Sequence[str]) -> str:
    """Give the last things that were said, without what is about a driver if there is anything else."""
    lines = list(dict.fromkeys(line.strip() for text in said for line in text.splitlines() if line.strip()))
    lines = [line for line in lines if not _NO_DRIVER.search(line)] or lines
    return "\n    ".join(lines[-_LINES:]) or _NO_CAUSE


def _hint(text: str) -> str:
    return next((hint for pattern, hint in HINTS.items() if re.search(pattern, text)), _REPORT)


def _place(name: str, text: str) -> int:
    """Where a message has this name as a whole word; -1 where it is part of a longer one. `a...b` names two."""
    match = re.search(rf"(?<![\w/])(?<![^.]\.){re.escape(name)}(?![\w/]|\.\w)", text)
    return -1 if match is None else match.start()


def _module(node: "onnx.NodeProto") -> str:
    return next((str(entry.value) for entry in node.metadata_props if entry.key == "module"), "")


def _kind(words: str) -> str:
    """Give a type and shape without names of dimensions: what makes two nodes alike."""
    return re.sub(r"[^\W\d][\w/]*(?=[,\]])", "?", words)


def _dim(dim: Any) -> str:
    """Give a dimension in words; `?` where inference only made up a name."""
    named = "" if dim.dim_param.startswith("unk__") else dim.dim_param
    return named or str(dim.dim_value or "?")


def _types(graph: "onnx.GraphProto") -> dict[str, str]:
    import onnx

    def word(number: int) -> str:
        name = str(onnx.TensorProto.DataType.Name(number)).lower()
        return {"float": "float32", "double": "float64"}.get(name, name)

    known = {}
    for value in (*graph.value_info, *graph.input, *graph.output):
        tensor = value.type.tensor_type
        if tensor.elem_type:
            dims = ", ".join(_dim(dim) for dim in tensor.shape.dim)
            known[value.name] = f"{word(tensor.elem_type)}[{dims}]"
    for weight in graph.initializer:
        known[weight.name] = f"{word(weight.data_type)}[{', '.join(map(str, weight.dims))}]"
    return known
