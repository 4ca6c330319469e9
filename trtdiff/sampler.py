"""The sampler is a table: a whole denoising loop as one row of coefficients for every model call.

Every latent of a diffusers loop is a weighted sum of what came before: earlier latents, predictions and noises. A table
says which weights. With the log of `latent_log.py`, the loop for `calls` model calls is

    x_i    = Σ_k coefficients[i, k] · window_i[k]            i = 0 … calls; the last one is the result
    pred_i = model(scales[i] · x_i, timesteps[i])            i = 0 … calls - 1
    noise_i = the next draw of the image's own stream, where draws[i]

window_i is [x_{i-m}, pred_{i-m}, noise_{i-m}, …, x_{i-1}, pred_{i-1}, noise_{i-1}], K = 3 m slots, oldest first. Entry
-1 is the start: x_{-1} the clean latent of image-to-image (else zeros), pred_{-1} zeros, noise_{-1} the first N(0, 1)
draw. Entries before that do not exist; their coefficients are zero.

A mask that keeps a part of the picture (inpainting by a model that knows nothing of masks) replaces x_i there, for
every i, by what that part is at this point of the loop: known[i, 0] · x_{-1} + known[i, 1] · noise_{-1}. Diffusers does
so after each step. As everything but the model acts element by element, what stands in the log of a kept element never
reaches a painted one.

Tables are made from diffusers' own schedulers by `trtdiff.export.schedulers`; here they are only read and run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from trtdiff.errors import UsageError
from trtdiff.latent_log import ENTRY, LatentLog, slots_for
from trtdiff.types import Array

__all__ = [
    "LatentLog",
    "SamplerBatch",
    "SamplerTable",
    "run_loop",
    "slots_for",
    "stack_tables",
    "start_of_fraction",
    "start_of_strength",
]


@dataclass(frozen=True, eq=False)
class SamplerTable:
    """One scheduler at one number of steps, from one start."""

    name: str
    digest: str
    """sha256 of the scheduler's class, config and schedule call."""
    steps: int
    start: int | None
    """None: text to image, from pure noise. A number: image to image, that many of the steps skipped."""
    coefficients: npt.NDArray[np.float64]  # [calls + 1, 3 m]
    scales: npt.NDArray[np.float64]  # [calls]
    timesteps: npt.NDArray[np.float32]  # [calls]
    draws: npt.NDArray[np.bool_]  # [calls]
    """Whether diffusers draws a noise during the step that follows call i (used or not: the stream moves on)."""
    residual: float
    """Largest coefficient that the window could not express, relative to its row; 0 where nothing was rewritten."""
    order: int = 1
    """Timesteps a step, as diffusers has it: 2 for Heun and KDPM2."""
    known: npt.NDArray[np.float64] | None = None  # [calls + 1, 2]
    """x_i where a mask keeps the picture. The first row is x_0's own, the last is (1, 0); None where the scheduler has
    no way to add noise. Without a start it is strength 1 of an inpainting pipeline, which begins with pure noise."""

    def __post_init__(self) -> None:
        calls, (rows, width) = self.calls, self.coefficients.shape
        entry = np.arange(rows)[:, None] - self.window + np.arange(width)[None] // ENTRY  # that a column means
        kind = np.arange(width) % ENTRY
        drawn = np.append(self.draws, True)[np.clip(entry, -1, calls - 1)]  # the last one is noise_{-1}, always drawn
        where = f"sampler {self.name}, {self.steps} steps, start {self.start}"
        faults = {
            "shapes disagree": width % ENTRY
            or width == 0
            or not rows == calls + 1 == len(self.scales) + 1 == len(self.timesteps) + 1 == len(self.draws) + 1,
            "no model call": calls < 1,
            "a coefficient, scale or timestep is not finite": not all(
                np.isfinite(values).all() for values in (self.coefficients, self.scales, self.timesteps)
            ),
        }
        if not any(faults.values()):
            faults |= {
                "a coefficient is on an entry before the start": self.coefficients[entry < -1].any(),
                "a coefficient is on pred_{-1}": self.coefficients[(entry == -1) & (kind == 1)].any(),
                "a coefficient is on a noise that is not drawn": self.coefficients[~drawn & (kind == 2)].any(),
                "a scale is not positive": (self.scales <= 0).any(),
            } | self._faults_of_known()
        for fault, found in faults.items():
            if found:
                raise UsageError(f"not a sampler table: {fault}", where=where)

    def _faults_of_known(self) -> dict[str, bool]:
        if self.known is None:
            return {}
        if self.known.shape != (self.calls + 1, 2) or not np.isfinite(self.known).all():
            return {"its rows for a mask are not two finite numbers a latent": True}
        first = self.coefficients[0, [-ENTRY, -1]]
        return {
            "with a mask it does not start with its own x_0": not np.array_equal(self.known[0], first),
            "with a mask it does not end with the clean latent": not np.array_equal(self.known[-1], [1, 0]),
        }

    @property
    def calls(self) -> int:
        """Number of model calls; more than the steps for Heun, KDPM2 and the like."""
        return len(self.coefficients) - 1

    @property
    def window(self) -> int:
        """Entries m that a row looks back on."""
        return int(self.coefficients.shape[1]) // ENTRY

    @property
    def stochastic(self) -> bool:
        """Whether any step draws a noise."""
        return bool(self.draws.any())

    def widened(self, window: int) -> "SamplerTable":
        """Give the same table over a longer window: zero columns in front."""
        if window < self.window:
            raise UsageError(f"sampler {self.name} looks back {self.window} entries, not {window}")
        extra = ENTRY * (window - self.window)
        return replace(self, coefficients=np.pad(self.coefficients, ((0, 0), (extra, 0))))

    def until(self, fraction: float, training_steps: int) -> "SamplerTable":
        """Give the first calls only: what a base model does before a refiner takes over at this fraction of the way.

        As `denoising_end` of diffusers' SDXL pipelines; `training_steps` is the scheduler's `num_train_timesteps`. The
        result is a latent that still has noise in it; what a mask keeps is clean at the end, there as here.
        """
        calls = _calls_before(self, fraction, training_steps)
        if calls == 0:
            raise UsageError(
                f"no step of {self.steps} lies before the fraction {fraction:g}", hint="raise it, or ask for more steps"
            )
        known = None if self.known is None else np.concatenate([self.known[:calls], [[1.0, 0.0]]])
        return replace(
            self,
            coefficients=self.coefficients[: calls + 1],
            scales=self.scales[:calls],
            timesteps=self.timesteps[:calls],
            draws=self.draws[:calls],
            known=known,
        )

    def taken_over(self) -> "SamplerTable":
        """Give an image-to-image table that starts from the given latent as it is: somebody else left it half done.

        As `denoising_start` of diffusers' SDXL pipelines, which draw no first noise then (but for a mask).
        """
        if self.start is None:
            raise UsageError(f"sampler {self.name}: only a table with a start can take over a latent")
        coefficients = self.coefficients.copy()
        coefficients[0, [-ENTRY, -1]] = 1, 0
        known = None if self.known is None else np.concatenate([[[1.0, 0.0]], self.known[1:]])
        return replace(self, coefficients=coefficients, known=known)


@dataclass(frozen=True, eq=False)
class SamplerBatch:
    """The tables of a batch's images side by side, in the engine's own layout: index the first axis by the call."""

    coefficients: npt.NDArray[np.float32]  # [calls + 1, K, B]
    timesteps: npt.NDArray[np.float32]  # [calls, B]
    scales: npt.NDArray[np.float32]  # [calls, B]
    draws: npt.NDArray[np.bool_]  # [calls, B]
    known: npt.NDArray[np.float32] | None  # [calls + 1, 2, B]
    """None where one of the tables has none."""

    @property
    def calls(self) -> int:
        """Model calls until every image is done."""
        return len(self.timesteps)

    @property
    def window(self) -> int:
        """Entries m that a row looks back on."""
        return int(self.coefficients.shape[1]) // ENTRY


def stack_tables(tables: Sequence[SamplerTable], window: int | None = None) -> SamplerBatch:
    """Put one table an image side by side, padded to one window and one number of calls.

    An image that is done before the others keeps its latent: its remaining rows copy x_{i-1}, its remaining calls
    repeat the last timestep, and what the model predicts there has coefficient zero. So the last row is right for all.
    """
    if not tables:
        raise UsageError("a batch needs at least one sampler table")
    window = max(table.window for table in tables) if window is None else window
    calls = max(table.calls for table in tables)
    coefficients = np.zeros((calls + 1, ENTRY * window, len(tables)), np.float32)
    timesteps, scales = (np.empty((calls, len(tables)), np.float32) for _ in range(2))
    draws = np.zeros((calls, len(tables)), np.bool_)
    known = np.zeros((calls + 1, 2, len(tables)), np.float32)
    known[:, 0] = 1
    for image, table in enumerate(tables):
        coefficients[: table.calls + 1, :, image] = table.widened(window).coefficients
        coefficients[table.calls + 1 :, -ENTRY, image] = 1
        for target, values in ((timesteps, table.timesteps), (scales, table.scales)):
            target[: table.calls, image] = values
            target[table.calls :, image] = values[-1]
        draws[: table.calls, image] = table.draws
        if table.known is not None:
            known[: table.calls + 1, :, image] = table.known
    complete = all(table.known is not None for table in tables)
    return SamplerBatch(coefficients, timesteps, scales, draws, known if complete else None)


def run_loop(
    table: SamplerTable,
    predict: Callable[[Array, float, int], Array],
    noise: Array,
    *,
    clean: Array | None = None,
    draw: Callable[[], Array] | None = None,
    mask: Array | None = None,
) -> Array:  # [B, C, h, w]
    """Run a table over a latent log in numpy: the reference for every other loop.

    `predict(model_input [B, C, h, w], timestep, call)` is the model. `noise` is the N(0, 1) start [B, C, h, w] and
    gives the number type that the loop computes in; `clean` is image-to-image's latent; `draw()` gives the next noise.
    `mask` [B, 1, h, w] is 1 where the model paints and 0 where the clean latent stays.
    """
    if mask is not None and table.known is None:
        raise UsageError(f"sampler {table.name} cannot keep a part of a picture")
    if mask is not None and clean is None:
        raise UsageError("a mask keeps a part of a picture: that needs a clean latent")
    if clean is None and table.start is not None:
        raise UsageError(f"sampler {table.name} starts at step {table.start}: that needs a clean latent")
    if draw is None and table.stochastic:
        raise UsageError(f"sampler {table.name} draws noises: that needs `draw`")
    log = LatentLog(np.empty((slots_for(table.window), *noise.shape), noise.dtype), table.window)
    log.start(noise, clean)
    rows = table.coefficients.astype(noise.dtype)

    def latent(call: int) -> Array:
        value: Array = np.einsum("k,k...->...", rows[call], log.window)
        if mask is None or clean is None or table.known is None:
            return value
        kept = table.known.astype(noise.dtype)[call]
        mixed: Array = np.where(mask, value, kept[0] * clean + kept[1] * noise)
        return mixed

    for call in range(table.calls):
        log.latent[...] = latent(call)
        scale = noise.dtype.type(table.scales[call])
        log.prediction[...] = predict(scale * log.latent, float(table.timesteps[call]), call)
        if table.draws[call] and draw is not None:
            log.noise[...] = draw()
        log.advance()
    return latent(table.calls)


def start_of_strength(steps: int, strength: float, skips: Literal["more", "fewer"] = "more") -> int:
    """Give the start of image-to-image at this strength: how many of the steps are skipped.

    As `get_timesteps` of diffusers' image-to-image pipelines: Stable Diffusion's round down the steps that are left,
    those of flow matching the steps that are skipped: 4 steps at strength 0.6 skip 2 or 1. Strength 1 skips none, and
    still starts from the noised image.
    """
    if steps < 1:
        raise UsageError(f"{steps} steps", hint="ask for at least one step")
    if not 0 <= strength <= 1:
        raise UsageError(f"strength {strength} is not between 0 and 1")
    left = int(steps * strength) if skips == "more" else steps - int(steps - steps * strength)
    if left < 1:
        raise UsageError(
            f"strength {strength} of {steps} steps leaves no step to run",
            hint=f"raise the strength to {math.ceil(1000 / steps) / 1000:g}, or ask for more steps",
        )
    return steps - left


def start_of_fraction(table: SamplerTable, fraction: float, training_steps: int) -> int:
    """Give the start from which a refiner goes on with what a base model did until this fraction of the way.

    `table` is the text-to-image table of the refiner's scheduler and steps. As `denoising_start` of diffusers' SDXL
    pipelines; the table from this start must then be `taken_over()`.
    """
    calls = _calls_before(table, fraction, training_steps)
    if calls == table.calls:
        raise UsageError(
            f"no step of {table.steps} lies after the fraction {fraction:g}", hint="lower it, or ask for more steps"
        )
    return (table.start or 0) + calls


def _calls_before(table: SamplerTable, fraction: float, training_steps: int) -> int:
    """Count the calls whose timesteps belong to the first part of the way."""
    if not 0 < fraction < 1:
        raise UsageError(
            f"the fraction {fraction:g} leaves one of two models nothing", hint="give one above 0 and below 1"
        )
    if table.order != 1:
        raise UsageError(
            f"sampler {table.name} calls the model {table.order} times a step and cannot be cut between two models",
            hint="choose another scheduler",
        )
    first_left_out = round(training_steps - fraction * training_steps)
    return int((table.timesteps >= first_left_out).sum())
