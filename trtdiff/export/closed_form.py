"""Prove the closed form of flow matching: the tables derived for a size against the scheduler itself, called there."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from trtdiff.errors import SamplerError
from trtdiff.export.flow_calls import FlowCall
from trtdiff.export.sampler_pages import SamplerPages
from trtdiff.export.schedule_call import ScheduleCall
from trtdiff.export.scheduler_rows import Prober, Run, Stage
from trtdiff.flow import depends_on_size, flow_table, no_closed_form
from trtdiff.sampler import SamplerTable

ROUNDING = 2.0**-23
"""Largest difference of a coefficient, and of a timestep relative to the first: one rounding of a float32 sigma.
Measured: 0."""
_STEPS = (1, 2, 7, 20, 50)


def check_sizes(
    stage: Stage, call: ScheduleCall, pages: SamplerPages, sizes: Iterable[int], steps: Iterable[int]
) -> str:
    """Say why a sampler has tables for one number of image tokens only; nothing where it has them for all.

    `sizes` are the numbers of image tokens to prove it at, beside the call's own. SamplerError where the scheduler does
    not do there what the closed form says. The stage must be entered.
    """
    name, identity = pages.name, pages.identity
    if not isinstance(call, FlowCall) or not depends_on_size(identity):
        return ""
    if reason := no_closed_form(identity):
        return reason
    counts = sorted(steps)
    for tokens in sorted({call.image_tokens, *sizes}):
        for count in sorted({counts[0], *(count for count in counts if count in _STEPS), counts[-1]}):
            prober = Prober(stage, replace(call, image_tokens=tokens), count)
            for start in dict.fromkeys((None, 0, count // 2)):
                error = difference(flow_table(name, identity, count, start, tokens), prober.run(start))
                if not error <= ROUNDING:
                    raise SamplerError(
                        f"{name}: its closed form is off by {error:.1e} at {tokens} image tokens, {count} steps, "
                        f"start {start}",
                        where=f"scheduler {name} ({identity['class']})",
                        hint="choose another scheduler",
                    )
    return ""


def difference(table: SamplerTable, run: Run) -> float:
    """Give the largest difference between a derived table and a run of the scheduler; infinite if shapes differ."""
    rows, residual = run.coefficients(table.window)
    first = np.zeros((1, rows.shape[1]))
    first[0, [-3, -1]] = run.clean, run.noise
    size = run.timesteps[0]
    pairs = [
        (table.coefficients, np.concatenate([first, rows])),
        (table.known, np.array([(run.clean, run.noise), *run.known, (1, 0)])),
        (table.scales, np.array(run.scales)),
        (table.draws.astype(float), np.array(run.draws)),
        (table.timesteps.astype(float) / size, run.timesteps / size),
    ]
    if run.no_mask or any(mine is None or mine.shape != its.shape for mine, its in pairs):
        return np.inf
    return max(residual, *(float(np.abs(mine - its).max()) for mine, its in pairs if mine is not None))
