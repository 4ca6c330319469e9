"""One component of an export, opened with observers, which adds up what it sees."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trtdiff.backends.onnxruntime import OnnxRuntime
from trtdiff.backends.options import BuilderOptions
from trtdiff.calibrate.ranges import ValueRange
from trtdiff.errors import NonFiniteError
from trtdiff.lowered import read_graph, write_graph
from trtdiff.passes.check_graph import check_graph
from trtdiff.passes.observe import observe
from trtdiff.passes.statistics import STATISTICS, amax
from trtdiff.passes.widen_weights import widen_weights
from trtdiff.types import Array, ShapeProfile

if TYPE_CHECKING:
    from trtdiff.passes.statistics import Place

DIGITS = 4
"""Significant digits that are written down: far more than a limit with headroom needs, fewer than another order of sums
changes."""


class _Observing(OnnxRuntime):
    """ONNX Runtime that runs a node as soon as it can.

    Its usual order goes back from the outputs, and would leave the observers for the end, with every value kept until
    then: 641 MB of activations instead of 85 for a UNet of 211 M weights at 32 by 32 latents.
    """

    def _options(self, ort: Any, threads: int) -> Any:
        options = super()._options(ort, threads)
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        return options


class Observed:
    """A session of the exported graph in float32 and, over everything that it ran, the range of every value."""

    def __init__(self, component: str, graph: Path, scratch: Path, *, after: Callable[[], None] = lambda: None) -> None:
        """Lower `graph` into the new folder `scratch`, where its widened weights stay as long as this is open.

        `after` is called after every execution.
        """
        from trtdiff.lowering import named

        model = read_graph(graph)
        self._component, self._after = component, after
        self._places: tuple[Place, ...] = observe(model)
        check_graph(model)
        backend = _Observing()
        for run in (widen_weights, *map(named, backend.passes)):
            run(model)
            check_graph(model)
        lowered, engine = scratch / "lowered", scratch / "engine"
        for folder in (lowered, engine):
            folder.mkdir(parents=True)
        written = write_graph(model, lowered)
        backend.build(written, ShapeProfile({}), BuilderOptions(), engine, lambda done, total: None)  # noqa: ARG005
        self._session = backend.load(engine)
        values = len(self._places)
        self._amax, self._squares, self._elements = np.zeros(values), np.zeros(values), np.zeros(values)
        self.calls = 0

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Execute once and look. Raises NonFiniteError, which names the first value that is not finite."""
        outputs = self._session.run(feeds)
        seen = outputs.pop(STATISTICS)
        largest = amax(seen)
        if not np.isfinite(largest).all():
            place = self._places[int(np.argmin(np.isfinite(largest)))]
            raise NonFiniteError(
                "the checkpoint itself computes values that are not finite, in float32",
                where=f"{self._component}: first in {place}, execution {self.calls + 1}",
                hint="see whether PyTorch gives a picture for the same prompt in float32; if so, please report it",
            )
        self._amax = np.maximum(self._amax, largest)
        self._squares += seen[2]
        self._elements += seen[3]
        self.calls += 1
        self._after()
        return outputs

    def ranges(self) -> dict[str, ValueRange]:
        """Give the range of every observed value, in the order of the graph."""
        with np.errstate(divide="ignore", invalid="ignore"):
            rms = np.minimum(np.sqrt(self._squares / self._elements), self._amax)  # squares of 1e16 may overflow
        return {
            place.value: ValueRange(_rounded(largest), _rounded(mean))
            for place, largest, mean in zip(self._places, self._amax.tolist(), rms.tolist(), strict=True)
        }

    def close(self) -> None:
        """Free the session."""
        self._session.close()


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
