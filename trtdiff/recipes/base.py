"""What a precision recipe is: the passes that give a canonical graph that precision, and what it promises."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from trtdiff.passes.eight_bits import EightBits
from trtdiff.recipes.quantization import Quantization
from trtdiff.types import Tolerance


@dataclass(frozen=True)
class PrecisionRecipe:
    """One precision. What determines engines is part of their keys: `computes_in`, `passes`, `quantization`."""

    name: str
    summary: str
    computes_in: str
    """Type of the arithmetic that is not in 8 bits, as numpy or ml_dtypes name it."""
    passes: tuple[str, ...]
    """`module:function` of each pass, with options behind it (`… dtype=float16`); the sampler prologue comes after."""
    tolerance: Tolerance
    """How far results may be from PyTorch's, computed in float32 from the same weights."""
    quantization: Quantization | None = None
    """What is computed in 8 bits; it comes before the passes."""
    file: str = ""
    """Where a recipe of somebody's own was read from."""
    based_on: str = ""
    """The built-in recipe that it changes."""

    @property
    def formats(self) -> frozenset[EightBits]:
        """Types of 8 bits in it."""
        if self.quantization is None:
            return frozenset()
        return frozenset(kind for kind in (self.quantization.weights, self.quantization.activations) if kind)

    @property
    def calibrated(self) -> bool:
        """Whether it needs a calibration."""
        return self.quantization is not None and self.quantization.calibrated

    def quantizes(self, component: str) -> bool:
        """Whether anything of a component is in 8 bits."""
        return self.quantization is not None and any(
            fnmatchcase(component, pattern) for pattern in self.quantization.components
        )

    def content(self, component: str) -> Mapping[str, Any]:
        """Give what determines the engine of a component."""
        own: dict[str, Any] = {} if self.quantization else {"name": self.name}
        if self.quantizes(component):
            own = {"quantization": self.quantization}
        return {"computes_in": self.computes_in, "passes": self.passes, **own}
