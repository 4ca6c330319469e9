"""The two types of 16 bits, as numbers: where they end, and below which size they lose what float32 holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Half: TypeAlias = Literal["float16", "bfloat16"]

KEEP = "keep"
"""Metadata key of a node: why it stays in float32. Written by `mark_islands`, read by `half_precision`."""


@dataclass(frozen=True)
class Limits:
    """What a type can hold."""

    largest: float
    """The largest finite number."""
    step: float
    """Distance of the smallest numbers, the subnormal ones; everything below half of it becomes zero."""
    roundoff: float
    """Largest relative error of rounding a number that is not subnormal: half the distance of 1 to the next number."""

    @property
    def least_rms(self) -> float:
        """The root mean square below which a tensor is held worse than its type promises.

        Rounding to multiples of `step` makes errors that are spread evenly, of root mean square step / √12. A tensor
        whose own is `rms` then has the relative error step / (√12 · rms), which exceeds `roundoff` below
        step / (√12 · roundoff): 3.5e-5 for float16, 6.8e-39 for bfloat16. Numbers of a normal distribution of that
        size lie under the smallest normal number (6.1e-5 for float16) to more than nine in ten.
        """
        return float(self.step / (12**0.5 * self.roundoff))


LIMITS: Mapping[str, Limits] = {
    "float16": Limits(65504.0, 2.0**-24, 2.0**-11),
    "bfloat16": Limits((2 - 2.0**-7) * 2.0**127, 2.0**-133, 2.0**-8),
}
"""IEEE 754 binary16, and the upper 16 bits of binary32."""
