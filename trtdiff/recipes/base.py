"""What a precision recipe is: the passes that give a canonical graph that precision, and what it promises."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtdiff.types import Tolerance


@dataclass(frozen=True)
class PrecisionRecipe:
    """One precision. Everything but `summary` and `tolerance` determines engines, and so is part of their keys."""

    name: str
    summary: str
    computes_in: str
    """Type of the arithmetic, as numpy or ml_dtypes name it: what an engine is asked whether it realised."""
    passes: tuple[str, ...]
    """`module:function` of each pass, with options behind it (`… dtype=float16`); the sampler prologue comes after."""
    tolerance: Tolerance
    """How far results may be from PyTorch's, computed in float32 from the same weights."""

    def content(self) -> Mapping[str, Any]:
        """Give what determines engines."""
        return {
            "name": self.name,
            "computes_in": self.computes_in,
            "passes": self.passes,
        }
