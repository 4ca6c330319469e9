"""One component of an export, opened with a measurement in its graph."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtdiff.backends.onnxruntime import MODEL, OnnxRuntime
from trtdiff.calibrate.cache import Component
from trtdiff.calibrate.measurements import Measurement
from trtdiff.errors import ArtefactError, NonFiniteError
from trtdiff.lowered import read_graph, write_graph
from trtdiff.passes.check_graph import check_graph
from trtdiff.passes.widen_weights import widen_weights
from trtdiff.types import Array
from trtdiff.whole import filling


class _Measuring(OnnxRuntime):
    """ONNX Runtime that runs a node as soon as it can, and rounds nowhere but where the graph says so.

    Its usual order goes back from the outputs, and would leave the observers for the end, with every value kept until
    then: 641 MB of activations instead of 85 for a UNet of 211 M weights at 32 by 32 latents.
    """

    def __init__(self, *, lean: bool) -> None:
        super().__init__()
        self._lean = lean

    def _options(self, ort: Any, threads: int) -> Any:
        options = super()._options(ort, threads)
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.enable_mem_pattern = False  # one block for all values of an execution: larger, and no faster
        if self._lean:  # neither packed for products nor laid out for blocks of channels: the mapped file is read
            options.add_session_config_entry("session.disable_prepacking", "1")
            options.enable_cpu_mem_arena = False
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        return options


class Opened:
    """A session of the exported graph in float32, and what its measurement has seen so far.

    What executions find is kept apart until `count` adds it to the totals, all at once, or `discard` forgets it.
    """

    def __init__(
        self,
        component: str,
        graph: Path,
        scratch: Path,
        measurement: Measurement,
        seen: Component,
        *,
        done: int = 0,
        after: Callable[[str], None] = lambda component: None,  # noqa: ARG005
    ) -> None:
        """Lower `graph` into the new folder `scratch`, where its widened weights stay as long as this is open.

        `seen` is what a cache holds of it after `done` samples. `after` is called after every execution.
        """
        from trtdiff.lowering import named

        model = read_graph(graph)
        self.component, self._after, self._measurement = component, after, measurement
        self.measures = measurement.prepare(model)
        check_graph(model)
        backend = _Measuring(lean=measurement.lean)
        for run in (widen_weights, *map(named, backend.passes)):
            run(model)
        check_graph(model)
        try:
            with filling(scratch, scratch):
                scratch.mkdir(parents=True)
                write_graph(model, scratch, keep=False).rename(scratch / MODEL)
        except FileNotFoundError as error:
            raise ArtefactError(f"a file of the export is gone: {error.filename}", where=str(graph),
                                hint="bring it back, or export again") from None  # fmt: skip
        self._session = backend.load(scratch)
        self._before = seen
        self._state = (done, seen.rows, measurement.totals(seen) if self.measures else {})
        self._found: list[tuple[int, dict[str, Array]]] = []
        self.context = ""
        """What is being executed, in words, for errors."""

    @property
    def done(self) -> int:
        """Samples that were counted."""
        return self._state[0]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Execute once and look. Raises NonFiniteError, which names the first value that is not finite."""
        outputs = self._session.run(feeds)
        if self.measures:
            found = self._measurement.read(outputs)
            place = self._measurement.not_finite(found)
            if place is not None:
                what = self.context or f"execution {len(self._found) + 1} of the sample"
                raise NonFiniteError(
                    "the checkpoint itself computes values that are not finite, in float32",
                    where=f"{self.component}: first in {place}, {what}",
                    hint="see whether PyTorch gives a picture for the same prompt in float32; if so, please report it",
                )
            self._found.append((len(next(iter(feeds.values()))), found))
        self._after(self.component)
        return outputs

    def count(self, band: int = 0) -> None:
        """Count what was executed since the last time as a sample of this band."""
        done, rows, totals = self._state
        for more, found in self._found:
            rows += more
            totals = self._measurement.fold(totals, found, band)
        self._found = []
        self._state = (done + 1, rows, totals)  # one assignment: an interruption finds the one or the other

    def discard(self) -> None:
        """Forget what was executed since the last time."""
        self._found = []

    def seen(self) -> Component:
        """Give what is known of the component by now."""
        _, rows, totals = self._state
        if not self.measures:
            return self._before
        known = replace(self._before, rows=rows) if self._measurement.name == "range" else self._before
        return self._measurement.into(known, totals)

    def close(self) -> None:
        """Free the session."""
        self._session.close()
