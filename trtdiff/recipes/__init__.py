"""The precisions trtdiff can build; a new one is one file and one line here."""

from trtdiff.errors import UsageError
from trtdiff.recipes import fp32, half
from trtdiff.recipes.base import PrecisionRecipe

__all__ = ["RECIPES", "PrecisionRecipe", "recipe"]

RECIPES: dict[str, PrecisionRecipe] = {found.name: found for found in (fp32.RECIPE, half.FP16, half.BF16)}
"""Name → recipe; the word after `--precision`."""

SCANNED = ("float16",)
"""Types whose range is small enough to be looked at before a build; bfloat16's is float32's."""


def recipe(name: str) -> PrecisionRecipe:
    """Give the recipe of that name."""
    if name not in RECIPES:
        raise UsageError(f"no precision is called {name!r}", where="--precision", hint=f"known: {', '.join(RECIPES)}")
    return RECIPES[name]
