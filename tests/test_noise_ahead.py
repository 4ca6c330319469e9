"""Noises drawn ahead are the stream's own, in order, and no more of them than the steps need."""

import threading

import numpy as np
import pytest

from trtdiff.noise import TorchStream
from trtdiff.noise_ahead import NoiseAhead

SHAPE = (2, 4, 8, 8)


class Stream:
    """Fill arrays from one stream and remember how often."""

    def __init__(self):
        self.stream, self.draws = TorchStream(3), 0

    def fill(self, out):
        self.draws += 1
        out[...] = self.stream.randn(SHAPE)
        return out


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 15, 16, 40])
def test_noises_come_in_the_order_of_the_stream(count):
    ahead, plain = Stream(), Stream()
    with NoiseAhead(ahead.fill, SHAPE, count) as noises:
        for _ in range(count):
            np.testing.assert_array_equal(noises.take(), plain.fill(np.empty(SHAPE, np.float32)))
    assert ahead.draws == count


def test_no_noise_to_draw_needs_no_thread():
    before = threading.active_count()
    with NoiseAhead(Stream().fill, SHAPE, 0):
        assert threading.active_count() == before


def test_taking_more_than_announced_is_an_error():
    with NoiseAhead(Stream().fill, SHAPE, 1) as noises:
        noises.take()
        with pytest.raises(IndexError):
            noises.take()


def test_what_goes_wrong_in_the_thread_comes_out_here():
    def broken(out):
        raise MemoryError

    with NoiseAhead(broken, SHAPE, 2) as noises, pytest.raises(MemoryError):
        noises.take()


def test_leaving_early_ends_the_thread():
    before = threading.active_count()
    with NoiseAhead(Stream().fill, SHAPE, 30) as noises:
        noises.take()
    assert threading.active_count() == before
