"""What a precision costs, in numbers whose right value is known: equal pictures, flat ones, scaled latents."""

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
COUNT = 100


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("compare_precisions", SCRIPTS / "compare_precisions.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        patch.setitem(sys.modules, spec.name, module)  # where dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


def flat(level):
    return np.full((4, 32, 32, 3), level, np.uint8)


def drawn(script, name, *, level=100, scale=1.0):
    latents = np.random.default_rng(0).standard_normal((3, COUNT, 4, 8, 8), np.float32)
    pixels = np.full((COUNT, 32, 32, 3), level, np.uint8)
    return script.Drawn(name, "fp32, none", latents * np.float32(scale), pixels)


def test_decibels_of_a_constant_difference(script):
    assert script.psnr(flat(102), flat(100)) == pytest.approx(
        dict.fromkeys(("pooled", "median", "lowest"), 20 * math.log10(255 / 2))
    )
    assert script.psnr(flat(7), flat(7)) == {"pooled": None, "median": None, "lowest": None}


def test_structural_similarity_of_flat_pictures_is_that_of_their_means(script):
    first = (0.01 * 255) ** 2  # C1 of the paper; without variance all else cancels
    expected = (2 * 90 * 120 + first) / (90**2 + 120**2 + first)
    assert script.ssim(flat(90), flat(120)) == pytest.approx({"mean": expected, "lowest": expected}, rel=1e-5)


def test_flip_is_nothing_for_equal_pictures_and_grows_to_one(script):
    assert script.flip(flat(90), flat(90)) == {"mean": 0, "highest": 0}
    little, more, most = (script.flip(flat(level), flat(0))["mean"] for level in (40, 120, 255))
    assert 0 < little < more < most <= 1


def test_drift_is_relative_and_by_step(script):
    theirs = drawn(script, "a").latents
    ours = theirs * np.array([1.001, 1.01, 0.9], np.float32)[:, None, None, None, None]
    expected = pytest.approx([0.001, 0.01, 0.1], rel=1e-3)
    assert script.drift(ours, theirs) == {"mean": expected, "p95": expected}


@pytest.mark.parametrize(
    ("points", "least_psnr", "passes"), [(3.0, None, True), (2.9, None, False), (3.0, 42.0, True), (3.0, 42.2, False)]
)
def test_a_bundle_fails_by_what_it_loses(script, points, least_psnr, passes):
    """Five are lost and two are won; two levels are 42.11 dB."""
    known = np.arange(COUNT) >= 2
    answers = np.arange(COUNT) < COUNT - 5
    bundles = [drawn(script, "a"), drawn(script, "b", level=102, scale=1.01)]
    (found,) = script.compare(bundles, [known, answers], points=points, least_psnr=least_psnr)
    assert found["points_lost"] == pytest.approx(3)
    assert (found["right"], found["right_here_alone"], found["right_in_the_reference_alone"]) == (95, 2, 5)
    assert found["drift"]["mean"] == pytest.approx([0.01] * 3, rel=1e-3)
    assert found["pass"] is passes


def test_the_plot_is_a_picture(script, tmp_path):
    bundles = [drawn(script, "a"), drawn(script, "b", level=102, scale=1.01), drawn(script, "c", level=99, scale=1.1)]
    found = script.compare(bundles, [np.ones(COUNT, bool)] * 3, points=2, least_psnr=None)
    script.plot(tmp_path / "drift.png", bundles, found)
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")
