"""The denoising loop: one engine execution a step, on buffers and calls that were prepared before.

Everything that a step reads lies ready when the loop begins: the window of the latent log, this step's coefficients,
timestep and scale as rows of arrays for the whole run, conditions and guidance weights. Call i always sees the same
addresses, so it is bound once and used again by every later request of the same shape.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trtdiff.backends.base import Session
from trtdiff.backends.blame import first_non_finite
from trtdiff.errors import NonFiniteError, UsageError
from trtdiff.latent_log import ENTRY, LatentLog, slots_for
from trtdiff.noise import TorchStream
from trtdiff.noise_ahead import NoiseAhead
from trtdiff.sampler import SamplerTable, run_loop, stack_tables
from trtdiff.types import Array

_ROWS = 32
"""Calls that the arrays of coefficients grow by."""


@dataclass(frozen=True)
class Start:
    """What a batch of pictures starts from, and where its noises come from."""

    noise: Array  # [B, C, h, w], the first N(0, 1) draw
    clean: Array | None  # [B, C, h, w], image-to-image only
    streams: Sequence[TorchStream]
    """One a picture, standing right after its first draws."""
    mask: Array | None = None  # [B, 1, h, w], 1 where it is painted anew; the sampler keeps `clean` elsewhere

    def draw(self, out: Array | None = None) -> Array:  # [B, C, h, w]
        """Draw every picture's next noise from its own stream."""
        out = np.empty_like(self.noise) if out is None else out
        for image, stream in enumerate(self.streams):
            out[image] = stream.randn((1, *out.shape[1:]))[0]
        return out


@dataclass(frozen=True)
class Finished:
    """The end of a loop: what the decoder needs, and how long each step took."""

    feeds: Mapping[str, Array]
    """Window, the table's last coefficients, and what belongs to a mask."""
    seconds: Sequence[float]
    """One a model call: the engine and the host's work around it, without what `after` does."""


class DenoisingLoop:
    """Buffers for one shape of request, and one prepared call a step. Not thread-safe, as its session is not."""

    def __init__(
        self, session: Session, noise: Sequence[int], conditions: Mapping[str, Sequence[int]], window: int
    ) -> None:
        """`noise` is the shape [B, C, h, w], `conditions` the shapes [G, B, …] by name, `window` the entries m."""
        self._session = session
        self._types = {spec.name: spec.dtype for spec in (*session.inputs, *session.outputs)}
        self._window = window
        self._batch = noise[0]
        self._log = LatentLog(self._allocate("window", (slots_for(window), *noise)), window)
        branches = next(iter(conditions.values()))[0]
        self._fixed = {name: self._allocate(name, shape) for name, shape in conditions.items()}
        self._fixed["guidance"] = self._allocate("guidance", (branches, self._batch))
        self._fixed["rescale"] = self._allocate("rescale", (self._batch,))
        self._kept = {}
        if "known" in self._types:
            self._kept = {
                "mask": self._allocate("mask", (noise[0], 1, *noise[2:])),
                "known": self._allocate("known", (2, *noise)),
            }
        self._rows: dict[str, Array] = {}
        self._calls: list[Callable[[], None]] = []

    def run(
        self,
        table: SamplerTable,
        start: Start,
        conditions: Mapping[str, Array],
        guidance: Array,  # [G]
        *,
        rescale: float = 0.0,
        watch: bool = False,
        after: Callable[[Array], None] | None = None,
    ) -> Finished:
        """Run one batch; the window it returns is valid until the next run.

        `watch` looks at every prediction and raises NonFiniteError at the first that is not finite. `after` is given
        the latent [B, C, h, w] that a call's prediction belongs to, as a view that the next calls overwrite.
        """
        log = self._log
        log.start(start.noise, start.clean)
        for name, value in conditions.items():
            self._fixed[name][...] = value
        self._fixed["guidance"][...] = guidance[:, None]
        self._fixed["rescale"][...] = rescale
        self._keep(start)
        self._write_rows(table)
        draws, seconds = table.draws.tolist(), []
        with NoiseAhead(start.draw, start.noise.shape, int(table.draws.sum())) as noises:
            before = time.perf_counter()
            for number in range(table.calls):
                if number == len(self._calls):
                    self._calls.append(self._bind(number))
                self._calls[number]()
                if watch:
                    what = f"the denoiser's prediction at step {number + 1} of {table.calls}"
                    check_finite(log.prediction, what, lambda number=number: self._blame(number))  # type: ignore[misc]
                if draws[number]:
                    log.noise[...] = noises.take()
                log.advance()
                seconds.append(time.perf_counter() - before)
                if after is not None:
                    after(log.window[-ENTRY])
                before = time.perf_counter()
        last = {
            name: self._rows[name][table.calls] for name in self._rows.keys() & {"coefficients", "known_coefficients"}
        }
        return Finished({"window": log.window, **last, **self._kept}, seconds)

    def _keep(self, start: Start) -> None:
        """Write down what a mask keeps; without one, everything is painted."""
        if self._kept:
            self._kept["mask"][...] = 1 if start.mask is None else start.mask
            self._kept["known"][0] = 0 if start.clean is None else start.clean
            self._kept["known"][1] = start.noise

    def _blame(self, number: int) -> str:
        """Say which layer is to blame for what call `number` gave; the log still stands where that call found it."""
        rows = {name: values[number] for name, values in self._rows.items()}
        return first_non_finite(self._session, {"window": self._log.window, **rows, **self._fixed, **self._kept})

    def _write_rows(self, table: SamplerTable) -> None:
        """Lay the table out for every call, growing the arrays where it has more calls than any before."""
        stacked = stack_tables([table] * self._batch, self._window)
        if not self._rows or table.calls > len(self._rows["timestep"]):
            calls = -(-table.calls // _ROWS) * _ROWS
            width = ENTRY * self._window
            self._rows = {
                "coefficients": self._allocate("coefficients", (calls + 1, width, self._batch)),
                "timestep": self._allocate("timestep", (calls, self._batch)),
                "scale": self._allocate("scale", (calls, self._batch)),
            }
            if self._kept:
                self._rows["known_coefficients"] = self._allocate("known_coefficients", (calls + 1, 2, self._batch))
            self._calls.clear()
        self._rows["coefficients"][: table.calls + 1] = stacked.coefficients
        self._rows["timestep"][: table.calls] = stacked.timesteps
        self._rows["scale"][: table.calls] = stacked.scales
        if self._kept:
            self._rows["known_coefficients"][: table.calls + 1] = 0 if stacked.known is None else stacked.known

    def _bind(self, number: int) -> Callable[[], None]:
        """Prepare call `number`; the log stands where that call always finds it."""
        rows = {name: values[number] for name, values in self._rows.items()}
        log = self._log
        views = {"window": log.window, "latent": log.latent, "prediction": log.prediction}
        return self._session.bind({**views, **rows, **self._fixed, **self._kept})

    def _allocate(self, name: str, shape: Sequence[int]) -> Array:
        return self._session.allocate(shape, self._types[name])


def run_on_host(
    session: Session,
    table: SamplerTable,
    start: Start,
    conditions: Mapping[str, Array],
    guidance: Array,
    *,
    slots: int,
    rescale: float = 0.0,
    after: Callable[[], None] | None = None,
) -> Finished:
    """Run one batch with the sampler in numpy and the engine as a plain denoiser. For looking at it, not for speed.

    `slots` is the K that the engine was built for: the latent goes to the last slot with coefficient 1.
    """
    batch = len(start.noise)
    window = np.zeros((slots, *start.noise.shape), np.float32)
    coefficients = np.zeros((slots, batch), np.float32)
    coefficients[-1] = 1
    types = {spec.name: spec.dtype for spec in session.inputs}
    painted: dict[str, Array] = {}
    if "known" in types:
        painted = {
            "mask": np.ones((batch, 1, *start.noise.shape[2:]), types["mask"]),
            "known": np.zeros((2, *start.noise.shape), types["known"]),
            "known_coefficients": np.zeros((2, batch), types["known_coefficients"]),
        }
    fixed = {
        **conditions,
        **painted,
        "guidance": np.repeat(guidance[:, None], batch, axis=1),
        "rescale": np.full(batch, rescale),
        "coefficients": coefficients,
    }
    seconds = []

    def predict(model_input: Array, timestep: float, call: int) -> Array:
        began = time.perf_counter()
        window[-1] = model_input
        feeds = {**fixed, "window": window, "timestep": np.full(batch, timestep), "scale": np.ones(batch)}
        feeds = {spec.name: feeds[spec.name].astype(spec.dtype, copy=False) for spec in session.inputs}
        outputs = session.run(feeds)
        what = f"the denoiser's prediction at step {call + 1} of {table.calls}"
        check_finite(outputs["prediction"], what, lambda: first_non_finite(session, feeds))
        seconds.append(time.perf_counter() - began)
        if after is not None:
            after()
        return outputs["prediction"]

    window[-1] = run_loop(table, predict, start.noise, clean=start.clean, draw=start.draw, mask=start.mask)
    return Finished({"window": window, "coefficients": coefficients, **painted}, seconds)


def slots_of(engine: int, table: SamplerTable) -> int:
    """Give K for a table: what the engine was built for (0: any), or what the table needs."""
    needed = ENTRY * table.window
    if engine and needed > engine:
        raise UsageError(
            f"scheduler {table.name} looks back on {table.window} entries, the engine on {engine // ENTRY}",
            hint="build the bundle with this scheduler, or run it with the host loop",
        )
    return engine or needed


def check_finite(values: Array, what: str, blame: Callable[[], str] = lambda: "") -> None:
    """Raise NonFiniteError for NaN or infinity, naming the first picture of a batch [B, …] that has it.

    `blame` is asked only then; it says where the first such value comes from.
    """
    if np.isfinite(values).all():
        return
    image = int(np.argmin(np.isfinite(values.reshape(len(values), -1)).all(axis=1)))
    which = f" (picture {image + 1} of {len(values)} in the batch)" if len(values) > 1 else ""
    raise NonFiniteError(
        f"{what} is not finite{which}",
        where=blame(),
        hint="where the precision is fp16, build with one of a larger range (bf16, or fp32 for this component)",
    )
