"""A cache reads back as it was written, a tensor a line; what is damaged, edited or of another schema is refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtdiff.calibrate.cache import (
    CACHE_SCHEMA,
    Cache,
    Component,
    Data,
    LayerFacts,
    Model,
    Noise,
    Picture,
    Run,
    Statistics,
    content_digest,
    read_cache,
    sealed,
    write_cache,
)
from trtdiff.errors import ArtefactError

VALUES = {
    "conv": Statistics((1.5, 0.0), (3.25e7, 0.0), (12, 0), errors={"int8": {-3: 1.0, 2: 1e-9}}, beyond={-1: 4}),
    "line\n end": Statistics((0.1, 1e-30), (1.0, 2.0), (1, 2), channels=(0.5, 1.0)),
}
LAYERS = {"l": LayerFacts("m", "conv", 9, ("conv",))}
CACHE = sealed(
    Cache(
        CACHE_SCHEMA, "", Model("toy", "sd", "c" * 64, {"denoiser": "g" * 64}, {"denoiser": {"w": "f" * 64}}),
        Data("p" * 64, 1, "", 4, 7.5, 64, 64, "s" * 64, ((0, 500), (500, 1000))), "mse",
        (Run(2, (1, 1), (Picture(0, "a “cat”"),), {"range": {"denoiser": 2}}, {"range": {"denoiser": 2}}),),
        {"denoiser": Component(2, VALUES, LAYERS, {"int8": {"l": Noise(2.0, 1.0)}})},
        {"trtdiff": "1"},
    )
)  # fmt: skip


@pytest.fixture
def path(tmp_path):
    write_cache(tmp_path / "cache.json", CACHE)
    return tmp_path / "cache.json"


def test_a_cache_reads_back_as_it_was(path):
    assert read_cache(path) == CACHE
    assert CACHE.complete
    assert CACHE.components["denoiser"].noise["int8"]["l"].decibels == pytest.approx(3.0103)


def test_a_tensor_is_a_line(path):
    lines = [line.strip() for line in path.read_text().splitlines()]
    (found,) = [line for line in lines if line.startswith('"conv"')]
    assert json.loads(f"{{{found.rstrip(',')}}}")["conv"]["amax"] == [1.5, 0.0]


def test_equal_caches_give_equal_bytes(path, tmp_path):
    write_cache(tmp_path / "again.json", read_cache(path))
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


@settings(deadline=None)  # it writes files
@given(
    amax=st.lists(st.floats(0, 2.0**127, width=32), min_size=1, max_size=4),
    error=st.floats(0, 1e300), index=st.integers(-600, 600), elements=st.integers(0, 2**60), prompt=st.text(),
)  # fmt: skip
def test_any_numbers_and_words_survive(tmp_path_factory, amax, error, index, elements, prompt):
    seen = Statistics(tuple(amax), (error,), (elements,), errors={"int8": {index: error}})
    run = Run(1, (1,), (Picture(0, prompt),), {}, {})
    made = sealed(Cache(**{**vars(CACHE), "runs": (run,), "components": {"denoiser": Component(1, {prompt: seen})}}))
    path = tmp_path_factory.mktemp("any") / "cache.json"
    write_cache(path, made)
    assert read_cache(path) == made


def edited(path, edit, *, seal):
    about = json.loads(path.read_text())
    edit(about)
    if seal:
        about["digest"] = content_digest(about)
    path.write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("edit", "seal", "match", "where"),
    [
        (lambda about: about["components"]["denoiser"]["values"]["conv"]["amax"].__setitem__(0, 9.0), False,
         "changed after it was written", ": digest"),
        (lambda about: about["runs"][0].update(samples=3), False, "changed after it was written", ": digest"),
        (lambda about: about.update(schema=0), True, "an older schema, 0", ": schema"),
        (lambda about: about.update(schema=CACHE_SCHEMA + 1), True, "a newer schema", ": schema"),
        (lambda about: about.pop("runs"), True, "no calibration cache", ""),
        (lambda about: about["data"].pop("steps"), True, "missing required field `steps`", ""),
    ],
    ids=["number", "samples", "older", "newer", "something else", "field"],
)  # fmt: skip
def test_what_is_not_ours_any_more_is_refused(path, edit, seal, match, where):
    edited(path, edit, seal=seal)
    with pytest.raises(ArtefactError, match=match) as caught:
        read_cache(path)
    assert caught.value.where == f"{path}{where}"
    assert caught.value.hint
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_cache_is_refused(path, share):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ArtefactError, match="truncated or damaged") as caught:
        read_cache(path)
    assert "--force" in caught.value.hint


def test_no_cache_says_how_to_make_one(tmp_path):
    with pytest.raises(ArtefactError, match="No such file") as caught:
        read_cache(tmp_path / "none.json")
    assert caught.value.hint == "make it with: trtdiff calibrate"
