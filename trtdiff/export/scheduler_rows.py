"""Read a diffusers scheduler as rows of coefficients: run it over basis vectors, and shorten what it remembers.

Schedulers act element by element and are affine in latents, predictions and noises. So one run in which every latent,
prediction and noise is handed in as a *new* basis vector makes the scheduler spell out each step: after call i the
"latent" it returns is the vector of coefficients of x_{i+1} on [x_0, pred_0, noise_0, …, x_i, pred_i, noise_i]. The
next call is given the basis vector of x_{i+1} instead of that result, so nothing accumulates, and most schedulers are
seen to look back on one to four entries only.

Some remember a latent that was never handed out (UniPC and SA-Solver correct the last one) and so look back to the
start. But x_j in the window obeys its own row, x_j - row_j · basis = 0, and a combination of these equations cancels
everything older than the window; least squares finds it, and what it leaves is the residual.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from trtdiff.errors import SamplerError
from trtdiff.export.schedule_call import ScheduleCall
from trtdiff.latent_log import ENTRY

Row = npt.NDArray[np.float64]

SAME = 1e-12  # relative; least squares in float64 leaves 1e-15


class RefusedSteps(Exception):  # noqa: N818 - a refusal, caught where step counts are listed
    """The scheduler does not run at this number of steps; the message is its own reason."""


@dataclass
class Run:
    """What one run of the scheduler spelled out; column 3 j + k of a row is entry j's latent, prediction or noise."""

    first: int
    """Call of the full schedule that this run begins with."""
    clean: float
    noise: float
    """x_0 = clean · x_{-1} + noise · noise_{-1}."""
    timesteps: npt.NDArray[np.float64]
    """What the model is given."""
    rows: list[Row] = field(default_factory=list)
    """Row of x_{first + 1}, x_{first + 2}, …"""
    scales: list[float] = field(default_factory=list)
    draws: list[bool] = field(default_factory=list)
    states: list[Mapping[str, Any]] = field(default_factory=list)
    """What the scheduler holds after each of these calls."""
    known: list[tuple[float, float]] = field(default_factory=list)
    """x_{first + 1}, x_{first + 2}, … where a mask keeps the picture: coefficients of the clean latent and of the first
    noise. None for the result, which is the clean latent."""
    no_mask: str = ""
    """Why `known` ends early, where it does."""
    shortened: dict[tuple[int, int], Row] = field(default_factory=dict)
    """Tensors of the states, by id and call, shortened to the window: every start compares with the same ones."""

    def shorten(self, vector: Row, upto: int, window: int) -> tuple[Row, float]:
        """Rewrite a vector over the entries before `upto` so that only the last `window` of them appear.

        Gives the vector and what is left over: its largest older coefficient, relative to the largest given one.
        """
        begin, old = ENTRY * self.first, ENTRY * max(upto - window, 0)
        if not vector[:old].any():
            return vector, 0.0
        latents = [x for x in range(max(upto - window, 0), upto) if 0 <= x - 1 - self.first < len(self.rows)]
        short = vector.copy()
        if latents:
            rows = np.stack([self.rows[x - 1 - self.first] for x in latents])
            weights, *_ = np.linalg.lstsq(rows[:, begin:old].T, vector[begin:old], rcond=1e-12)
            short -= weights @ rows
            short[[ENTRY * x for x in latents]] += weights
        left = float(np.abs(short[:old]).max() / np.abs(vector).max())
        if left < SAME:
            short[:old] = 0
        return short, left

    def coefficients(self, window: int) -> tuple[npt.NDArray[np.float64], float]:
        """Give the rows over the window [len(rows), 3 m], oldest entry first, and the largest residual."""
        out, worst = np.zeros((len(self.rows), ENTRY * window)), 0.0
        for index, row in enumerate(self.rows):
            upto = self.first + index + 1
            short, left = self.shorten(row, upto, window)
            worst = max(worst, left)
            tail = short[ENTRY * max(upto - window, 0) : ENTRY * upto]
            out[index, ENTRY * window - len(tail) :] = tail
        return out, worst


class Prober:
    """A scheduler at one number of steps, ready to be run from any start. The stage must be entered."""

    def __init__(self, stage: "Stage", call: ScheduleCall, steps: int) -> None:
        import torch

        self.stage, self.call, self.steps = stage, call, steps
        self.scheduler = scheduler = stage.scheduler
        stage.restore()  # set_timesteps may rewrite the config
        with _its_reason():
            call.set_timesteps(scheduler, steps)
        _remember(scheduler)
        self._fresh = _copied(vars(scheduler))
        self.calls = len(scheduler.timesteps)
        self.size = ENTRY * (self.calls + 1)
        self.basis = torch.eye(self.size, dtype=torch.float64)[:, None, None, None, :]  # [size, 1, 1, 1, size]

    def run(self, start: int | None, window: int = 1, full: Run | None = None) -> Run:
        """Spell out the rows from a start; with `full`, stop where the scheduler's state is that of the full run.

        From there on the two runs are one: a scheduler is a function of its state and of what it is given.
        """
        scheduler, call = self.scheduler, self.call
        self.stage.restore(self._fresh)
        with _its_reason():
            timesteps = call.timesteps(scheduler, start)
            run = self._begin(start, timesteps)
        for index, timestep in enumerate(timesteps):
            with _its_reason():
                self._step(run, index, timestep)
            if index + 1 < len(timesteps) and not run.no_mask:
                self._keep(run, start, timesteps[index + 1 : index + 2])
            if full is not None and self._agree(run, full, window):
                break
        if not (np.isfinite(run.rows).all() and np.isfinite([*run.scales, run.clean, run.noise]).all()):
            raise RefusedSteps("diffusers' own coefficients are not finite")
        return run

    def _begin(self, start: int | None, timesteps: Any) -> Run:
        clean, noise = self.basis[0], self.basis[1]
        first = self.call.first_latent(self.scheduler, noise, None if start is None else clean, timesteps).flatten()
        values = timesteps.double().numpy()
        return Run(self.calls - len(timesteps), float(first[0]), float(first[1]), values)

    def _step(self, run: Run, index: int, timestep: Any) -> None:
        entry = run.first + index
        latent, prediction, noise = self.basis[ENTRY * entry : ENTRY * (entry + 1)]
        with self.stage.step(noise) as drawn:
            scaled = self.call.model_input(self.scheduler, latent, timestep).flatten()
            row = self.call.step(self.scheduler, prediction, timestep, latent, self.stage)
        if len(drawn) > 1:
            raise SamplerError(
                f"{type(self.scheduler).__name__} draws {len(drawn)} noises in one step; the log has one slot for them",
                hint="choose another scheduler",
            )
        run.rows.append(row.flatten().double().numpy().copy())
        run.scales.append(float(scaled[ENTRY * entry]))
        run.draws.append(bool(drawn))
        run.states.append(_held(self.scheduler))

    def _keep(self, run: Run, start: int | None, timestep: Any) -> None:
        """Ask the scheduler, where it stands now, for the latent that a mask keeps: a row over clean latent and noise.

        Without a start this is strength 1 of an inpainting pipeline, which begins at step 0 like any image to image.
        """
        state = dict(vars(self.scheduler))
        clean, noise = self.basis[:2, ..., :2]
        try:
            with _its_reason():
                if start is None:
                    self.call.timesteps(self.scheduler, 0)
                row = self.call.noised(self.scheduler, clean, noise, timestep).flatten().tolist()
            run.known.append((row[0], row[1]))
            run.no_mask = "" if np.isfinite(row).all() else "diffusers' own noised latent is not finite"
        except RefusedSteps as error:
            run.no_mask = str(error)
        finally:
            vars(self.scheduler).clear()
            vars(self.scheduler).update(state)

    def _agree(self, run: Run, full: Run, window: int) -> bool:
        """Whether the scheduler, after the run's last call, holds what it held there in the full run."""
        import torch

        call = run.first + len(run.rows)  # latent x_call is known now

        def same(a: Any, b: Any) -> bool:
            if a is b:
                return True
            if isinstance(a, list | tuple):
                return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
            if hasattr(a, "numpy") and hasattr(b, "numpy"):
                if a.shape != b.shape or torch.equal(a, b):
                    return bool(a.shape == b.shape)
                one, two = a.flatten().double().numpy(), b.flatten().double().numpy()
                if len(one) == self.size:
                    if (key := (id(b), call)) not in full.shortened:
                        full.shortened[key] = full.shorten(two, call + 1, window)[0]
                    one, two = run.shorten(one, call + 1, window)[0], full.shortened[key]
                return bool(np.abs(one - two).max(initial=0) <= SAME * max(1, np.abs(two).max(initial=0)))
            return type(a) is type(b) and bool(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b)

        ours, theirs = run.states[-1], full.states[call - 1]
        if ours.keys() != theirs.keys():
            return False
        pairs = [(value, theirs[key]) for key, value in ours.items() if value is not theirs[key]]
        return all(same(*pair) for pair in sorted(pairs, key=lambda pair: hasattr(pair[0], "numpy")))  # tensors last


@contextmanager
def _its_reason() -> Iterator[None]:
    """Whatever a scheduler raises is the reason why it does not run."""
    try:
        yield
    except (SamplerError, RefusedSteps):
        raise
    except Exception as error:
        raise RefusedSteps(f"{type(error).__name__}: {error}".removesuffix(": ")) from error


_REPLACING = threading.RLock()


class Stage:
    """A context in which a scheduler runs over basis vectors; it also stands in for the image's generator.

    Noise is the vector of the step, and casts to float32 keep float64: several steps cast the latent to float32 so that
    half-precision pipelines lose nothing, and here that would only round coefficients. For this the names `torch` and
    `randn_tensor` of the scheduler's modules are replaced while inside; `torch` is itself except during a step.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._pristine = _copied(vars(scheduler))
        self._noise: Any = None
        self._drawn: list[Any] = []
        self._undo = ExitStack()

    def restore(self, state: Mapping[str, Any] | None = None) -> None:
        """Put the scheduler back into a state, or into the one it came in."""
        vars(self.scheduler).clear()
        vars(self.scheduler).update(_copied(self._pristine if state is None else state))

    @contextmanager
    def step(self, noise: Any) -> Iterator[list[Any]]:
        """Let the scheduler take one step with this noise; gives the list of its draws."""
        self._noise, self._drawn = noise, []
        try:
            yield self._drawn
        finally:
            self._noise = None

    def __enter__(self) -> Self:
        import torch

        stage = self

        def randn_tensor(shape: Any, generator: Any = None, **_: Any) -> Any:
            if generator is not stage:
                raise SamplerError(
                    f"{type(stage.scheduler).__name__} draws noise from elsewhere than the image's generator",
                    hint="choose another scheduler",
                )
            stage._drawn.append(stage._noise)
            return stage._noise.reshape(shape)

        double = _DoubleTorch(lambda: stage._noise is not None)
        self._undo.enter_context(replaced(self.scheduler, torch=double, randn_tensor=randn_tensor))
        self._undo.enter_context(torch.inference_mode())
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        self.restore()


@contextmanager
def replaced(scheduler: Any, **replacements: Any) -> Iterator[None]:
    """Replace names in the modules that the scheduler's methods come from, while inside; other threads wait.

    Were two inside at once, the one that leaves last would put back what the other had replaced.
    """
    modules = {cls.__module__ for cls in type(scheduler).__mro__ if cls.__module__.startswith("diffusers.schedulers")}
    with _REPLACING, ExitStack() as undo:
        for module in modules:
            for name in replacements.keys() & vars(sys.modules[module]).keys():
                undo.enter_context(patch.object(sys.modules[module], name, replacements[name]))
        yield


@contextmanager
def in_double(scheduler: Any) -> Iterator[None]:
    """Let the scheduler's steps keep float64 where they would cast to float32, while inside."""
    own = scheduler.step

    @wraps(own)
    def step(*args: Any, **options: Any) -> Any:
        with replaced(scheduler, torch=_DoubleTorch(lambda: True)):
            return own(*args, **options)

    with patch.object(scheduler, "step", step):
        yield


class _DoubleTorch:
    """The module `torch`, but for its `float32`, which is float64 when `active` says so."""

    def __init__(self, active: Callable[[], bool]) -> None:
        self._active = active

    def __getattr__(self, name: str) -> Any:
        import torch

        return torch.float64 if name == "float32" and self._active() else getattr(torch, name)


def _remember(scheduler: Any) -> None:
    """Compute once what every start asks for again: a quarter of the time, where a scheduler has these methods."""
    if hasattr(scheduler, "get_lms_coefficient"):  # a numerical integral
        scheduler.get_lms_coefficient = cache(type(scheduler).get_lms_coefficient.__get__(scheduler))
    if hasattr(scheduler, "_sigma_to_alpha_sigma_t"):
        own, known = type(scheduler)._sigma_to_alpha_sigma_t.__get__(scheduler), {}  # noqa: SLF001

        def alpha_sigma(sigma: Any) -> Any:
            if sigma.ndim:
                return own(sigma)
            key = (sigma.item(), sigma.dtype)
            if key not in known:
                known[key] = own(sigma)
            return known[key]

        scheduler._sigma_to_alpha_sigma_t = alpha_sigma  # noqa: SLF001


def _held(scheduler: Any) -> dict[str, Any]:
    """Copy what a scheduler remembers, without what cannot matter to the steps to come."""
    state = _copied(vars(scheduler))
    state.pop("_begin_index", None)  # read once, before the first step
    if "counter" in state:  # PNDM counts its calls, and asks only: 0, 1, or still in the Runge-Kutta part?
        state["counter"] = min(state["counter"], max(2, len(state.get("prk_timesteps", ()))))
    return state


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy lists, which schedulers append to, and latents, which PNDM adds to; nothing else is changed in place."""

    def copy(value: Any) -> Any:
        if isinstance(value, list):
            return list(value)
        return value.clone() if getattr(value, "ndim", 0) >= 4 else value

    return {name: copy(value) for name, value in state.items()}
