"""Samples are as many in every band, whatever the schedule; a band that is missed is named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtdiff.calibrate.samples import band_of, bands_of, check_bands, choose_samples, one_a_band, prompts_of
from trtdiff.errors import UsageError


@st.composite
def schedules(draw):
    """Timesteps from high to low that reach every band, evenly or not."""
    count = draw(st.integers(1, 10))
    bands = bands_of({"num_train_timesteps": draw(st.sampled_from([1000, 100, 37]))}, count)
    each = [draw(st.lists(st.integers(start, end - 1), min_size=1, max_size=8)) for start, end in bands]
    return bands, sorted((float(timestep) for of in each for timestep in of), reverse=True)


@given(schedules(), st.integers(0, 300))
def test_every_band_has_as_many_samples_up_to_one(schedule, more):
    bands, timesteps = schedule
    count = len(bands) + more
    samples = choose_samples(timesteps, bands, count)
    by_band = np.bincount([sample.band for sample in samples], minlength=len(bands))
    assert by_band.sum() == count == len(set(samples))
    assert by_band.max() - by_band.min() <= 1
    assert all(sample.band == band_of(timesteps[sample.call], bands) for sample in samples)
    assert [(sample.picture, sample.call) for sample in samples] == sorted((s.picture, s.call) for s in samples)
    pictures = 1 + max(sample.picture for sample in samples)
    quota, least = -(-count // len(bands)), min(np.bincount([band_of(t, bands) for t in timesteps]))
    assert pictures <= max(-(-quota // least), -(-count // len(timesteps)))


@given(schedules(), st.integers(1, 4))
def test_few_samples_are_of_every_band(schedule, each):
    bands, timesteps = schedule
    samples = choose_samples(timesteps, bands, 8 * len(bands))
    few = one_a_band(samples, each)
    assert set(few) <= set(samples)
    assert np.bincount([sample.band for sample in few]).tolist() == [each] * len(bands)
    assert one_a_band(samples, 0) == ()


def test_samples_are_spread_over_pictures_and_steps():
    """64 of 80 in 8 bands: no picture and no step is left out."""
    timesteps = [float(t) for t in range(951, 0, -50)]
    samples = choose_samples(timesteps, bands_of({}, 8), 64)
    assert np.bincount([sample.picture for sample in samples]).min() >= 14
    assert np.bincount([sample.call for sample in samples]).min() >= 2


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_bands_are_equal_parts(whole, count):
    if count > whole:
        with pytest.raises(UsageError):
            bands_of({"num_train_timesteps": whole}, count)
        return
    bands = bands_of({"num_train_timesteps": whole}, count)
    assert [band_of(t, bands) for t in range(whole)] == [t * count // whole for t in range(whole)]
    assert band_of(-1, bands) == 0
    assert band_of(whole + 0.5, bands) == count - 1


def test_a_band_that_no_step_falls_into_is_named_with_steps_that_work():
    bands = bands_of({}, 4)
    check_bands([999, 700, 400, 100], bands, 4, list)
    with pytest.raises(UsageError, match="the timesteps 250 to 499, 750 to 999") as caught:
        check_bands([700, 100], bands, 2, lambda: [4, 5, 6, 9])
    assert "--steps 4 … 6, 9" in caught.value.hint


@pytest.mark.parametrize(("count", "match"), [(0, "0 samples"), (3, "3 samples for 4")])
def test_fewer_samples_than_bands_are_refused(count, match):
    with pytest.raises(UsageError, match=match):
        choose_samples([900, 600, 300, 0], bands_of({}, 4), count)


@given(st.lists(st.text(), min_size=1, max_size=20, unique=True), st.integers(1, 60))
def test_pictures_take_prompts_in_turn_or_evenly(prompts, pictures):
    taken = prompts_of(prompts, pictures)
    places = [prompts.index(prompt) for prompt in taken]
    if pictures >= len(prompts):
        assert places == [picture % len(prompts) for picture in range(pictures)]
    else:
        assert places == sorted(set(places))
        assert max(np.diff(places), default=1) <= -(-len(prompts) // pictures)
