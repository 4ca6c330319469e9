"""The two types of 8 bits as numbers, and how float32 numbers are rounded to them.

Quantization is symmetric, with zero point 0: a number x is stored as round(x / scale) and read as that times the scale,
clipped to the type's largest magnitude. A tensor's *clip* is the magnitude that its largest stored number stands for,
`scale · largest`.

Clips that are tried, and edges that numbers are counted at, lie on one geometric grid, `GRID ** index`, the same for
every tensor of every model, so that what was measured at them on different data can be added.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from trtdiff.types import Array

if TYPE_CHECKING:
    import onnx_ir as ir

EightBits: TypeAlias = Literal["int8", "float8"]

GRID = 2.0**0.25
"""Ratio of one clip that is tried to the next."""
OCTAVE = 4
"""Steps of the grid to a clip that is twice as high."""


@dataclass(frozen=True)
class Format:
    """One type of 8 bits."""

    name: EightBits
    largest: float
    """Of int8 127: -128 is not used, so that negating a number is exact. Of E4M3 (OCP 8-bit floating point) 448."""

    @property
    def dtype(self) -> "ir.DataType":
        """Element type in ONNX."""
        import onnx_ir as ir

        return {"int8": ir.DataType.INT8, "float8": ir.DataType.FLOAT8E4M3FN}[self.name]

    @property
    def numpy(self) -> "np.dtype[Any]":
        """Element type in numpy, with ml_dtypes."""
        import ml_dtypes

        return np.dtype(np.int8 if self.name == "int8" else ml_dtypes.float8_e4m3fn)

    def stored(self, array: Array) -> Array:
        """Round numbers that were divided by their scale: float32 [...] → int8 or float8_e4m3fn [...]; clips.

        float8 takes a third of the time that ml_dtypes takes for the same bytes.
        """
        rounded = self.rounded(array)
        if self.name == "int8":
            return rounded.astype(np.int8)
        # the exponent of float32, lowered by what its bias is higher: bits 20 to 26 are those of float8
        bits = (rounded * np.float32(2.0**-120)).view(np.uint32)
        sign = (bits >> np.uint32(24)) & np.uint32(0x80)
        return ((bits >> np.uint32(20)) & np.uint32(0x7F) | sign).astype(np.uint8).view(self.numpy)

    def rounded(self, array: Array) -> Array:
        """Do the same, and give the float32 numbers that are read back. Ties go to even."""
        clipped: Array = np.clip(array, -self.largest, self.largest)
        if self.name == "int8":
            return np.rint(clipped, out=clipped)
        return np.copysign(rounded_to_float8(np.abs(clipped)), clipped, out=clipped)


def rounded_to_float8(magnitudes: Array) -> Array:
    """Round float32 numbers from 0 to 448 to E4M3: three bits of mantissa, and multiples of 2^-9 below 2^-6.

    A number A that is 2^20 times as large, and no less than 2^14, has a last place worth just what the last of the
    three bits is worth: so (x + A) - A is x rounded to it, ties to even.
    """
    large = magnitudes * np.float32(2**20)
    np.maximum(large, np.float32(2**14), out=large)
    found = magnitudes + large
    found -= large
    return found


FORMATS: Mapping[EightBits, Format] = {
    "int8": Format("int8", 127.0),
    "float8": Format("float8", 448.0),
}


def grid_index(magnitude: float) -> int:
    """Give the index of the least clip of the grid that is no smaller than a positive magnitude."""
    index = ceil(log(magnitude) / log(GRID) - 1e-9)
    return index if GRID**index >= magnitude * (1 - 1e-9) else index + 1
