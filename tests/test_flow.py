"""Flow matching in closed form against diffusers' own scheduler, and strengths against its pipelines."""

from types import SimpleNamespace

import numpy as np
import pytest

from trtdiff.errors import UsageError
from trtdiff.flow import (
    FLUX,
    STABLE_DIFFUSION_3,
    depends_on_size,
    flow_table,
    no_closed_form,
    shift_exponent,
)
from trtdiff.sampler import start_of_strength

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

CONFIGS = [
    {},
    {"shift": 3},
    {"shift": 1.15},
    {"shift": 0.7, "num_train_timesteps": 900},
    {"use_dynamic_shifting": True},
    {"use_dynamic_shifting": True, "base_shift": 0.3, "max_shift": 0.9, "max_image_seq_len": 9000},
    {"use_dynamic_shifting": True, "time_shift_type": "linear"},
    {"use_dynamic_shifting": True, "shift_terminal": 0.02},
    {"shift_terminal": 0.1},
]


def identity_of(scheduler, pipeline, tokens=77):
    config = {name: value for name, value in scheduler.config.items() if not name.startswith("_")}
    return {"class": type(scheduler).__name__, "config": config, "call": {"pipeline": pipeline, "image_tokens": tokens}}


def prepared(scheduler, pipeline, steps, tokens):
    """Call `set_timesteps` as FluxPipeline and StableDiffusion3Pipeline do."""
    config = scheduler.config
    ends = (config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
    mu = diffusers.pipelines.flux.pipeline_flux.calculate_shift(tokens, *ends)
    if pipeline == FLUX:
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    else:
        scheduler.set_timesteps(steps, mu=mu if config.use_dynamic_shifting else None)
    return scheduler.sigmas.numpy(), scheduler.timesteps.numpy()


@pytest.mark.parametrize("options", CONFIGS, ids=str)
@pytest.mark.parametrize("pipeline", [FLUX, STABLE_DIFFUSION_3])
@pytest.mark.parametrize("tokens", [1, 256, 1024, 4096, 16384])
def test_derived_tables_have_the_schedulers_own_sigmas_to_the_last_bit(options, pipeline, tokens):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**options)
    identity = identity_of(scheduler, pipeline)
    for steps in (2, 3, 4, 13, 28, 50, 100):
        sigmas, timesteps = prepared(scheduler, pipeline, steps, tokens)
        for start in (None, 0, steps // 2):
            table = flow_table("it", identity, steps, start, tokens)
            mine, its = sigmas[start or 0 :], timesteps[start or 0 :]
            assert np.array_equal(table.coefficients[1:, 1], mine[1:] - mine[:-1])
            assert np.array_equal(table.known[1:, 1], mine[1:])
            assert np.array_equal(table.known[1:, 0], 1 - mine[1:].astype(float))
            assert table.known[0].tolist() == ([0, 1] if start is None else [1 - float(mine[0]), float(mine[0])])
            assert table.timesteps.dtype == np.float32
            assert np.array_equal(table.timesteps, its)
            assert (table.steps, table.start, table.calls) == (steps, start, steps - (start or 0))


def test_a_table_is_eulers_method():
    """With the true flow of one picture, noise - clean, every latent lies on the line between the two."""
    table = flow_table("it", identity_of(diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0), FLUX), 5, 1, 1)
    clean, noise = 3.0, -1.0
    latent = table.coefficients[0] @ [clean, 0, noise]
    for row, (c, n) in zip(table.coefficients[1:], table.known[1:], strict=True):
        latent = row @ [latent, noise - clean, 0]
        assert latent == pytest.approx(c * clean + n * noise, abs=1e-6)
    assert latent == pytest.approx(clean, abs=1e-6)


def test_the_exponent_where_a_config_is_silent_is_the_pipelines():
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift as of_flux
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift as of_sd3

    assert shift_exponent({}, FLUX, 1000) == of_flux(1000)
    assert shift_exponent({}, STABLE_DIFFUSION_3, 1000) == of_sd3(1000, max_shift=1.16)  # as it calls it


@pytest.mark.parametrize(
    "options", [{"invert_sigmas": True}, {"stochastic_sampling": True}, {"use_karras_sigmas": True}]
)
def test_what_has_no_closed_form_says_so(options):
    identity = identity_of(diffusers.FlowMatchEulerDiscreteScheduler(**options, use_dynamic_shifting=True), FLUX)
    assert next(iter(options)) in no_closed_form(identity)
    assert depends_on_size(identity)
    with pytest.raises(UsageError, match=next(iter(options))):
        flow_table("it", identity, 4, None, 256)


def test_other_schedulers_have_none_and_static_ones_need_none():
    heun = identity_of(diffusers.FlowMatchHeunDiscreteScheduler(), STABLE_DIFFUSION_3)
    assert "FlowMatchHeunDiscreteScheduler" in no_closed_form(heun)
    assert not depends_on_size(heun)
    assert not depends_on_size({"class": "x", "config": {"use_dynamic_shifting": True}, "call": {"pipeline": "x"}})


@pytest.mark.parametrize(("steps", "start", "tokens"), [(0, None, 1), (4, 4, 1), (4, -1, 1), (4, None, 0)])
def test_tables_that_cannot_be_meant(steps, start, tokens):
    with pytest.raises(UsageError, match="no such table"):
        flow_table("it", identity_of(diffusers.FlowMatchEulerDiscreteScheduler(), FLUX), steps, start, tokens)


@pytest.mark.parametrize("kind", ["StableDiffusion3Img2ImgPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline"])
def test_strength_is_read_as_the_pipelines_read_it(kind):
    for steps in (1, 2, 3, 4, 20, 50, 99):
        pipeline = SimpleNamespace(scheduler=SimpleNamespace(timesteps=torch.arange(steps), order=1))
        for strength in (0, 0.019, 0.02, 0.3, 1 / 3, 0.5, 0.6, 0.75, 0.999, 1):
            timesteps, left = getattr(diffusers, kind).get_timesteps(pipeline, steps, strength, "cpu")
            if left == 0:
                with pytest.raises(UsageError, match="no step"):
                    start_of_strength(steps, strength, "fewer")
            else:
                assert start_of_strength(steps, strength, "fewer") == steps - left == int(timesteps[0])


@pytest.mark.parametrize(("steps", "strength"), [(0, 0.5), (20, -0.1), (20, 1.01), (20, float("nan"))])
def test_steps_and_strengths_that_cannot_be_meant(steps, strength):
    with pytest.raises(UsageError):
        start_of_strength(steps, strength, "fewer")
