"""Is the scheduler what its table says? Run diffusers' own loop, at real amplitudes.

Basis vectors are small, so a clip or a threshold would not show on them. Here the start is diffusers' own, N(0, 1)
times the largest sigma, and predictions are as large as a network's. Whatever is not affine shows as a difference and
is refused by its field's name.
"""

from typing import Any

import numpy as np

from trtdiff.errors import SamplerError
from trtdiff.export.sampler_pages import SamplerPages
from trtdiff.export.schedule_call import ScheduleCall, diffusers_loop
from trtdiff.export.scheduler_rows import in_double, replaced
from trtdiff.sampler import SamplerTable, run_loop
from trtdiff.sampler_book import read_table
from trtdiff.types import Array

TOLERANCE = 1e-9
"""Largest |difference| over largest |latent|, in float64. Measured: 1e-15 to 2e-14; 0.5 and more with a clip."""
SHAPE = (1, 4, 8, 8)
_STEPS = (1, 2, 3, 7, 20, 50)
_NON_AFFINE = ("thresholding", "clip_sample")


def model(latent: Array, timestep: float, call: int) -> Array:
    """Predict N(0, 1) plus a little that is not linear in the latent, mixes neighbours and depends on the timestep.

    Little, because some schedulers feed a prediction back fifteenfold, which would turn rounding into noise.
    """
    feedback = np.tanh(latent) + np.roll(latent, 1, axis=-1) / (1 + np.abs(latent)) + timestep / 1000
    prediction: Array = np.random.default_rng(call).standard_normal(latent.shape) + 0.1 * feedback
    return prediction


def table_error(
    scheduler: Any, call: ScheduleCall, table: SamplerTable, seed: int = 0, mask: Array | None = None
) -> float:
    """Give the largest difference between a table's result and diffusers' own, over the largest latent, in float64.

    With a `mask` [1, 1, h, w] both keep the clean latent where it is 0, as the inpainting pipelines do.
    """
    import torch

    random = np.random.default_rng(seed)
    noise, clean = random.standard_normal(SHAPE), random.standard_normal(SHAPE)

    def predict(latent: Any, timestep: Any, index: int) -> Any:
        return torch.from_numpy(model(latent.numpy(), float(timestep.float()), index))

    def randn_tensor(shape: Any, generator: Any, dtype: Any, **_: Any) -> Any:
        return torch.randn(shape, generator=generator).to(dtype)  # a float32 pipeline's stream, in a float64 loop

    generator, twin = (torch.Generator().manual_seed(seed) for _ in range(2))
    with replaced(scheduler, randn_tensor=randn_tensor), in_double(scheduler):
        expected = diffusers_loop(
            scheduler, call, steps=table.steps, start=table.start, predict=predict,
            noise=torch.from_numpy(noise), clean=torch.from_numpy(clean), generator=generator,
            mask=None if mask is None else torch.from_numpy(mask),
        ).numpy()  # fmt: skip
    image = None if table.start is None and mask is None else clean
    got = run_loop(table, model, noise, clean=image, draw=lambda: torch.randn(SHAPE, generator=twin).numpy(), mask=mask)
    if not np.isfinite(expected).all():
        return np.inf
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def check_affinity(scheduler: Any, call: ScheduleCall, pages: SamplerPages) -> float:
    """Compare tables of a few step counts and starts with diffusers; give the largest error, or raise SamplerError."""
    info, tensors = pages.info(), pages.tensors()
    counts = sorted(set(tensors["index"][:, 0].tolist()))
    worst = 0.0
    mask = np.random.default_rng(0).integers(0, 2, (1, 1, *SHAPE[2:])).astype(float)
    for steps in sorted({*counts[:1], *(count for count in counts if count in _STEPS), counts[-1]}):
        for start in (None, 0, steps // 2):
            table = read_table(info, tensors, steps, start)
            if table is None:
                continue
            for keep in (None,) if table.known is None else (None, mask):
                error = table_error(scheduler, call, table, mask=keep)
                worst = max(worst, error)
                if not error <= TOLERANCE:
                    _refuse(scheduler, table, error)
    return worst


def _refuse(scheduler: Any, table: SamplerTable, error: float) -> None:
    kind, config = type(scheduler).__name__, scheduler.config
    fields = [field for field in _NON_AFFINE if config.get(field)]
    because, hint = "", "choose another scheduler"
    if fields:
        because = f"; its config sets {' and '.join(fields)}, which cuts values off"
        hint = f"set {fields[0]} to false in the checkpoint's scheduler_config.json, or {hint}"
    raise SamplerError(
        f"{table.name}: {kind} cannot be compiled: at {table.steps} steps, start {table.start}, "
        f"its table is off by {error:.1e}{because}",
        where=f"scheduler {table.name}, config field {fields[0]}" if fields else f"scheduler {table.name}",
        hint=hint,
    )
