"""Decide which nodes stay in float32 where the rest of a graph goes to 16 bits, and write down why.

1. Modules that a family or a user names stay.
2. A value that was measured and that the type cannot hold is never held in it: the node that makes it and all that read
   it stay. It cannot, where twice its largest magnitude is beyond the type's end (the factor is room for prompts that
   were not measured), or where its root mean square is so small that rounding loses it (`Limits.least_rms`).
   Operators that only move numbers hand this on, forwards and backwards, to where a measurement says otherwise. An
   infinite magnitude is a mask's minus infinity, which both types have; float32's own end is a mask too.
3. A constant in the graph with elements that rounding makes 0, as the 1e-8 that keeps a divisor from 0, is read in
   float32, and so is what is made of it; of weights only those are that are lost as a whole, by their root mean square.
   (Not those that are only added: if they matter, the sum was measured to be small.) The epsilon of a normalization is
   an attribute, and has float32 in any case.
4. Sines and cosines stay, with all that leads to them: the angle of a timestep, a position or a frequency needs every
   bit, and a timestep of 981 and a half is no number of these types.
5. What lies between stays too: movers on a way from float32 to float32, and cheap arithmetic that has float32 on all
   sides. Otherwise a value would be rounded for nothing but its transport. A weight that an island reads, and that is
   not stored in the type, is moved in float32.

A mark is the metadata `keep` of a node; the weights of a marked node need none, they go with their readers.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import isnan
from typing import TYPE_CHECKING

import numpy as np

from trtdiff.calibrate.ranges import ValueRange
from trtdiff.errors import BuildError
from trtdiff.export.graph import MODULE
from trtdiff.passes.base import SMALL
from trtdiff.passes.half_types import KEEP, LIMITS, Half
from trtdiff.passes.movers import moved, moves

if TYPE_CHECKING:
    import onnx_ir as ir

HEADROOM = 2.0
"""How many times what was measured must fit."""
MASKS = 3.4e38
"""Magnitudes from here on, which no model computes with, hide something from attention."""
CHEAP = frozenset({
    "Abs", "Add", "Clip", "Div", "Erf", "Exp", "Gelu", "LeakyRelu", "Max", "Min", "Mul", "Neg", "Pow", "Reciprocal",
    "Relu", "Sigmoid", "Silu", "Softplus", "Sqrt", "Sub", "Swish", "Tanh",
})  # fmt: skip
"""Arithmetic element by element: reading and writing is what it costs, and casts would read and write as much."""
ADDENDS: Mapping[str, tuple[int, ...]] = {
    "Add": (0, 1), "Conv": (2,), "ConvTranspose": (2,), "Gemm": (2,), "GroupNormalization": (2,),
    "LayerNormalization": (2,), "Sub": (0, 1),
}  # fmt: skip
"""Operator → its inputs that are only added."""
WAVES = "the angle of a sine or cosine needs every bit of float32"
OUTSIDE = "it only moves float32 that comes from outside and goes there"


def mark_islands(
    model: "ir.Model", *, dtype: Half, patterns: Mapping[str, str], ranges: Mapping[str, ValueRange]
) -> dict[str, str]:
    """Mark the nodes that stay in float32; give what began each island, with its reason and number of nodes.

    `patterns`: module paths, with * for any part → reason. `ranges`: value → its range; values without one are not
    judged. Keys of the result are patterns, nodes and weights whose numbers `dtype` cannot hold, and modules that make
    waves.

    Requires the canonical graph: float32, names as exported. Changes nothing but marks. Raises BuildError for a pattern
    that matches no module, a range of a value that the graph does not have, and one that is no number.
    """
    marks = _Marks(model.graph)
    for pattern, reason in patterns.items():
        for node in matching(model.graph, pattern):
            marks.add(node, pattern, reason or f"asked for as {pattern}")
    for value, (origin, reason) in _unholdable(model.graph, dtype, ranges).items():
        for holder in (value.producer(), *value.consumers()):
            if holder is not None:
                marks.add(holder, origin, reason)
    for node, origin in _waves(model.graph):
        marks.add(node, origin, WAVES)
    _join(model.graph, marks, dtype)
    return marks.summary()


class _Marks:
    """Marked nodes; the first reason that is found for one is its reason."""

    def __init__(self, graph: "ir.Graph") -> None:
        self._graph = graph
        self._islands: dict[tuple[str, str], list[ir.Node]] = {}
        self._why: dict[ir.Node, tuple[str, str]] = {}

    def __contains__(self, node: "ir.Node") -> bool:
        return node in self._why

    def add(self, node: "ir.Node", origin: str, reason: str) -> None:
        """Mark a node that computes with floats; a weight's Cast goes with its readers, and needs no mark."""
        if node not in self._why and node.graph is self._graph and _is_float(node) and not stored_weight(node):
            node.metadata_props[KEEP] = reason
            self._why[node] = (origin, reason)
            self._islands.setdefault((origin, reason), []).append(node)

    def join(self, node: "ir.Node", neighbour: "ir.Node") -> None:
        """Let a node stay for the reason that its neighbour stays for."""
        self.add(node, *self._why[neighbour])

    def summary(self) -> dict[str, str]:
        """Give origin → reason and size."""
        found: dict[str, str] = {}
        for (origin, reason), nodes in self._islands.items():
            words = f"{reason.removeprefix(f'{origin} ')} ({len(nodes)} node{'s' if len(nodes) > 1 else ''})"
            found[origin] = f"{found[origin]}; {words}" if origin in found else words
        return found


def stored_weight(node: "ir.Node") -> bool:
    """Whether a node only casts a weight."""
    return node.op_type == "Cast" and node.inputs[0] is not None and node.inputs[0].is_initializer()


def _is_float(node: "ir.Node") -> bool:
    import onnx_ir as ir

    return any(value is not None and value.dtype == ir.DataType.FLOAT for value in (*node.inputs, *node.outputs))


# --- modules by name -------------------------------------------------------------------------------------------------


def matching(graph: "ir.Graph", pattern: str) -> "list[ir.Node]":
    """Give the nodes of the PyTorch modules that a pattern names. Raises BuildError where there is none."""
    modules = {node: node.metadata_props.get(MODULE, "") for node in graph}
    found = [node for node, module in modules.items() if fnmatchcase(module, pattern)]
    if not found:
        names = sorted(set(modules.values()) - {""})
        near = ", ".join(get_close_matches(pattern.rstrip("*."), names, n=3, cutoff=0.5))
        raise BuildError(
            f"no module matches {pattern}", where=f"graph {graph.name}",
            hint=f"near it are {near}" if near else "name modules as `trtdiff inspect` lists them for the graph"
        )  # fmt: skip
    return found


# --- measured values -------------------------------------------------------------------------------------------------


def _unholdable(graph: "ir.Graph", dtype: Half, ranges: Mapping[str, ValueRange]) -> "dict[ir.Value, tuple[str, str]]":
    """Give the values that the type cannot hold, each with where its numbers were measured and the reason."""
    values = {str(value.name): value for value in _values(graph)}
    if unknown := [name for name in ranges if name not in values]:
        near = get_close_matches(unknown[0], values, n=1)
        raise BuildError(
            f"the ranges name {unknown[0]}, which the graph does not have ({len(unknown)} of {len(ranges)} like it)",
            where=f"graph {graph.name}", hint=f"scan this export's ranges{f'; near it is {near[0]}' if near else ''}"
        )  # fmt: skip
    found = {}
    for name, measured in ranges.items():
        if reason := _reason(name, measured, dtype):
            found[values[name]] = (_origin(values[name]), reason)
    for value, why in _vanishing(graph, dtype):
        found.setdefault(value, why)
    waiting = deque(found)
    while waiting:
        value = waiting.popleft()
        for other in _same_numbers(value):
            if other not in found and other.name not in ranges:
                found[other] = found[value]
                waiting.append(other)
    return found


def _origin(value: "ir.Value") -> str:
    producer = value.producer()
    return str(value.name if producer is None else producer.name)


def _values(graph: "ir.Graph") -> "Iterator[ir.Value]":
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


def _same_numbers(value: "ir.Value") -> "Iterator[ir.Value]":
    """Give the values that hold numbers of this one: what movers make of it, and what it was moved from."""
    for node in value.consumers():
        if moves(node) and any(value is other for other in moved(node)):
            yield from node.outputs
    producer = value.producer()
    if producer is not None and moves(producer):
        yield from (other for other in moved(producer) if not _is_weight(other))


def _is_weight(value: "ir.Value") -> bool:
    producer = value.producer()
    return value.is_initializer() or (producer is not None and stored_weight(producer))


def _reason(name: str, measured: ValueRange, dtype: Half) -> str:
    """Say why a type cannot hold such a value; empty where it can."""
    limits = LIMITS[dtype]
    if isnan(measured.amax) or isnan(measured.rms):
        raise BuildError("the model computes NaN already in float32", where=f"scanned ranges, value {name}",
                         hint="run the check in fp32 to see where it begins")  # fmt: skip
    if measured.amax >= MASKS:
        return ""
    if HEADROOM * measured.amax > limits.largest:
        return f"{name} reaches {measured.amax:.2g}; {dtype} ends at {limits.largest:.5g}"
    if measured.amax > 0 and measured.rms < limits.least_rms:
        return _small(name, measured.rms, dtype)
    return ""


# --- constants and weights -------------------------------------------------------------------------------------------


def _vanishing(graph: "ir.Graph", dtype: Half) -> "Iterator[tuple[ir.Value, tuple[str, str]]]":
    """Give constants that a type loses, with what is computed from those in the graph, and weights that it loses."""
    import onnx_ir as ir

    constants = [node.outputs[0] for node in graph if node.op_type == "Constant" and not node.domain]
    for value in (*graph.initializers.values(), *constants):
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is None or not tensor.dtype.is_floating_point() or tensor.dtype.name.lower() == dtype:
            continue
        widened = [node.outputs[0] for node in value.consumers() if value.is_initializer() and stored_weight(node)]
        held = [item for item in (value, *widened) if item.dtype == ir.DataType.FLOAT]
        readers = [reader for item in held for reader in item.uses() if not stored_weight(reader.node)]
        if isinstance(tensor, ir.ExternalTensor):
            if any(reader.idx not in ADDENDS.get(reader.node.op_type, ()) for reader in readers):
                reason = _lost(str(value.name), tensor, dtype)
                yield from ((item, (_origin(value), reason)) for item in held if reason)
        elif tensor.size <= SMALL and (reason := _zeroed(str(value.name), tensor, dtype)):
            made = [output for reader in readers if not moves(reader.node) for output in reader.node.outputs]
            yield from ((item, (_origin(value), reason)) for item in (*held, *made))


def _zeroed(name: str, tensor: "ir.TensorProtocol", dtype: Half) -> str:
    """Say which number of a constant a type makes 0; empty where there is none."""
    size = np.abs(np.asarray(tensor.numpy()).astype(np.float64))
    gone = size[(size > 0) & (size <= LIMITS[dtype].step / 2)]
    return f"{name} holds {gone.max():.2g}, which {dtype} makes 0" if gone.size else ""


def _lost(name: str, tensor: "ir.ExternalTensor", dtype: Half) -> str:
    """Say that a weight is too small for a type as a whole; reads no more of it than it takes to see that it is not."""
    least, total = LIMITS[dtype].least_rms, 0.0
    flat = tensor.numpy().reshape(-1)
    try:
        for start in range(0, flat.size, SMALL):
            total += float(np.square(flat[start : start + SMALL].astype(np.float64)).sum())
            if total >= least * least * flat.size:
                return ""
        rms = (total / flat.size) ** 0.5 if flat.size else 0.0
    finally:
        del flat
        tensor.release()
    return _small(name, rms, dtype) if rms > 0 else ""


def _small(name: str, rms: float, dtype: Half) -> str:
    return f"{name} is about {rms:.1e} (rms); below {LIMITS[dtype].least_rms:.1e} {dtype} loses bits"


# --- sines and cosines -----------------------------------------------------------------------------------------------


def _waves(graph: "ir.Graph") -> "Iterator[tuple[ir.Node, str]]":
    """Give sines and cosines with what leads to them, each with the module of the first that it leads to."""
    import onnx_ir as ir

    seen: set[ir.Node] = set()
    for wave in graph:
        if wave.op_type not in {"Sin", "Cos"} or wave.domain:
            continue
        origin = wave.metadata_props.get(MODULE, "") or str(wave.name)
        waiting = [wave]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            yield node, origin
            floats = [value for value in node.inputs if value is not None and value.dtype == ir.DataType.FLOAT]
            waiting += [found for found in (value.producer() for value in floats) if found is not None]


# --- what lies between -----------------------------------------------------------------------------------------------


def _join(graph: "ir.Graph", marks: _Marks, dtype: Half) -> None:
    """Let nodes between float32 and float32 stay, until there are none."""
    nodes = [node for node in graph if _is_float(node) and not stored_weight(node)]
    ends = set(graph.outputs)
    while True:
        joined = _moved_between(nodes, marks, ends, dtype) + _enclosed(nodes, marks, ends)
        if not joined:
            return
        for node, neighbour in joined:
            if neighbour is None:
                marks.add(node, str(node.name), OUTSIDE)
            else:
                marks.join(node, neighbour)


def _moved_between(
    nodes: "list[ir.Node]", marks: _Marks, ends: "set[ir.Value]", dtype: Half
) -> "list[tuple[ir.Node, ir.Node | None]]":
    """Give movers on a way from a float32 value to an island or out of an island, each with the island's node."""
    before: dict[ir.Node, ir.Node | None] = {}  # mover → the marked node whose numbers reach it; None: from outside
    for node in nodes:
        if node in marks or not moves(node):
            continue
        sources = [source for value in moved(node) for source in _sources(value, marks, before, dtype)]
        if sources:
            before[node] = next((source for source in sources if source is not None), None)
    after: dict[ir.Node, ir.Node | None] = {}  # mover → the marked node that its numbers reach; None: the outside
    for node in reversed(before):
        readers = [reader for value in node.outputs for reader in value.consumers()]
        marked = next((reader for reader in readers if reader in marks), None)
        further = [after[reader] for reader in readers if reader in after]
        reached = [*([] if marked is None else [marked]), *further]
        if reached or not ends.isdisjoint(node.outputs):
            after[node] = next((found for found in reached if found is not None), None)
    return [(node, after[node] or before[node]) for node in before if node in after]


def _sources(
    value: "ir.Value", marks: _Marks, before: "Mapping[ir.Node, ir.Node | None]", dtype: Half
) -> "Iterable[ir.Node | None]":
    """Give where a value's numbers come from in float32, if they do: a marked node, or None for the outside."""
    producer = value.producer()
    if producer is None:
        return [None] if value.is_graph_input() or not _stored_as(value, dtype) else []
    if stored_weight(producer):
        return [None] if not _stored_as(producer.inputs[0], dtype) else []
    if producer in marks:
        return [producer]
    return [before[producer]] if producer in before else []


def _stored_as(weight: "ir.Value | None", dtype: Half) -> bool:
    tensor = None if weight is None else weight.const_value
    return tensor is not None and tensor.dtype.name.lower() == dtype


def _enclosed(nodes: "list[ir.Node]", marks: _Marks, ends: "set[ir.Value]") -> "list[tuple[ir.Node, ir.Node | None]]":
    """Give cheap nodes and movers that have islands, weights and one another on all sides, and an island on some."""
    inside = {
        node for node in nodes if node not in marks and not node.domain and (node.op_type in CHEAP or moves(node))
    }
    waiting = deque(inside)
    while waiting:
        node = waiting.popleft()
        if node in inside and not _is_enclosed(node, inside, marks, ends):
            inside.remove(node)
            waiting.extend(_neighbours(node))
    if not inside:
        return []
    joined: list[tuple[ir.Node, ir.Node | None]] = []
    for node in nodes:
        neighbour = next((found for found in _neighbours(node) if found in marks), None)
        if node in inside and neighbour is not None:
            joined.append((node, neighbour))
    return joined


def _is_enclosed(node: "ir.Node", inside: "set[ir.Node]", marks: _Marks, ends: "set[ir.Value]") -> bool:
    import onnx_ir as ir

    for value in node.inputs:
        if value is None or value.dtype != ir.DataType.FLOAT or _is_weight(value):
            continue
        producer = value.producer()
        if producer is None or (producer not in inside and producer not in marks):
            return False
    readers = [reader for value in node.outputs for reader in value.consumers()]
    read = bool(readers) or not ends.isdisjoint(node.outputs)
    return read and all(reader in inside or reader in marks for reader in readers)


def _neighbours(node: "ir.Node") -> "Iterator[ir.Node]":
    for value in node.inputs:
        producer = None if value is None else value.producer()
        if producer is not None:
            yield producer
    for value in node.outputs:
        yield from value.consumers()
