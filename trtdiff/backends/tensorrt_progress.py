"""How far a TensorRT build is: its nested phases as one fraction that never falls, and a way to stop it.

The library tells when a phase begins (with the number of its steps and the phase that it is part of), when a step is
done, and when the phase ends. A phase that begins counts towards the step that its parent is at. Several phases may
begin within one step, so the fraction is held where it has been rather than let fall.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

STEPS = 1000
"""The build's whole, in what `progress` is called with."""


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
        """Begin a phase."""
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


def monitor(trt: Any, progress: Callable[[int, int], None]) -> Any:
    """Make a monitor for a builder's config, whose `problem` is what `progress` raised.

    An exception, an interrupt included, cannot pass through the library: it is kept, and the build is asked to stop.
    Whoever builds raises it afterwards.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.problem: BaseException | None = None
            self._phases = Phases()
            self._told = -1
            self._lock = threading.Lock()  # the library may call from threads of its own

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._tell(lambda: self._phases.start(phase_name, parent_phase, num_steps))

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._tell(lambda: self._phases.step(phase_name, step))
            return self.problem is None

        def phase_finish(self, phase_name: str) -> None:
            self._tell(lambda: self._phases.finish(phase_name))

        def _tell(self, change: Callable[[], None]) -> None:
            try:
                with self._lock:
                    change()
                    done = int(self._phases.fraction * STEPS)
                    if done > self._told and self.problem is None:
                        self._told = done
                        progress(done, STEPS)
            except BaseException as error:  # noqa: BLE001
                self.problem = error

    return Monitor()
