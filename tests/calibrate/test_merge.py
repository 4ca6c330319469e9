"""Sums of what two calibrations saw of one value, where one saw larger magnitudes: against rounding all of it."""

import ml_dtypes
import numpy as np
import pytest

from trtdiff.calibrate.cache import Statistics
from trtdiff.calibrate.clips import EDGES, clip_of, tried_clips
from trtdiff.calibrate.merge import merged_statistics

GRID = 2 ** (1 / 4)
SIZE = 100_000


def lost(numbers, kind, index):
    """Sum of squared errors of rounding, written out anew."""
    clip = GRID**index
    if kind == "int8":
        step = clip / 127
        read = np.clip(np.rint(numbers / step), -127, 127) * step
    else:
        step = clip / 448
        read = np.clip(numbers / step, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * step
    return float(((numbers - read) ** 2).sum())


def seen(numbers):
    """What a calibration with both second passes writes down of these."""
    largest = float(np.abs(numbers).max())
    bare = Statistics((largest,), (float((numbers**2).sum()),), (numbers.size,))
    if not largest:
        return bare
    top = tried_clips(bare, "int8")[-1]
    errors = {kind: {at: lost(numbers, kind, at) for at in tried_clips(bare, kind)} for kind in ("int8", "float8")}
    beyond = {at: int((np.abs(numbers) > GRID**at).sum()) for at in range(top - EDGES, top + 1)}
    return Statistics(bare.amax, bare.squares, bare.elements, (), errors, beyond)


# a hundred times: steps are as wide as three standard deviations of the smaller, and its error is no longer uniform
@pytest.mark.parametrize(("times", "within"), [(1.0, 0), (1.3, 0.02), (2.0, 0.02), (9.0, 0.02), (100.0, 0.13)])
@pytest.mark.parametrize("swapped", [False, True])
def test_errors_and_counts_of_both_are_those_of_all_numbers_together(times, within, swapped):
    rng = np.random.default_rng(3)
    one, other = rng.standard_normal(SIZE), times * rng.standard_normal(SIZE)
    parts = (seen(other), seen(one)) if swapped else (seen(one), seen(other))
    merged, whole = merged_statistics(*parts), seen(np.concatenate([one, other]))
    assert merged.largest == whole.largest
    assert merged.beyond == whole.beyond
    for kind in ("int8", "float8"):
        assert merged.errors[kind].keys() == whole.errors[kind].keys()
        for index, error in whole.errors[kind].items():
            assert merged.errors[kind][index] == pytest.approx(error, rel=within or 1e-9), (kind, index)
        assert clip_of(merged, kind, "mse") == clip_of(whole, kind, "mse")


def test_zeros_lose_nothing():
    numbers = np.random.default_rng(3).standard_normal(SIZE)
    there, zeros = seen(numbers), seen(np.zeros(SIZE))
    for merged in (merged_statistics(there, zeros), merged_statistics(zeros, there)):
        assert merged.errors == there.errors
        assert merged.beyond == there.beyond
        assert merged.elements == (2 * SIZE,)


def test_what_one_did_not_measure_is_known_of_neither():
    numbers = np.random.default_rng(3).standard_normal(SIZE)
    there = seen(numbers)
    bare = Statistics(there.amax, there.squares, there.elements)
    assert merged_statistics(there, bare).errors == {}
    assert merged_statistics(bare, there).beyond == {}
