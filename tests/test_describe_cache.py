"""Caches in words: bars over the schedule, the riskiest tensors, the layers that lose most."""

import sys

import pytest

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
    write_cache,
)
from trtdiff.describe import describe
from trtdiff.describe_cache import describe_sensitivity, layer_noises, plot_cache, risk, sparkline, worst_layers
from trtdiff.errors import MissingDependency

VALUES = {
    "calm": Statistics((1.0, 2.0), (50.0, 50.0), (100, 50)),
    "wild": Statistics((8.0, 64.0), (1.0, 99.0), (50, 50)),
    "between": Statistics((100.0, 90.0), (1e6, 1e6), (200, 200)),
}
LAYERS = {
    "a": LayerFacts("block.a", "conv", 300, ("calm",)),
    "b": LayerFacts("", "linear", 100, ("wild",)),
}
CACHE = Cache(
    CACHE_SCHEMA, "", Model("toy", "sd", "c" * 64, {"denoiser": "g"}, {"denoiser": {}}),
    Data("p" * 64, 3, "", 4, 7.5, 64, 64, "s" * 64, ((0, 500), (500, 1000))), "mse",
    (Run(2, (3, 1), (Picture(4, "a cat"),), {"range": {"denoiser": 3}}, {"range": {"denoiser": 4}}),),
    {"denoiser": Component(2, VALUES, LAYERS, {"int8": {"a": Noise(1000.0, 1.0), "b": Noise(100.0, 1.0)}})}, {},
)  # fmt: skip


@pytest.fixture
def path(tmp_path):
    write_cache(tmp_path / "cache.json", CACHE)
    return tmp_path / "cache.json"


def test_a_bar_is_a_share_of_the_largest():
    assert sparkline((0.0, 1.0, 4.0, 8.0)) == " ▂▅█"
    assert sparkline((0.0, 0.0)) == "  "
    assert sparkline(()) == ""


def test_risk_is_what_a_clip_at_the_largest_wastes():
    assert risk(VALUES["calm"]) == pytest.approx(2 / (100 / 150) ** 0.5)
    assert risk(VALUES["wild"]) == 64
    assert risk(Statistics((1.0,), (0.0,), (0,))) == 0


def test_a_cache_in_words(path):
    found = describe(path)
    tables = {table.title: table for table in found.tables}
    assert found.facts["state"].startswith("not finished")
    assert found.facts["prompts"].startswith("3 (sha256")
    assert tables["coverage"].rows == (("999 … 500", "1"), ("499 … 0", "2 of 3"))
    assert tables["passes"].rows == (("range", "3 of 4"),)
    assert tables["pictures (the first 10)"].rows == (("4", "a cat"),)
    assert [row[0] for row in tables["denoiser: largest tensors"].rows] == ["between", "wild", "calm"]
    risky = tables["denoiser: riskiest inputs of layers"]
    assert [row[0] for row in risky.rows] == ["wild", "calm"]  # and not what no layer reads
    assert risky.rows[0][1:] == ("64", "1", "64", "█▂")  # noise first


def test_layers_are_listed_with_their_share_the_worst_first(path):
    assert [(layer.where, layer.share) for layer in layer_noises(CACHE)] == [
        ("denoiser: block.a", 0.75),
        ("denoiser: b", 0.25),
    ]
    assert [layer.decibels for layer in worst_layers(CACHE)] == pytest.approx([20, 30])
    found = describe_sensitivity(path)
    (table,) = found.tables
    assert table.rows == (
        ("denoiser", "b", "linear", "int8", "20.0 dB", "25.00%"),
        ("denoiser", "block.a", "conv", "int8", "30.0 dB", "75.00%"),
    )
    assert found.facts["worst in int8"][0] == "denoiser: b (linear): 20.0 dB, 25.00% of the multiply-adds"


def test_a_plot_without_matplotlib_names_the_extra(path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency) as caught:
        plot_cache(path, tmp_path / "plot.png", sensitivity=False)
    assert caught.value.hint == "pip install 'trtdiff[plots]'"
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.parametrize("sensitivity", [True, False])
def test_plots_are_pictures(path, tmp_path, sensitivity):
    pytest.importorskip("matplotlib")
    from PIL import Image

    plot_cache(path, tmp_path / "plot.png", sensitivity=sensitivity)
    with Image.open(tmp_path / "plot.png") as image:
        assert image.width > 800
