"""What every precision promises."""

import pytest

from trtdiff.errors import UsageError
from trtdiff.lowering import HALVES, named
from trtdiff.recipes import RECIPES, recipe
from trtdiff.types import Tolerance


@pytest.mark.parametrize("name", RECIPES)
def test_it_states_a_bound_for_every_component_and_its_passes_exist(name):
    stated = recipe(name)
    for component in ("text_encoder", "denoiser", "vae_decoder", "vae_encoder"):
        assert 0 < stated.tolerance.component(component) < 1
    for place in stated.passes:
        assert callable(named(place.split()[0]))
    assert (stated.computes_in in HALVES) == (name != "fp32")
    assert ("quantization" in stated.content("denoiser")) == (name not in {"fp32", "fp16", "bf16"})
    assert "quantization" not in stated.content("vae_decoder")


def test_a_more_exact_type_promises_more():
    bounds = [recipe(name).tolerance for name in ("fp32", "fp16", "bf16")]
    assert [bound.latents for bound in bounds] == sorted(bound.latents for bound in bounds)
    assert [bound.levels for bound in bounds] == sorted(bound.levels for bound in bounds)


def test_the_first_pattern_that_matches_holds():
    bounds = Tolerance(components={"vae_*": 0.1, "text_encoder": 0.2}, latents=0.3, levels=4)
    assert bounds.component("vae_decoder") == 0.1
    assert bounds.component("text_encoder") == 0.2
    with pytest.raises(UsageError, match="no tolerance is stated for denoiser"):
        bounds.component("denoiser")


@pytest.mark.parametrize("numbers", [(1.0, 0.1, 1), (0.1, 1.0, 1), (0.1, 0.1, 256), (-0.1, 0.1, 1)])
def test_what_is_no_tolerance(numbers):
    component, latents, levels = numbers
    with pytest.raises(UsageError, match="is no tolerance"):
        Tolerance(components={"*": component}, latents=latents, levels=levels)
