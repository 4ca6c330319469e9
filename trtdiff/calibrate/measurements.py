"""What a pass over the samples measures: outputs that it adds to a graph, and how what they say is added up.

A measurement's *totals* are arrays by name, each a maximum or a sum, some with a row a timestep band. `fold` gives new
arrays and changes none, so that an interruption finds either the old or the new.

Cost of one execution of one row, in times of a plain one (processor time; a UNet of 220 M weights at 32 by 32 latents,
both types): ranges 1.17 (1.1 for two rows), errors 1.43, counts 1.6, and noise 5.9, which is measured on one row of one
sample a band. Of 64 samples in 8 bands, two rows each, that makes 1.5 times plain inference for `max` (1.1 without the
noise), 2.9 for `mse` and 3.1 for `percentile`. Memory: 0.98, 1.08, 1.03 and 1.39 times (1.11 GB), the last mostly
weights that are mapped and read.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from trtdiff.calibrate.cache import COUNT, ERROR, NOISE, RANGE, Component, LayerFacts, Noise, Statistics, rounded
from trtdiff.calibrate.clips import clip_of, counted_edges, tried_clips
from trtdiff.passes.channel_maxima import CHANNELS, add_channel_maxima
from trtdiff.passes.count_beyond import COUNTS, add_counts
from trtdiff.passes.eight_bits import GRID, EightBits
from trtdiff.passes.layer_inputs import measured
from trtdiff.passes.layer_noise import NOISE as NOISE_OUTPUT
from trtdiff.passes.layer_noise import Rounded, add_layer_noise
from trtdiff.passes.layers import Layer, layers
from trtdiff.passes.observe import observe
from trtdiff.passes.rounding_errors import ERRORS, Candidate, add_rounding_errors
from trtdiff.passes.smoothing import factors_of, smoothed_clip
from trtdiff.passes.statistics import STATISTICS, Place, amax
from trtdiff.recipes.quantization import ALPHA, Method
from trtdiff.types import Array

if TYPE_CHECKING:
    import onnx_ir as ir

Arrays = Mapping[str, Array]


class Measurement(ABC):
    """One kind of measurement, of one graph."""

    name: ClassVar[str]
    """Of the pass, as caches write it."""
    maxima: ClassVar[frozenset[str]] = frozenset()
    """Totals that are maxima; the others are sums."""
    banded: ClassVar[frozenset[str]] = frozenset()
    """Totals that have a row a band."""

    lean: ClassVar[bool] = False
    """Whether weights are read where they lie, and not laid out anew: it reads them once more."""

    @abstractmethod
    def prepare(self, model: "ir.Model") -> bool:
        """Add the outputs to an exported graph; false where there is nothing to measure, and nothing was added."""

    @abstractmethod
    def read(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Take the added outputs away from those of one execution, and give what they add to the totals."""

    @abstractmethod
    def totals(self, seen: Component) -> dict[str, Array]:
        """Give the totals that a cache holds; after `prepare`."""

    @abstractmethod
    def into(self, seen: Component, totals: Arrays) -> Component:
        """Give what a cache holds once it has these totals; after `prepare`."""

    def not_finite(self, found: Arrays) -> Place | None:  # noqa: ARG002 - most do not look
        """Give the first value of an execution that is not finite, where this measurement can tell."""
        return None

    def fold(self, totals: Arrays, found: Arrays, band: int) -> dict[str, Array]:
        """Add what one execution, of this band, has to the totals."""
        folded = {}
        for name, before in totals.items():
            after, join = before.copy(), np.maximum if name in self.maxima else np.add
            place = band if name in self.banded else slice(None)
            after[place] = join(before[place], found[name])
            folded[name] = after
        return folded


class Ranges(Measurement):
    """Largest magnitude, sum of squares and elements of every value; with layers, the channels of their inputs."""

    name = RANGE
    maxima = frozenset({"amax", "channels"})
    banded = frozenset({"amax", "squares", "elements"})

    def __init__(self, bands: int, *, layers_too: bool) -> None:
        self._bands, self._layers_too = bands, layers_too
        self.places: tuple[Place, ...] = ()
        self._channels: dict[str, int] = {}
        self._layers: dict[str, _Counted] = {}

    def prepare(self, model: "ir.Model") -> bool:
        """Observe every value, and the channels of what goes into linear layers."""
        if not self._layers_too:
            self.places = observe(model)
            return bool(self.places)
        found = list(layers(model.graph))
        self._layers = {layer.name: _Counted.of(layer) for layer in found}
        linear = {measured(layer, 0): layer.inner for layer in found if layer.operator == "linear"}
        self._channels = {str(value.name): size for value, size in linear.items()}
        self.places = observe(model, [measured(layer, place) for layer in found for place in layer.activations])
        if linear:
            add_channel_maxima(model.graph, list(linear))
        return bool(self.places)

    def read(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Give amax, squares and elements of every value, and channels."""
        seen = outputs.pop(STATISTICS)
        largest, elements = amax(seen), seen[3].astype(np.float64)
        # squares of numbers beyond 1e16 overflow: no sum is larger than that of as many of the largest
        squares = np.minimum(seen[2].astype(np.float64), largest**2 * elements)
        channels = outputs.pop(CHANNELS) if self._channels else np.zeros(0)
        return {"amax": largest, "squares": squares, "elements": elements, "channels": channels.astype(np.float64)}

    def not_finite(self, found: Arrays) -> Place | None:
        """Name the first value with NaN or infinity."""
        finite = np.isfinite(found["amax"])
        return None if finite.all() else self.places[int(np.argmin(finite))]

    def totals(self, seen: Component) -> dict[str, Array]:
        """Give what a cache holds, as arrays."""
        values, channels = len(self.places), sum(self._channels.values())
        empty = {name: np.zeros((self._bands, values)) for name in ("amax", "squares", "elements")}
        if not seen.values:
            return {**empty, "channels": np.zeros(channels)}
        kept = [seen.values[place.value] for place in self.places]
        found = {name: np.array([getattr(one, name) for one in kept], np.float64).T for name in empty}
        rows = [seen.values[name].channels for name in self._channels]
        return {**found, "channels": np.array([number for row in rows for number in row], np.float64)}

    def into(self, seen: Component, totals: Arrays) -> Component:
        """Give a cache that holds these."""
        numbers = iter(_largest(totals["channels"]))
        channels = {name: tuple(islice(numbers, size)) for name, size in self._channels.items()}
        values = {}
        for number, place in enumerate(self.places):
            values[place.value] = replace(
                seen.values.get(place.value, Statistics((), (), ())),
                amax=_largest(totals["amax"][:, number]),
                squares=tuple(totals["squares"][:, number].tolist()),
                elements=tuple(map(int, totals["elements"][:, number])),
                channels=channels.get(place.value, ()),
            )
        return replace(seen, values=values, layers=self.facts(values, seen.rows))

    def facts(self, values: Mapping[str, Statistics], rows: int) -> dict[str, LayerFacts]:
        """Say what the layers are, and how many multiply-adds a row of theirs takes."""
        return {
            name: replace(layer.facts, macs=layer.macs(values, rows) if rows else 0)
            for name, layer in self._layers.items()
        }


@dataclass(frozen=True)
class _Counted:
    """What is to be known of a layer for its multiply-adds, before its node is lowered."""

    facts: LayerFacts
    output: str
    inner: int
    heads: int

    @classmethod
    def of(cls, layer: Layer) -> "_Counted":
        inputs = tuple(str(measured(layer, place).name) for place in layer.activations)
        shape = layer.node.inputs[0].shape if layer.node.inputs[0] is not None else None
        heads = shape[1] if shape is not None and len(shape) == 4 and isinstance(shape[1], int) else 0
        facts = LayerFacts(layer.module, layer.operator, 0, inputs)
        return cls(facts, str(layer.node.outputs[0].name), layer.inner, heads)

    def macs(self, values: Mapping[str, Statistics], rows: int) -> int:
        """Count the multiply-adds of a row; 0 where the graph does not say how large an attention's heads are."""
        if self.facts.operator == "attention":
            query, key, value = (sum(values[given].elements) / rows for given in self.facts.inputs)
            # H·Tq·d, H·Tk·d and H·Tk·e elements: Tq·Tk·d multiply-adds a head for the scores, Tq·Tk·e for the result
            return round(query * (key + value) / (self.heads * self.inner)) if self.heads and self.inner else 0
        output = values.get(self.output)
        return round(sum(output.elements) / rows) * self.inner if output else 0


class RoundingErrors(Measurement):
    """Squared errors of rounding every input of a layer, at several clips around its largest magnitude."""

    name = ERROR

    def __init__(self, seen: Component, formats: Sequence[EightBits]) -> None:
        self._seen, self._formats = seen, formats
        self._tried: dict[str, list[Candidate]] = {}

    def prepare(self, model: "ir.Model") -> bool:
        """Try the clips around what was seen before."""
        tried = {}
        for value in _layer_inputs(model):
            statistics = self._seen.values[str(value.name)]
            candidates = [
                Candidate(name, index, clips=GRID**index < statistics.largest)
                for name in self._formats
                for index in tried_clips(statistics, name)
            ]
            if candidates:
                tried[value] = candidates
                self._tried[str(value.name)] = candidates
        if tried:
            add_rounding_errors(model.graph, tried.items())
        return bool(tried)

    def read(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Give an error a candidate."""
        units = np.array([one.unit for candidates in self._tried.values() for one in candidates])
        return {"errors": np.nan_to_num(outputs.pop(ERRORS) * units, nan=_HUGE, posinf=_HUGE)}

    def totals(self, seen: Component) -> dict[str, Array]:
        """Give what a cache holds, as arrays."""
        found = [
            seen.values[name].errors.get(one.format, {}).get(one.index, 0.0)
            for name, candidates in self._tried.items()
            for one in candidates
        ]
        return {"errors": np.array(found, np.float64)}

    def into(self, seen: Component, totals: Arrays) -> Component:
        """Give a cache that holds these."""
        numbers, values = iter(totals["errors"].tolist()), dict(seen.values)
        for name, candidates in self._tried.items():
            errors: dict[str, dict[int, float]] = {}
            for one in candidates:
                errors.setdefault(one.format, {})[one.index] = next(numbers)
            values[name] = replace(values[name], errors={**values[name].errors, **errors})
        return replace(seen, values=values)


class Counts(Measurement):
    """How many elements of every input of a layer lie beyond edges of the grid."""

    name = COUNT

    def __init__(self, seen: Component) -> None:
        self._seen = seen
        self._edges: dict[str, tuple[int, ...]] = {}

    def prepare(self, model: "ir.Model") -> bool:
        """Count beyond the edges below what was seen before."""
        edges = {value: counted_edges(self._seen.values[str(value.name)]) for value in _layer_inputs(model)}
        edges = {value: indexes for value, indexes in edges.items() if indexes}
        self._edges = {str(value.name): indexes for value, indexes in edges.items()}
        if edges:
            add_counts(model.graph, edges.items())
        return bool(edges)

    def read(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Give a count an edge."""
        return {"beyond": outputs.pop(COUNTS).astype(np.float64)}

    def totals(self, seen: Component) -> dict[str, Array]:
        """Give what a cache holds, as arrays."""
        found = [seen.values[name].beyond.get(index, 0) for name, edges in self._edges.items() for index in edges]
        return {"beyond": np.array(found, np.float64)}

    def into(self, seen: Component, totals: Arrays) -> Component:
        """Give a cache that holds these."""
        numbers, values = iter(totals["beyond"].tolist()), dict(seen.values)
        for name, edges in self._edges.items():
            values[name] = replace(values[name], beyond={index: int(next(numbers)) for index in edges})
        return replace(seen, values=values)


class LayerNoise(Measurement):
    """What rounding its operands does to the result of every layer.

    int8 is smoothed in linear layers, as in the recipe, and says nothing of attention. Weights have scales of their
    largest magnitude, and attention's softmax is exact: in both E4M3 may do a little better or worse when it is built.
    """

    name = NOISE
    lean = True

    def __init__(self, seen: Component, formats: Sequence[EightBits], method: Method) -> None:
        self._seen, self._formats, self._method = seen, formats, method
        self._layers: dict[str, str] = {}
        """Layer → operator."""

    def prepare(self, model: "ir.Model") -> bool:
        """Repeat every layer on rounded operands."""
        found = list(layers(model.graph))
        self._layers = {layer.name: layer.operator for layer in found}
        factors = factors_of(found, self._seen.values, ALPHA) if "int8" in self._formats else {}
        asked = [(layer, [self._rounded(layer, name, factors) for name in self._formats]) for layer in found]
        if asked:
            add_layer_noise(model.graph, asked)
        return bool(asked)

    def _rounded(self, layer: Layer, name: EightBits, factors: Mapping[str, Array]) -> Rounded:
        names = [str(measured(layer, place).name) for place in layer.activations]
        if name == "int8" and layer.operator == "linear":
            (value,) = names
            return Rounded(name, (smoothed_clip(self._seen.values[value], factors[value]),), factors[value])
        return Rounded(name, tuple(clip_of(self._seen.values[value], name, self._method) for value in names))

    def read(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """Give signal and noises of every layer."""
        noise = outputs.pop(NOISE_OUTPUT).astype(np.float64)
        return {"noise": np.nan_to_num(noise, nan=_HUGE, posinf=_HUGE)}

    def totals(self, seen: Component) -> dict[str, Array]:
        """Give what a cache holds, as arrays."""
        found = np.zeros((len(self._layers), 1 + len(self._formats)))
        for column, name in enumerate(self._formats, start=1):
            for row, layer in enumerate(self._layers):
                kept = seen.noise.get(name, {}).get(layer)
                if kept is not None:
                    found[row, 0], found[row, column] = kept.signal, kept.noise
        return {"noise": found}

    def into(self, seen: Component, totals: Arrays) -> Component:
        """Give a cache that holds these."""
        table: list[list[float]] = totals["noise"].tolist()
        noise: dict[str, Mapping[str, Noise]] = {
            name: {
                layer: Noise(row[0], row[column])
                for (layer, operator), row in zip(self._layers.items(), table, strict=True)
                if name != "int8" or operator != "attention"
            }
            for column, name in enumerate(self._formats, start=1)
        }
        return replace(seen, noise={**seen.noise, **noise})


_HUGE = 1e300
"""Stands for a sum that overflowed float32."""


def finished(seen: Component) -> Component:
    """Give a component as it is written down once nothing will be added to it: sums with few digits."""
    values = {
        name: replace(
            one,
            squares=tuple(map(rounded, one.squares)),
            errors={kind: {index: rounded(error) for index, error in of.items()} for kind, of in one.errors.items()},
        )
        for name, one in seen.values.items()
    }
    noise = {
        kind: {layer: Noise(rounded(one.signal), rounded(one.noise)) for layer, one in of.items()}
        for kind, of in seen.noise.items()
    }
    return replace(seen, values=values, noise=noise)


def _largest(numbers: Array) -> tuple[float, ...]:
    return tuple(map(rounded, numbers.tolist()))


def _layer_inputs(model: "ir.Model") -> "list[ir.Value]":
    found: dict[Any, None] = {}
    for layer in layers(model.graph):
        found |= dict.fromkeys(measured(layer, place) for place in layer.activations)
    return list(found)
