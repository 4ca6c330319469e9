"""Which steps of which pictures are samples: equally many in every band of the schedule.

A band is an equal part of the timesteps that the model was trained on. Early steps see noise and late ones pictures,
and values are of another size there; so no band may be missed, however a scheduler spaces its steps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

from trtdiff.errors import UsageError

TIMESTEPS = 1000
"""Timesteps that a model was trained on, where the scheduler's config does not say."""


@dataclass(frozen=True)
class Sample:
    """One input of the denoiser, both guidance branches: what call `call` of picture `picture` gets."""

    picture: int
    call: int
    band: int


def bands_of(scheduler: Mapping[str, Any], count: int) -> tuple[tuple[int, int], ...]:
    """Divide the training timesteps of a scheduler's config into bands, each from (inclusively) to (exclusively)."""
    whole = int(scheduler.get("num_train_timesteps") or TIMESTEPS)
    if not 1 <= count <= whole:
        raise UsageError(f"{count} timestep bands", where="--bands", hint=f"1 to {whole}, the timesteps of the model")
    edges = [ceil(whole * band / count) for band in range(count + 1)]
    return tuple(pairwise(edges))


def band_of(timestep: float, bands: Sequence[tuple[int, int]]) -> int:
    """Give the band of a timestep; what lies outside of all belongs to the nearest."""
    return next((band for band, (_, end) in enumerate(bands) if timestep < end), len(bands) - 1)


def check_bands(
    timesteps: Iterable[float], bands: Sequence[tuple[int, int]], steps: int, find_good: Callable[[], Sequence[int]]
) -> None:
    """Raise UsageError where no call falls into a band; `find_good` gives step counts whose calls reach all."""
    seen = {band_of(timestep, bands) for timestep in timesteps}
    empty = [bands[band] for band in range(len(bands)) if band not in seen]
    if empty:
        named = ", ".join(f"{start} to {end - 1}" for start, end in empty)
        most = max((count for count in range(1, len(bands) + 1) if len(bands) % count == 0 and count < len(bands)),
                   default=1)  # fmt: skip
        good = find_good()
        advice = f"--steps {_listed(good)}" if good else f"fewer --bands, such as {most}"
        raise UsageError(f"with {steps} steps, no step falls into the timesteps {named}", where="--steps",
                         hint=f"every band of the schedule is to be seen: {advice}")  # fmt: skip


def _listed(counts: Sequence[int]) -> str:
    """Write sorted step counts in few words."""
    from trtdiff.sampler_book import ranges

    return ranges(counts)


def choose_samples(timesteps: Sequence[float], bands: Sequence[tuple[int, int]], count: int) -> tuple[Sample, ...]:
    """Choose `count` samples, in the order in which they are executed: picture by picture, call by call.

    Every band gets the same number, up to one; within a band they are spread over its calls and over the pictures.
    Requires a call in every band. There are as many pictures as that takes.
    """
    if count < len(bands):
        raise UsageError(f"{count} samples for {len(bands)} timestep bands", where="--samples",
                         hint=f"ask for {len(bands)} at least, better for {8 * len(bands)}")  # fmt: skip
    calls: list[list[int]] = [[] for _ in bands]
    for call, timestep in enumerate(timesteps):
        calls[band_of(timestep, bands)].append(call)
    rest, share = count % len(bands), count // len(bands)
    quotas = [share + ((band + 1) * rest // len(bands) - band * rest // len(bands)) for band in range(len(bands))]
    pictures = max(ceil(quota / len(of)) for quota, of in zip(quotas, calls, strict=True))
    pictures = max(pictures, ceil(count / len(timesteps)))
    chosen = []
    for band, (quota, of) in enumerate(zip(quotas, calls, strict=True)):
        # on a diagonal, so that an even choice meets every picture
        pairs = [Sample((number + place + band) % pictures, call, band) for place, call in enumerate(of)
                 for number in range(pictures)]  # fmt: skip
        chosen += [pairs[(2 * number + 1) * len(pairs) // (2 * quota)] for number in range(quota)]
    return tuple(sorted(chosen, key=lambda sample: (sample.picture, sample.call)))


def one_a_band(samples: Sequence[Sample], each: int) -> tuple[Sample, ...]:
    """Choose a few samples of every band, evenly over those that there are."""
    found: list[Sample] = []
    for band in sorted({sample.band for sample in samples}):
        of = [sample for sample in samples if sample.band == band]
        few = min(each, len(of))
        found += [of[(2 * number + 1) * len(of) // (2 * few)] for number in range(few)]
    return tuple(sorted(found, key=lambda sample: (sample.picture, sample.call)))


def prompts_of(prompts: Sequence[str], pictures: int) -> tuple[str, ...]:
    """Give every picture its prompt: in turn, or evenly over all where there are more prompts than pictures."""
    count = len(prompts)
    if pictures >= count:
        return tuple(prompts[picture % count] for picture in range(pictures))
    return tuple(prompts[(2 * picture + 1) * count // (2 * pictures)] for picture in range(pictures))
