"""How far a TensorRT build is, as one fraction that never falls, and a way to stop it.

The library tells when a phase begins (with the number of its steps and the phase that it is part of), when a step is
done, and when the phase ends. A phase that begins counts towards the step that its parent is at. Several phases may
begin within one step, so the fraction is held where it has been rather than let fall.

TensorRT for RTX says nothing for most of a build, since it compiles within a single step (SD1.5's UNet: 20 of 29 s).
So what it has read of the weights, and what it has written of the plan, count as well.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

STEPS = 1000
"""The build's whole, in what `progress` is called with."""


class Told:
    """Measures of one build, by name, summed up for `progress(done, STEPS)`.

    An exception of `progress`, an interrupt included, cannot pass through the library: `problem` keeps the first one,
    and nothing is told any more. Whoever builds raises it afterwards. May be called from several threads.
    """

    def __init__(self, progress: Callable[[int, int], None], shares: Mapping[str, float]) -> None:
        """`shares` are how much each measure counts; together 1."""
        self.problem: BaseException | None = None
        self._progress, self._shares = progress, shares
        self._done = dict.fromkeys(shares, 0.0)
        self._told = -1
        self._lock = threading.Lock()

    def tell(self, measure: str, fraction: float) -> None:
        """Note that a measure is so far, from 0 to 1. What is beyond is 1, and what is less than before is nothing."""
        with self._lock:
            self._done[measure] = max(self._done[measure], min(fraction, 1.0))
            done = round(STEPS * sum(share * self._done[name] for name, share in self._shares.items()))
            if done <= self._told or self.problem is not None:
                return
            self._told = done
            try:
                self._progress(done, STEPS)
            except BaseException as error:  # noqa: BLE001
                self.problem = error

    def finish(self) -> None:
        """Note that all is done."""
        for measure in self._shares:
            self.tell(measure, 1)


@dataclass
class _Phase:
    steps: int
    parent: str | None
    done: int = 0
    inner: list[str] = field(default_factory=list)


class Phases:
    """The phases that are under way."""

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._reached = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """Begin a phase, or one of that name anew; inside of itself none can be."""
        above = parent
        while above is not None and above != name:
            above = self._phases[above].parent if above in self._phases else None
        parent = None if above == name else parent
        for phase in self._phases.values():
            if name in phase.inner:
                phase.inner.remove(name)
        self._phases[name] = _Phase(max(steps, 1), parent)
        if parent in self._phases:
            self._phases[parent].inner.append(name)

    def step(self, name: str, step: int) -> None:
        """Note that a step, counted from 0, is done."""
        phase = self._phases.get(name)
        if phase is not None:
            phase.done = min(step + 1, phase.steps)
            phase.inner.clear()

    def finish(self, name: str) -> None:
        """End a phase."""
        phase = self._phases.get(name)
        if phase is not None:
            phase.done = phase.steps
            phase.inner.clear()

    @property
    def fraction(self) -> float:
        """How much is done, from 0 to 1; never less than before."""
        roots = [name for name, phase in self._phases.items() if phase.parent not in self._phases]
        done = sum(map(self._of, roots)) / len(roots) if roots else 0.0
        self._reached = max(self._reached, done)
        return self._reached

    def _of(self, name: str) -> float:
        phase = self._phases[name]
        inner = max(map(self._of, phase.inner), default=0.0)
        return min(phase.done + inner, phase.steps) / phase.steps


def monitor(trt: Any, told: Told, measure: str) -> Any:
    """Make a monitor for a builder's config that tells of its phases as `measure`, and stops it when told to."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._phases = Phases()
            self._lock = threading.Lock()  # the library may call from threads of its own

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with self._lock:
                self._phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            with self._lock:
                self._phases.step(phase_name, step)
                told.tell(measure, self._phases.fraction)
            return told.problem is None

        def phase_finish(self, phase_name: str) -> None:
            with self._lock:
                self._phases.finish(phase_name)
                told.tell(measure, self._phases.fraction)

    return Monitor()
