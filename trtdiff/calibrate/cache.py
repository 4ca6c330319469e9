"""The calibration cache: how large every tensor of a checkpoint's networks gets, over the whole denoising schedule.

A JSON file that people can read. It is a running reduction: whatever is measured is a maximum or a sum, so that a
calibration can be interrupted and go on, and what two of them saw of one model can be put together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

CACHE_SCHEMA = 1


@dataclass(frozen=True)
class Statistics:
    """One value of a graph, over everything that was seen of it. Tuples have an entry a timestep band."""

    amax: tuple[float, ...]
    """Largest magnitude; 0 in a band that was not seen."""
    squares: tuple[float, ...]
    """Sum of squares."""
    elements: tuple[int, ...]
    """How many elements were seen."""
    channels: tuple[float, ...] = ()
    """Largest magnitude of every channel (the last dimension), over all bands; of what goes into linear layers."""
    errors: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Type of 8 bits → index of a clip on the grid → sum of squared errors where values are rounded to it."""
    beyond: Mapping[int, int] = field(default_factory=dict)
    """Index of an edge on the grid → how many elements have a larger magnitude."""


@dataclass(frozen=True)
class Noise:
    """What rounding to 8 bits does to the output of one layer, all its inputs exact."""

    signal: float
    """Sum of squares of the exact output."""
    noise: float
    """Sum of squares of the difference."""
