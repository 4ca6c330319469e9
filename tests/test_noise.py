"""TorchStream against torch.randn: the values to a float32's last bits, the state exactly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtdiff.errors import UsageError
from trtdiff.noise import TorchStream, initial_noise

SEEDS = st.one_of(st.integers(-(2**63), 2**64 - 1), st.sampled_from([0, 1, -1, 2**32 - 1, 2**32, 2**64 - 1, -(2**63)]))
COUNTS = st.one_of(st.integers(0, 15), st.integers(16, 100))


def assert_close(got, expected):
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    assert (np.abs(got - expected) <= 3e-7 * np.maximum(1, np.abs(expected))).all()


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS, counts=st.lists(COUNTS, min_size=1, max_size=12))
def test_successive_calls_of_any_length_stay_in_step_with_torch(seed, counts):
    import torch

    generator, stream = torch.Generator().manual_seed(seed), TorchStream(seed)
    for count in [*counts, 16]:  # a block at the end shows whether the state is still the same
        assert_close(stream.randn((count,)), torch.randn(count, generator=generator).numpy())


@pytest.mark.parametrize("shape", [(1, 4, 64, 64), (1, 4, 128, 128), (1, 4, 65, 67), (2, 4, 8, 8), (1, 3, 1, 5)])
def test_latent_shapes(shape):
    import torch

    stream, generator = TorchStream(7), torch.Generator().manual_seed(7)
    for _ in range(3):
        assert_close(stream.randn(shape), torch.randn(shape, generator=generator).numpy())


def test_the_second_of_two_scalar_normals_waits_through_a_long_call():
    import torch

    stream, generator = TorchStream(3), torch.Generator().manual_seed(3)
    for count in (1, 64, 1, 5, 17, 3):
        assert_close(stream.randn((count,)), torch.randn(count, generator=generator).numpy())


def test_each_image_of_a_request_has_its_own_stream():
    import torch

    for image in range(3):
        expected = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(40 + image)).numpy()
        assert_close(initial_noise(40, image, (1, 4, 8, 8)), expected)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, "7", None, True])
def test_what_torch_refuses_is_refused(seed):
    import torch

    with pytest.raises((ValueError, TypeError, RuntimeError)):
        torch.Generator().manual_seed(seed)
    with pytest.raises(UsageError) as caught:
        TorchStream(seed)
    assert repr(seed) in str(caught.value)


def test_numpy_integers_are_seeds():
    assert np.array_equal(TorchStream(np.uint64(5)).randn((16,)), TorchStream(5).randn((16,)))
