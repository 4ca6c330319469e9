import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtdiff.parity.compare import compare_pictures, compare_tensors, compare_trajectories, relative_l2


def test_relative_l2_is_the_ratio_of_norms():
    assert relative_l2(np.array([3.0, 4.0]), np.array([3.0, 0.0])) == pytest.approx(4 / 3)
    assert relative_l2(np.zeros(3), np.zeros(3)) == 0
    assert relative_l2(np.ones(3), np.zeros(3)) == math.inf


@given(st.floats(1e-6, 1e6))
def test_relative_l2_does_not_depend_on_the_scale(scale):
    expected, got = np.array([1.0, 2.0, 2.0]), np.array([1.0, 2.0, 2.3])
    assert relative_l2(scale * got, scale * expected) == pytest.approx(0.1, rel=1e-9)


def test_the_number_is_the_worst_images_not_the_batchs():
    expected = np.ones((3, 4), np.float32)
    got = expected.copy()
    got[2, 1] = 3.0  # relative L2 of that image: 2 / 2
    result = compare_tensors("x", "", got, expected, 0.99)
    assert result.needed == pytest.approx(1.0)
    assert result.worst == "image 2, element [1]"
    assert not result.passed
    assert compare_tensors("x", "", got, expected, 1.01 - 0.01 + 1e-9).passed


def test_a_trajectory_names_its_worst_step():
    expected = np.ones((5, 2, 4), np.float32)
    got = expected.copy()
    got[3, 1] = 2.0
    result = compare_trajectories("trajectory", "", got, expected, 0.5)
    assert (result.needed, result.worst) == (pytest.approx(1.0), "step 4 of 5, image 1")


def test_pictures_are_compared_in_levels_without_wrapping_around():
    expected = np.zeros((1, 2, 2, 3), np.uint8)
    got = expected.copy()
    got[0, 1, 0, 2] = 255
    result = compare_pictures("picture", "", got, expected, 2)
    assert result.needed == 255
    assert "row 1, column 0" in result.worst
    assert not compare_pictures("picture", "", expected, got, 2).passed


@pytest.mark.parametrize("compare", [compare_tensors, compare_pictures, compare_trajectories])
@pytest.mark.parametrize(
    ("got", "expected", "said"),
    [
        (np.zeros((0, 2, 2, 3)), np.zeros((0, 2, 2, 3)), "empty"),
        (np.zeros((1, 2, 2, 3)), np.zeros((1, 2, 3, 3)), "shape"),
        (np.full((1, 2, 2, 3), np.nan), np.zeros((1, 2, 2, 3)), "not finite"),
        (np.zeros((1, 2, 2, 3)), np.full((1, 2, 2, 3), np.inf), "the reference has 12 values that are not finite"),
        (np.full((1, 2, 2, 3), np.nan), np.full((1, 2, 2, 3), np.nan), "not finite"),
    ],
)
def test_what_cannot_be_compared_never_passes(compare, got, expected, said):
    result = compare("x", "", got, expected, math.inf)
    assert not result.passed
    assert said in result.problem
