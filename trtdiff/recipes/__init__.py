"""The precisions trtdiff can build; a new one is one file and one line here."""

from typing import TYPE_CHECKING

from trtdiff.errors import UsageError
from trtdiff.recipes import eight_bits, fp32, half
from trtdiff.recipes.base import PrecisionRecipe

if TYPE_CHECKING:
    from trtdiff.backends.base import Backend

__all__ = ["RECIPES", "SCANNED", "PrecisionRecipe", "builds", "precisions_of", "recipe"]

RECIPES: dict[str, PrecisionRecipe] = {
    found.name: found
    for found in (
        fp32.RECIPE, half.FP16, half.BF16, eight_bits.FP8, eight_bits.FP8_MIXED, eight_bits.INT8,
        eight_bits.INT8_WEIGHTS,
    )
}  # fmt: skip
"""Name → recipe; the word after `--precision`."""

SCANNED = ("float16",)
"""Types whose range is small enough to be looked at before a build; bfloat16's is float32's."""


def recipe(name: str) -> PrecisionRecipe:
    """Give the recipe of that name."""
    if name not in RECIPES:
        raise UsageError(f"no precision is called {name!r}", where="--precision", hint=f"known: {', '.join(RECIPES)}")
    return RECIPES[name]


def builds(backend: "Backend", chosen: PrecisionRecipe) -> bool:
    """Whether a backend compiles graphs of a recipe as they are meant."""
    return chosen.computes_in in backend.bases and chosen.formats <= backend.formats


def precisions_of(backend: "Backend") -> tuple[str, ...]:
    """Name the recipes that a backend compiles, its usual one first."""
    return tuple(name for name, chosen in RECIPES.items() if builds(backend, chosen))
