"""The layers that TensorRT made: read from what it says, written beside the engine, and summed up.

Built with detailed verbosity, the compiler prints every layer with the types of what goes in and out and the ONNX
nodes that it computes, without a GPU. Where it prints none, an engine that was loaded on a GPU can be asked.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from trtdiff.errors import ArtefactError
from trtdiff.records import read_record, whole_file

LAYERS_FILE = "layers.json"
"""Stands beside the engine."""
LAYERS_SCHEMA = 1
FLOATS = {
    "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "FP8": "float8", "E4M3": "float8",
    "FP4": "float4", "E2M1": "float4", "Int8": "int8", "Int4": "int4",
}  # fmt: skip
"""Types as the library writes them → as we do. Integers that count or index (Int32, Int64, Bool) are left out."""
ARITHMETIC = ("correlation", "gemm", "convolution", "deconv", "matrix", "attention", "fmha", "mha")
"""Parts of layer types that do the work: convolutions, matrix products, attention."""
_FUSED_ARITHMETIC = re.compile("__myl_(?P<before>(?:[A-Z][a-z]*)*?)Fc(?=[A-Z_])|_gemm_")
"""How the names of layers begin that are products with more fused into them, or attention, under types that say less:
`runtime_fusion`, `kgen`. `before` is what is done to their inputs first: `__myl_CastMulFcAdd`."""
EIGHT_BITS = ("int8", "float8")
_LISTED = 20
"""How many layers in another type are listed in a summary."""

ANNOUNCED = "LayerType: "
"""Stands in every line of the log that lists a layer."""
_LAYER = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<kind>[^,]+), Inputs: \[(?P<inputs>|.*?\})\], "
                    r"(?:Constants: \[(?:|.*?\})\], )?Outputs: \[(?P<outputs>|.*?\})\]")  # fmt: skip
"""TensorRT for RTX lists constants, TensorRT 10 does not; what follows differs by layer."""
_TYPE = re.compile(r"Datatype: ([^,}]+)")
_NODE = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_WORDS = FLOATS | {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16", "INT8": "int8"}
"""Those that name a type on their own, and those within a format: `Channel major FP16 format`."""


@dataclass(frozen=True)
class Layer:
    """One layer that the compiler made."""

    name: str
    kind: str
    reads: str
    """Type of its first input of numbers, in our words; empty where it reads none. Where it casts that input from 8
    bits before it multiplies, the type that it casts to; empty where that is not told."""
    writes: str
    nodes: tuple[str, ...]
    """ONNX nodes that it computes."""
    modules: tuple[str, ...] = ()
    """PyTorch modules that those nodes came from, each once."""

    @property
    def computes(self) -> bool:
        """Whether it is a convolution, a matrix product or attention."""
        return any(word in self.kind.lower() for word in ARITHMETIC) or bool(_FUSED_ARITHMETIC.match(self.name))


@dataclass(frozen=True)
class _LayersFile:
    """`layers.json`: names that many layers share stand once, and layers refer to them by number."""

    schema: int
    modules: tuple[str, ...]
    layers: tuple[tuple[str, str, str, str, tuple[str, ...], tuple[int, ...]], ...]
    """Name, kind, reads, writes, nodes, modules."""


def read_layers(text: str) -> list[Layer]:
    """Read layers as TensorRT's detailed log writes them, one a line."""
    found = []
    for line in text.splitlines():
        match = _LAYER.match(line)
        if match:
            reads, writes = (_first(_TYPE.findall(match[side])) for side in ("inputs", "outputs"))
            reads = _multiplied(match["name"], reads, writes)
            found.append(Layer(match["name"], match["kind"], reads, writes, tuple(_NODE.findall(line))))
    return found


def inspected_layers(text: str) -> list[Layer]:
    """Read layers as the engine inspector writes them, as JSON; none where it was built to keep their names only."""
    found = []
    for layer in json.loads(text)["Layers"]:
        if isinstance(layer, dict):
            reads, writes = (_first(map(_words, layer.get(side, ()))) for side in ("Inputs", "Outputs"))
            reads = _multiplied(layer["Name"], reads, writes)
            nodes = tuple(_NODE.findall(layer.get("Metadata", "")))
            found.append(Layer(layer["Name"], layer["LayerType"], reads, writes, nodes))
    return found


def with_modules(layers: Iterable[Layer], modules: Mapping[str, str]) -> list[Layer]:
    """Fill in the modules; `modules` gives that of every ONNX node."""
    return [
        replace(layer, modules=tuple(dict.fromkeys(modules[node] for node in layer.nodes if modules.get(node))))
        for layer in layers
    ]


def summed_up(layers: Sequence[Layer]) -> dict[str, Any]:
    """Count layers by the type they write, and the arithmetic by the type it reads; say so where there are none.

    `other_arithmetic` lists what computes in another type than most of it: layer, type, modules.
    """
    if not layers:
        return {"layers": "not verified: the compiler listed none"}
    working = [layer for layer in layers if layer.computes and layer.reads]
    arithmetic = Counter(layer.reads for layer in working).most_common()
    others = [layer for layer in working if layer.reads != arithmetic[0][0]]
    return {
        "layers": len(layers),
        "types": dict(Counter(layer.writes for layer in layers if layer.writes).most_common()),
        "arithmetic": dict(arithmetic),
        "other_arithmetic": [
            {"layer": layer.name, "reads": layer.reads, "modules": list(layer.modules)} for layer in others[:_LISTED]
        ],
    }


def write_layers_file(folder: Path, layers: Iterable[Layer]) -> None:
    """Write `layers.json` into an engine's folder."""
    kept = list(layers)
    modules = tuple(dict.fromkeys(module for layer in kept for module in layer.modules))
    number = {module: index for index, module in enumerate(modules)}
    rows = tuple(
        (layer.name, layer.kind, layer.reads, layer.writes, layer.nodes, tuple(number[name] for name in layer.modules))
        for layer in kept
    )
    with whole_file(folder / LAYERS_FILE) as temporary:
        temporary.write_bytes(msgspec.json.encode(_LayersFile(LAYERS_SCHEMA, modules, rows)))


def read_layers_file(folder: Path) -> list[Layer]:
    """Read the layers of an engine's folder; none where its compiler listed none. Raises ArtefactError."""
    path = folder / LAYERS_FILE
    if not path.exists():
        return []
    file = read_record(path, _LayersFile, schema=LAYERS_SCHEMA)
    try:
        return [
            Layer(name, kind, reads, writes, nodes, tuple(file.modules[number] for number in numbers))
            for name, kind, reads, writes, nodes, numbers in file.layers
        ]
    except IndexError:
        raise ArtefactError(f"{LAYERS_FILE} names a module that it does not list", where=str(path),
                            hint="build again with --force")  from None  # fmt: skip


def _multiplied(name: str, reads: str, writes: str) -> str:
    """Give the type that a layer multiplies in, for what it reads.

    A product that dequantizes as it reads, `__myl_CastMulFc`, is a product in the type it writes. TensorRT for RTX
    1.7.1 makes such layers where only one factor is quantized.
    """
    match = _FUSED_ARITHMETIC.match(name)
    if reads not in EIGHT_BITS or match is None or "Cast" not in (match["before"] or ""):
        return reads
    return "" if writes in EIGHT_BITS else writes


def _words(tensor: Mapping[str, Any]) -> str:
    """Give what an inspector says of a tensor's type: the type, or in older ones a format that names it."""
    return str(tensor.get("Datatype") or tensor.get("Format/Datatype") or tensor.get("Format", ""))


def _first(said: Iterable[str]) -> str:
    """Give the first type of numbers among what is said of tensors, in our words; empty where there is none."""
    words = (word for text in said for word in re.findall(r"\w+", text))
    return next((_WORDS[word] for word in words if word in _WORDS), "")
