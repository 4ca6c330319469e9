"""Recipes of somebody's own: what a TOML file may say, and what is said of one that cannot be meant."""

import pytest

from trtdiff.errors import UsageError
from trtdiff.recipes import RECIPES
from trtdiff.recipes.own import own_recipe


@pytest.fixture
def recipe(tmp_path):
    def read(text):
        (tmp_path / "careful.toml").write_text(text)
        return own_recipe(tmp_path / "careful.toml")

    return read


def test_what_is_not_named_is_as_the_recipe_has_it_that_it_is_based_on(recipe):
    made = recipe('based_on = "fp8"\n[quantization]\nkeep = ["mid_block.*"]\n[tolerance]\nlatents = 0.25')
    usual = RECIPES["fp8"]
    assert made.name == "careful"
    assert (made.computes_in, made.passes, made.formats) == (usual.computes_in, usual.passes, usual.formats)
    assert set(made.quantization.keep) == {*usual.quantization.keep, "mid_block.*"}
    assert made.quantization.method == usual.quantization.method
    assert made.tolerance.latents == 0.25
    assert made.tolerance.components == usual.tolerance.components
    assert made.content("denoiser") != usual.content("denoiser")
    assert made.content("vae_decoder") == usual.content("vae_decoder")  # it changes no engine but the denoiser's


def test_from_a_base_type(recipe):
    made = recipe(
        'base = "bf16"\nname = "w8"\n[quantization]\nweights = "int8"\nactivations = "int8"\noperators = ["linear"]\n'
        'components = ["denoiser", "text_encoder"]\nleast = 32\nsmooth = 0.8\nkeep = { "time_*" = "small" }'
    )
    how = made.quantization
    assert (made.name, made.computes_in) == ("w8", "bfloat16")
    assert (how.operators, how.components, how.least, how.smooth) == (
        ("linear",), ("denoiser", "text_encoder"), 32, 0.8
    )  # fmt: skip
    assert how.keep == {"time_*": "small"}
    assert made.quantizes("text_encoder")
    assert not made.quantizes("vae_decoder")


def test_a_tolerance_of_its_own_comes_before_the_usual_patterns(recipe):
    made = recipe('base = "fp32"\n[tolerance]\ncomponents = { denoiser = 0.5 }')
    assert made.tolerance.component("denoiser") == 0.5
    assert made.tolerance.component("vae_decoder") == RECIPES["fp32"].tolerance.component("vae_decoder")


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("", "starts from nothing", 'base = "fp16"'),
        ('base = "fp8"', "'fp8' is no base type", "fp16"),
        ('based_on = "fp9"', "no precision is called 'fp9'", "fp8"),
        ('base = "fp16"\nbased_on = "fp8"', "both based_on and base", "leave one out"),
        ('based_on = "fp8"\n[quantisation]\nkeep = []', "no field 'quantisation'", "did you mean quantization"),
        ('based_on = "fp8"\n[quantization]\nkep = []', "no field 'kep'", "did you mean keep"),
        ('based_on = "fp8"\n[quantization]\nsmooth = 2', "alpha is 2", "0 to 1"),
        ('based_on = "fp8"\n[quantization]\nmethod = "best"', "not a recipe: Invalid enum value 'best'", "correct"),
        ('based_on = "fp8"\n[quantization]\nkeep = "mid"', "'mid' is no list of module patterns", "keep = ["),
        ('based_on = "fp8"\n[quantization]\nkeep = [""]', "is no list of module patterns", "keep = ["),
        ('based_on = "fp8"\n[quantization]\nkeep = [1]', "is no list of module patterns", "keep = ["),
        ('based_on = "fp8"\n[tolerance]\nlatents = -1', "-1.0 is no tolerance", "0 to"),
        ('based_on = "fp8"\n[tolerance]\nlevels = nan', "nan is no tolerance", "0 to 255"),
        ('based_on = "fp8"\n[tolerance]\ncomponents = { denoiser = 2 }', "2.0 is no tolerance", "less than 1"),
        ('based_on = "int8-weights"\n[quantization]\noperators = ["attention"]', "attention has no weights", "leave"),
        ('based_on = "fp8"\n[quantization]\nactivations = "int8"', "nothing multiplies those", "one type"),
        ('based_on = "int8"\n[quantization]\noperators = ["attention"]', "no fused kernel", "float8"),
        ('based_on = "fp8"\n[quantization]\nleast = 0', "least is 0", "16"),
        ('based_on = "fp8"\n[quantization]\noperators = []', "a quantization of nothing", "name operators"),
        ('based_on = "int8"\n[tolerance]\nlatents = 3', "3.0 is no tolerance", "less than 1"),
        ("based_on = ", "not TOML", "README"),
    ],
)
def test_what_cannot_be_meant(recipe, text, says, hint):
    with pytest.raises(UsageError, match=says) as caught:
        recipe(text)
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read gone\.toml"):
        own_recipe(tmp_path / "gone.toml")
