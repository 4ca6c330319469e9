"""What the passes measure of a graph is what numpy says of its values, in float64."""

import numpy as np
import pytest

from trtdiff.calibrate.cache import Statistics
from trtdiff.calibrate.clips import clip_of, counted_edges, tried_clips
from trtdiff.calibrate.feeds import calibrate_feeds
from trtdiff.errors import ArtefactError, NonFiniteError
from trtdiff.passes.eight_bits import FORMATS, GRID, grid_index

ir = pytest.importorskip("onnx_ir")
RNG = np.random.default_rng(1)
INPUTS = ("sample", "rows", "encoder_hidden_states", "seen", "late", "query", "key", "value")
"""Inputs of layers, of the attention those that it splits into heads."""


def feeds(size=1.0):
    return {
        "sample": (size * RNG.standard_normal((2, 4, 6, 5))).astype(np.float32),
        "timestep": np.array([981, 20], np.float32),
        "encoder_hidden_states": RNG.standard_normal((2, 9, 16)).astype(np.float32),
    }


def rounded(array, clip, kind):
    """What is read back; QuantizeLinear gives -128 too."""
    import ml_dtypes

    scale = clip / FORMATS[kind].largest
    if kind == "int8":
        return scale * np.clip(np.rint(array / scale), -128, 127)
    return scale * np.clip(array / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


GIVEN = [(0, feeds()), (1, feeds(3)), (1, feeds(0.5))]


@pytest.fixture(scope="module")
def values(toy):
    """Every value of every execution."""
    return [toy.network(given) for _, given in GIVEN]


@pytest.fixture(scope="module")
def seen(toy_export, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("scratch") / "mse"
    return calibrate_feeds(toy_export / "denoiser.onnx", GIVEN, scratch, method="mse", noise=[0, 1])


@pytest.fixture(scope="module")
def counted(toy_export, tmp_path_factory):
    scratch = tmp_path_factory.mktemp("scratch") / "percentile"
    return calibrate_feeds(toy_export / "denoiser.onnx", GIVEN, scratch, method="percentile")


def test_ranges_are_those_of_float64(seen, values):
    assert seen.rows == 6
    assert set(seen.values) == set(values[0])  # what only moves numbers is not observed, but where a layer reads it
    for name, statistics in seen.values.items():
        for band, executions in enumerate([values[:1], values[1:]]):
            arrays = [one[name] for one in executions]
            assert statistics.amax[band] == pytest.approx(max(np.abs(array).max() for array in arrays), rel=1e-5)
            assert statistics.squares[band] == pytest.approx(sum(np.sum(array**2) for array in arrays), rel=1e-5)
            assert statistics.elements[band] == sum(array.size for array in arrays)


def test_channels_are_those_of_what_goes_into_linear_layers(seen, values):
    linear = {name for name, statistics in seen.values.items() if statistics.channels}
    assert linear == {"rows", "encoder_hidden_states", "seen"}
    for name in linear:
        expected = np.max([np.abs(one[name]).max((0, 1)) for one in values], axis=0)
        np.testing.assert_allclose(seen.values[name].channels, expected, rtol=1e-5)


def test_every_layer_is_named_with_its_multiply_adds(seen):
    facts = {name: (layer.operator, layer.module, layer.macs) for name, layer in seen.layers.items()}
    pixels, tokens = 6 * 5, 9
    assert facts == {
        "blocks.drawn/Conv": ("conv", "blocks.drawn", pixels * 8 * 4 * 9),
        "blocks.query/MatMul": ("linear", "blocks.query", pixels * 8 * 8),
        "blocks.key/MatMul": ("linear", "blocks.key", tokens * 8 * 16),
        "blocks.value/MatMul": ("linear", "blocks.value", tokens * 8 * 16),
        "blocks.heads/Attention": ("attention", "blocks.heads", 2 * pixels * tokens * 8),
        "blocks.out/MatMul": ("linear", "blocks.out", pixels * 8 * 8),
        "blocks.done/Conv": ("conv", "blocks.done", pixels * 4 * 8),
    }
    assert seen.layers["blocks.heads/Attention"].inputs == ("query", "key", "value")


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_errors_are_those_of_rounding(seen, values, kind):
    assert {name for name, statistics in seen.values.items() if statistics.errors} == set(INPUTS)
    for name in INPUTS:
        errors = seen.values[name].errors[kind]
        assert tuple(errors) == tried_clips(seen.values[name], kind)
        for index, error in errors.items():
            scale = GRID**index / FORMATS[kind].largest
            exact = [one[name] - rounded(one[name], scale * FORMATS[kind].largest, kind) for one in values]
            assert error == pytest.approx(sum(np.sum(array**2) for array in exact), rel=2e-3)


def test_small_numbers_are_rounded_to_multiples_of_float8s_least(toy_export, tmp_path):
    """Every number of the graph's input is below 2 ** -6 scales, but for one that sets the scale."""
    given = feeds()
    small = RNG.uniform(-1, 1, given["sample"].shape) * 448 * 2.0**-15
    small[0, 0, 0, 0] = 448
    given["sample"] = small.astype(np.float32)
    found = calibrate_feeds(toy_export / "denoiser.onnx", [(0, given)], tmp_path / "x", formats=["float8"])
    for index, error in found.values["sample"].errors["float8"].items():
        scale = np.float32(GRID**index / 448)
        exact = given["sample"] / scale
        expected = scale**2 * np.sum((exact - exact.astype(FORMATS["float8"].numpy).astype(np.float32)) ** 2)
        assert error == pytest.approx(expected, rel=1e-3)


def test_counts_are_of_elements_beyond(counted, values):
    assert {name for name, statistics in counted.values.items() if statistics.beyond} == set(INPUTS)
    for name in INPUTS:
        beyond = counted.values[name].beyond
        assert tuple(beyond) == counted_edges(counted.values[name])
        assert beyond == {
            index: sum(int((np.abs(one[name]) > GRID**index).sum()) for one in values) for index in beyond
        }


def rounded_weight(array, kind):
    """One scale an output channel, axis 0."""
    largest = np.abs(array).max(tuple(range(1, array.ndim)), keepdims=True)
    return rounded(array.astype(np.float64), largest, kind)


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_noise_is_that_of_a_layer_on_rounded_operands(seen, values, toy, kind):
    weights = dict(zip(("drawn", "query", "key", "value", "out", "done"), toy.weights.values(), strict=True))

    def clip(name):
        return clip_of(seen.values[name], kind, "mse")

    def smoothing(operand, values):
        """SmoothQuant, eq. 4 with half of it, of all linear layers that read the operand; only ratios matter."""
        readers = [weights[name] for name, read in toy.layers.items() if read == operand and weights[name].ndim == 2]
        largest = np.max([np.abs(weight).max(axis=0) for weight in readers], axis=0)
        channels = np.max([np.abs(one[operand]).reshape(-1, len(largest)).max(axis=0) for one in values], axis=0)
        factors = np.sqrt(channels / largest)
        return factors / np.exp(np.log(factors).mean()), channels

    assert ("blocks.heads/Attention" in seen.noise[kind]) == (kind == "float8")
    for name, noise in seen.noise[kind].items():
        result = name.split("/")[0].removeprefix("blocks.")
        signal, lost = 0.0, 0.0
        for one in values[:2]:
            if result == "heads":
                parts = [rounded(one[part], clip(part), kind) for part in ("query", "key", "value")]
                noisy = toy.attention(*parts)
            else:
                read, weight = toy.layers[result], weights[result]
                operand, top = one[read], clip(read)
                if kind == "int8" and weight.ndim == 2:
                    factors, channels = smoothing(read, values)
                    operand, weight, top = operand / factors, weight * factors, (channels / factors).max()
                weight, operand = rounded_weight(weight, kind), rounded(operand, top, kind)
                noisy = toy.convolution(operand, weight) if weight.ndim == 4 else operand @ weight.T
            signal += np.sum(one[result] ** 2)
            lost += np.sum((noisy - one[result]) ** 2)
        assert noise.signal == pytest.approx(signal, rel=1e-4)
        assert noise.noise == pytest.approx(lost, rel=2e-2), name  # few elements, and a tie falls here or there
        assert noise.decibels == pytest.approx(10 * np.log10(signal / lost), abs=0.1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_named(toy_export, tmp_path, bad):
    given = feeds()
    given["encoder_hidden_states"][1, 3, 2] = bad
    with pytest.raises(NonFiniteError, match="in float32") as caught:
        calibrate_feeds(toy_export / "denoiser.onnx", [(0, given)], tmp_path / "x")
    assert "denoiser: first in input encoder_hidden_states" in caught.value.where


# --- clips -----------------------------------------------------------------------------------------------------------

NORMAL = np.abs(np.random.default_rng(2).standard_normal(100_000))


def normal(**more):
    return Statistics((2.0, float(NORMAL.max())), (0.0, float(np.sum(NORMAL**2))), (0, NORMAL.size), **more)


def test_clips_by_the_largest_and_by_the_least_error():
    seen = normal(errors={"int8": {4: 3.0, 5: 1.0, 6: 2.0}})
    assert clip_of(seen, "int8", "max") == NORMAL.max()
    assert clip_of(seen, "int8", "mse") == GRID**5
    with pytest.raises(ArtefactError, match="rounding to float8") as caught:
        clip_of(seen, "float8", "mse")
    assert caught.value.hint == "add it: trtdiff calibrate --resume --method mse --precision fp8"


@pytest.mark.parametrize("percentile", [99.0, 99.9, 100.0])
def test_clips_by_a_percentile_are_the_next_edge(percentile):
    seen = normal()
    beyond = {index: int((GRID**index < NORMAL).sum()) for index in counted_edges(seen)}
    exact = np.percentile(NORMAL, percentile)
    clip = clip_of(normal(beyond=beyond), "int8", "percentile", percentile)
    assert exact / GRID < clip <= exact * GRID
    with pytest.raises(ArtefactError, match="counts") as caught:
        clip_of(seen, "int8", "percentile")
    assert "--method percentile" in caught.value.hint


def test_a_tensor_that_is_always_zero_has_no_clip():
    seen = Statistics((0.0,), (0.0,), (9,))
    assert tried_clips(seen, "int8") == counted_edges(seen) == ()
    assert [clip_of(seen, "int8", method) for method in ("max", "mse", "percentile")] == [0, 0, 0]


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_the_clips_that_are_tried_hold_the_best_for_normal_numbers(kind):
    """As good as any clip of the whole grid, for numbers whose largest is 4.4 of their deviation."""
    clips = {index: GRID**index for index in range(-20, 30)}
    error = {index: float(np.sum((NORMAL - rounded(NORMAL, clip, kind)) ** 2)) for index, clip in clips.items()}
    tried = tried_clips(normal(), kind)
    assert grid_index(NORMAL.max()) in tried
    assert min(error[index] for index in tried) <= 1.02 * min(error.values())
