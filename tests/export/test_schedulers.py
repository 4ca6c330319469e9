"""Compiled samplers against diffusers' own loops: same scheduler, calls and seeds, unmodified, in float32.

Whether a table is exact is measured in float64 when it is compiled (`affinity`); here is what a user sees.
"""

import inspect
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest

from trtdiff.errors import ArtefactError, SamplerError, UsageError
from trtdiff.noise import TorchStream
from trtdiff.sampler import run_loop
from trtdiff.sampler_book import SamplerBook, read_table

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from trtdiff.export.affinity import table_error  # noqa: E402
from trtdiff.export.sampler_pages import write_book  # noqa: E402
from trtdiff.export.schedule_call import StableDiffusionCall, diffusers_loop  # noqa: E402
from trtdiff.export.scheduler_rows import Prober, Stage, replaced  # noqa: E402
from trtdiff.export.schedulers import (  # noqa: E402
    DEFAULT,
    SCHEDULERS,
    USUAL,
    SchedulerChoice,
    compile_sampler,
    compile_samplers,
    make_scheduler,
)

SD15 = {  # the scheduler config of Stable Diffusion 1.5
    "_class_name": "PNDMScheduler", "_diffusers_version": "0.6.0", "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "beta_start": 0.00085, "num_train_timesteps": 1000, "set_alpha_to_one": False, "skip_prk_steps": True,
    "steps_offset": 1, "trained_betas": None, "clip_sample": False,
}  # fmt: skip
SHAPE = (1, 4, 8, 8)
V_ZERO = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
SPACINGS = [{"timestep_spacing": spacing} for spacing in ("leading", "trailing", "linspace")]
SIGMAS = [{"use_karras_sigmas": True}, {"use_exponential_sigmas": True}, {"use_beta_sigmas": True}]
PREDICTIONS = [{"prediction_type": kind} for kind in ("v_prediction", "sample")]
V = {"prediction_type": "v_prediction"}
SIGMA_MIN = {"final_sigmas_type": "sigma_min"}
SDE = {"algorithm_type": "sde-dpmsolver++"}

OPTIONS = {  # every option of every class that changes coefficients
    "DDIMScheduler": [
        *SPACINGS, *PREDICTIONS, V_ZERO, {"set_alpha_to_one": True}, {"beta_schedule": "squaredcos_cap_v2"},
    ],
    "DDPMScheduler": [
        *SPACINGS, *PREDICTIONS, V_ZERO, {"variance_type": "fixed_large"}, {"variance_type": "fixed_small_log"},
    ],
    "DEISMultistepScheduler": [*SPACINGS, *PREDICTIONS, *SIGMAS, {"solver_order": 1}, {"solver_order": 3}],
    "DPMSolverMultistepScheduler": [
        *SPACINGS, *PREDICTIONS, *SIGMAS, V_ZERO, SIGMA_MIN, {"solver_order": 1}, {"solver_order": 3},
        {"algorithm_type": "dpmsolver", **SIGMA_MIN}, {"algorithm_type": "sde-dpmsolver", **SIGMA_MIN}, SDE,
        {**SDE, "use_karras_sigmas": True}, {**SDE, "solver_order": 3}, {"solver_type": "heun"},
        {"euler_at_final": True}, {"use_lu_lambdas": True}, {"lower_order_final": False}, {"solver_order": 3, **V},
    ],
    "DPMSolverSinglestepScheduler": [
        *PREDICTIONS, *SIGMAS, SIGMA_MIN, {"solver_order": 1}, {"solver_order": 3}, SDE, {"solver_type": "heun"},
        {"algorithm_type": "dpmsolver", **SIGMA_MIN}, {"lower_order_final": False},
    ],
    "EulerDiscreteScheduler": [*SPACINGS, V, *SIGMAS, V_ZERO, SIGMA_MIN, {"interpolation_type": "log_linear"}],
    "EulerAncestralDiscreteScheduler": [*SPACINGS, V, V_ZERO],
    "HeunDiscreteScheduler": [*SPACINGS, *PREDICTIONS, *SIGMAS],
    "KDPM2DiscreteScheduler": [*SPACINGS, V, *SIGMAS],
    "KDPM2AncestralDiscreteScheduler": [*SPACINGS, V, *SIGMAS],
    "LCMScheduler": [*PREDICTIONS, V_ZERO, {"original_inference_steps": 100}],
    "LMSDiscreteScheduler": [*SPACINGS, *PREDICTIONS, *SIGMAS],
    "PNDMScheduler": [*SPACINGS, V, {"set_alpha_to_one": True}],
    "SASolverScheduler": [
        *SPACINGS, *PREDICTIONS, *SIGMAS, {"algorithm_type": "noise_prediction"},
        {"predictor_order": 1, "corrector_order": 1}, {"predictor_order": 3, "corrector_order": 4},
    ],
    "TCDScheduler": [*PREDICTIONS, V_ZERO],
    "UniPCMultistepScheduler": [
        *SPACINGS, *PREDICTIONS, *SIGMAS, V_ZERO, SIGMA_MIN, {"solver_order": 1}, {"solver_order": 3},
        {"disable_corrector": [0, 1]}, {"solver_type": "bh1", **SIGMA_MIN}, {"predict_x0": False, **SIGMA_MIN},
        {"lower_order_final": False, **SIGMA_MIN},
    ],
}  # fmt: skip
CASES = [(name, options) for name, choices in OPTIONS.items() for options in choices]


def model(latent, timestep, _index):
    """A smooth non-linear model that mixes neighbours."""
    return (
        np.tanh(0.7 * latent) + 0.2 * np.roll(latent, 1, -1) / (1 + np.abs(latent)) - latent.dtype.type(timestep * 1e-4)
    )


def torch_model(latent, timestep, index):
    return torch.from_numpy(model(latent.numpy(), float(timestep.float()), index))


def reference(scheduler, call, table, dtype, seed=11):
    """Diffusers' own loop from a seed, and the generator as it left it; float32 noises whatever the dtype."""
    clean = torch.from_numpy(np.random.default_rng(seed).standard_normal(SHAPE)).float()
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(SHAPE, generator=generator)

    def randn_tensor(shape, generator, dtype, **_):
        return torch.randn(shape, generator=generator).to(dtype)

    with replaced(scheduler, **({} if dtype == torch.float32 else {"randn_tensor": randn_tensor})):
        return diffusers_loop(
            scheduler, call, steps=table.steps, start=table.start, predict=torch_model, noise=noise.to(dtype),
            clean=clean.to(dtype), generator=generator,
        ).numpy(), clean.numpy(), generator  # fmt: skip


def compare(scheduler, call, table, seed=11):
    """Hold a table against unmodified diffusers, both in float32 from one seed.

    The largest difference may be 1e-5 of the largest latent. Where a float32 rounding grows beyond that within the loop
    (a first sigma of 4096, or two steps for a whole schedule), diffusers' own float32 and float64 loops differ as much,
    and the table may be off by twice that.
    """
    expected, clean, generator = reference(scheduler, call, table, torch.float32)
    stream = TorchStream(seed)
    got = run_loop(
        table,
        model,
        stream.randn(SHAPE),
        clean=None if table.start is None else clean,
        draw=lambda: stream.randn(SHAPE),
    )
    assert got.dtype == expected.dtype == np.float32
    assert (np.abs(stream.randn((16,)) - torch.randn(16, generator=generator).numpy()) < 1e-6).all(), (
        "streams out of step"
    )
    error, size = np.abs(got - expected).max(), np.abs(expected).max()
    rounding = (
        0 if error <= 1e-5 * size else np.abs(expected - reference(scheduler, call, table, torch.float64)[0]).max()
    )
    assert error <= max(1e-5 * size, 2 * rounding), (
        f"{table}: off by {error / size:.1e}, rounding {rounding / size:.1e}"
    )


def check(scheduler, call=None, steps=(7,), starts=(None, 0, 2)):
    call = call or StableDiffusionCall()
    pages, report = compile_sampler(scheduler, "it", call, steps=steps)
    assert report.residual <= 1e-12
    assert report.affinity <= 1e-12
    info, tensors = pages.info(), pages.tensors()
    for count in report.steps:
        for start in starts:
            if start is None or start < count:
                compare(scheduler, call, read_table(info, tensors, count, start))
    return report


@pytest.mark.parametrize("name", [DEFAULT, *SCHEDULERS])
def test_every_named_scheduler_equals_diffusers(name):
    report = check(make_scheduler(SD15, name), steps=(1, 2, 3, 12), starts=(None, 0, 1, 6))
    assert report.window <= 4


@pytest.mark.parametrize(("class_name", "options"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_every_option_equals_diffusers(class_name, options):
    check(getattr(diffusers, class_name).from_config(SD15, **options))


MASK = (np.arange(64) % 3 > 0).astype(float).reshape(1, 1, 8, 8)


@pytest.mark.parametrize("name", [DEFAULT, *SCHEDULERS])
def test_a_mask_keeps_the_picture_as_the_inpainting_loop_does(name):
    """In float64. Schedulers that remember latents (UniPC, SA-Solver) carry nothing from kept to painted elements."""
    scheduler, call = make_scheduler(SD15, name), StableDiffusionCall()
    pages, report = compile_sampler(scheduler, name, call, steps=(1, 2, 9))
    assert report.no_mask == ""
    info, tensors = pages.info(), pages.tensors()
    for steps in report.steps:
        for start in {None, 0, steps // 2}:
            table = read_table(info, tensors, steps, start)
            assert table_error(scheduler, call, table, mask=MASK) < 1e-12
            if table.calls > 1:
                wrong = replace(table, known=table.known + np.eye(1, table.calls + 1, table.calls - 1).T)
                assert table_error(scheduler, call, wrong, mask=MASK) > 1e-5


def test_known_rows_are_shared_by_the_starts():
    pages, _ = compile_sampler(make_scheduler(SD15, "euler"), "euler", StableDiffusionCall(), steps=(20,))
    assert len(pages.tensors()["known"]) == 20


@pytest.mark.parametrize("name", ["ddim", "tcd"])
@pytest.mark.parametrize("eta", [0.3, 1.0])
def test_eta(name, eta):
    report = check(make_scheduler(SD15, name), StableDiffusionCall(eta=eta))
    assert report.window == 1


@pytest.mark.parametrize("name", ["lcm", "dpm2_a_karras", "dpmpp_2m_sde_karras", "ddpm"])
def test_fifty_steps_are_not_taken_for_a_clip(name):
    check(make_scheduler(SD15, name), steps=(50,), starts=(None, 25))


def test_pndm_with_its_runge_kutta_warm_up():
    scheduler = diffusers.PNDMScheduler.from_config(SD15, skip_prk_steps=False)
    assert check(scheduler, steps=(5, 12)).window == 11


def test_edm_schedulers():
    for scheduler in (diffusers.EDMEulerScheduler(), diffusers.EDMDPMSolverMultistepScheduler()):
        check(scheduler)


@dataclass(frozen=True)
class FlowMatchCall(StableDiffusionCall):
    """As StableDiffusion3Pipeline calls its scheduler: noise alone is the first latent, scale_noise mixes in images."""

    @property
    def identity(self):
        return {"pipeline": "flow-match"}

    def first_latent(self, scheduler, noise, clean, timesteps):
        return noise if clean is None else scheduler.scale_noise(clean, timesteps[:1], noise)


@pytest.mark.parametrize("options", [{}, {"shift": 3.0}, {"use_karras_sigmas": True}, {"stochastic_sampling": True}])
def test_flow_matching_euler(options):
    check(diffusers.FlowMatchEulerDiscreteScheduler(**options), FlowMatchCall())


def test_a_scheduler_that_cannot_add_noise_has_no_image_to_image(tmp_path):
    pages, report = compile_sampler(diffusers.IPNDMScheduler(), "ipndm", StableDiffusionCall(), steps=[7])
    assert "add_noise" in report.no_image
    compare(diffusers.IPNDMScheduler(), StableDiffusionCall(), read_table(pages.info(), pages.tensors(), 7, None))
    write_book(tmp_path / "book", [pages], {})
    book = SamplerBook.open(tmp_path / "book")
    with pytest.raises(UsageError, match="cannot start from an image"):
        book.table("ipndm", 7, 3)
    assert book.table("ipndm", 7).known is None
    with pytest.raises(UsageError, match=r"cannot keep a part of a picture \(AttributeError: .*add_noise"):
        book.masked_table("ipndm", 7)


@pytest.mark.parametrize("options", [{"solver_type": "bh1"}, {"predict_x0": False}, {"lower_order_final": False}])
def test_step_counts_for_which_diffusers_gives_no_number_are_refused(options):
    scheduler = diffusers.UniPCMultistepScheduler.from_config(SD15, **options)
    noise = torch.from_numpy(TorchStream(0).randn(SHAPE))
    x = diffusers_loop(
        scheduler,
        StableDiffusionCall(),
        steps=7,
        start=None,
        predict=torch_model,
        noise=noise,
        clean=None,
        generator=None,
    )
    assert not torch.isfinite(x).all()
    with pytest.raises(SamplerError, match="not finite"):
        compile_sampler(scheduler, "unipc", StableDiffusionCall(), steps=[7])


def test_flow_matching_heun():
    check(diffusers.FlowMatchHeunDiscreteScheduler(), FlowMatchCall())


@pytest.mark.parametrize("name", [DEFAULT, *SCHEDULERS])
def test_rows_borrowed_from_the_full_run_are_those_of_a_run_of_its_own(name):
    """A start's run stops when the scheduler's state is the full run's; here it goes on to the end."""
    scheduler, call = make_scheduler(SD15, name), StableDiffusionCall()
    pages, report = compile_sampler(scheduler, name, call, steps=(9,))
    info, tensors = pages.info(), pages.tensors()
    with Stage(scheduler) as stage:
        for steps in report.steps:
            prober = Prober(stage, call, steps)
            for start in range(steps):
                run = prober.run(start)
                rows, _ = run.coefficients(report.window)
                table = read_table(info, tensors, steps, start)
                np.testing.assert_allclose(table.coefficients[1:], rows, rtol=0, atol=1e-11)
                assert np.array_equal(table.scales, run.scales)
                assert np.array_equal(table.draws, run.draws)
                assert np.array_equal(table.timesteps, run.timesteps)


def test_threads_replace_names_one_after_another():
    scheduler = make_scheduler(SD15, "ddim")
    module, entered, leave, order = inspect.getmodule(type(scheduler)), threading.Event(), threading.Event(), []
    before = module.randn_tensor

    def hold():
        with Stage(make_scheduler(SD15, "ddim")):
            entered.set()
            leave.wait(10)
            order.append("first")

    first = threading.Thread(target=hold)
    first.start()
    entered.wait(10)
    threading.Timer(0.2, leave.set).start()
    with Stage(scheduler):
        order.append("second")
    first.join()
    assert order == ["first", "second"]
    assert module.randn_tensor is before


def test_a_run_leaves_the_scheduler_as_it_was():
    scheduler = make_scheduler(SD15, "dpmpp_2s")
    before, config = dict(vars(scheduler)), dict(scheduler.config)
    module = inspect.getmodule(type(scheduler))
    with Stage(scheduler) as stage:
        Prober(stage, StableDiffusionCall(), 7).run(None)
        assert module.torch is not torch
    assert module.torch is torch
    assert vars(scheduler) == before
    assert dict(scheduler.config) == config


@pytest.mark.parametrize(
    ("name", "config", "field"),
    [
        ("dpmpp_2m", {**SD15, "thresholding": True}, "thresholding"),
        ("unipc", {**SD15, "thresholding": True}, "thresholding"),
        ("ddim", {name: value for name, value in SD15.items() if name != "clip_sample"}, "clip_sample"),
        ("lcm", {**SD15, "_class_name": "LCMScheduler", "clip_sample": 1, "clip_sample_range": 2.0}, "clip_sample"),
        ("ddpm", {**SD15, "_class_name": "DDPMScheduler", "thresholding": True}, "thresholding"),
    ],
)
def test_what_cuts_values_off_is_refused_by_name(name, config, field, tmp_path):
    with pytest.raises(SamplerError) as caught:
        compile_samplers(config, [name], path=tmp_path / "x.safetensors", steps=[5])
    assert name in caught.value.message
    assert field in caught.value.where
    assert not list(tmp_path.iterdir())


def test_thresholding_that_never_bites_is_no_reason_to_refuse():
    check(make_scheduler({**SD15, "_class_name": "DDIMScheduler", "clip_sample_range": 1e9, "clip_sample": 1}, DEFAULT))


@pytest.mark.parametrize(
    "config", [{"_class_name": "DPMSolverSDEScheduler"}, {"_class_name": "CosineDPMSolverMultistepScheduler"}]
)
def test_brownian_trees_are_refused_by_name(config):
    with pytest.raises(SamplerError, match=f"{config['_class_name']} cannot be compiled: its noise is a Brownian tree"):
        make_scheduler(config)


@pytest.mark.parametrize("config", [{}, {"_class_name": "UNet2DModel"}, {"_class_name": "NoSuchScheduler"}])
def test_what_is_no_scheduler(config):
    with pytest.raises(SamplerError, match="has no scheduler"):
        make_scheduler(config)


def test_an_unknown_name_is_a_usage_error_that_knows_better():
    with pytest.raises(UsageError, match="did you mean 'dpmpp_2m_karras'"):
        make_scheduler(SD15, "dpmpp_2m_karas")


def test_a_config_that_diffusers_refuses():
    with pytest.raises(SamplerError, match="diffusers refuses"):
        make_scheduler({**SD15, "use_exponential_sigmas": True}, "dpmpp_2m_karras")


def test_the_pipeline_rewrites_the_first_years_configs():
    old = {**SD15, "_class_name": "DDIMScheduler", "steps_offset": 0, "clip_sample": True}
    scheduler = make_scheduler(old)
    assert (scheduler.config.steps_offset, scheduler.config.clip_sample) == (1, False)
    check(scheduler)


def test_every_class_of_the_named_list_exists():
    for name, choice in SCHEDULERS.items():
        assert isinstance(choice, SchedulerChoice)
        assert type(make_scheduler(SD15, name)).__name__ == choice.class_name
    assert set(USUAL) <= {DEFAULT, *SCHEDULERS}


def test_a_book_of_several_schedulers(tmp_path):
    seen = []
    path = tmp_path / "samplers.safetensors"
    compiled = compile_samplers(
        SD15, [DEFAULT, "euler", "lcm"], path=path, steps=[1, 4, 51], optional=["ddim"],
        progress=lambda name, done, total: seen.append((name, done, total)),
    )  # fmt: skip
    book = SamplerBook.open(path)
    assert book.names == ("default", "euler", "lcm", "ddim")
    assert seen[-1] == ("ddim", 6, 6)
    assert book.made_by["diffusers"] == diffusers.__version__
    assert compiled.size == path.stat().st_size
    assert book.steps("default") == (1, 4, 51)
    assert book.steps("lcm") == (1, 4)  # LCM has 50 steps to choose from
    for name in book.names:
        for start in (None, 0, 2):
            compare(make_scheduler(SD15, name), StableDiffusionCall(), book.table(name, 4, start))
    with pytest.raises(UsageError, match="the scheduler itself refuses"):
        book.table("lcm", 51)
    assert len({info.digest for info in book.samplers.values()}) == 4
    assert (book.samplers["default"].class_name, book.samplers["default"].window) == ("PNDMScheduler", 4)
    again = compile_samplers(SD15, [DEFAULT, "euler", "lcm", "ddim"], path=path, steps=[1, 4, 51])
    assert again.size == compiled.size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtefactError):
        SamplerBook.open(path)


def test_an_optional_scheduler_that_cannot_be_compiled_is_left_out_and_reported(tmp_path):
    path = tmp_path / "book"
    compiled = compile_samplers({**SD15, "thresholding": True}, [DEFAULT], path=path, steps=[3], optional=["dpmpp_2m"])
    assert SamplerBook.open(path).names == (DEFAULT,)
    assert "thresholding" in compiled.refused["dpmpp_2m"]
    with pytest.raises(UsageError):
        compile_samplers(SD15, [DEFAULT, "no such"], path=path, progress=lambda *_: pytest.fail("work had begun"))


def test_digests_change_with_the_config_and_with_the_call():
    def digest(config, call):
        return compile_sampler(make_scheduler(config, "ddim"), "ddim", call, steps=[2])[0].info().digest

    plain = digest(SD15, StableDiffusionCall())
    assert plain == digest(dict(reversed(SD15.items())), StableDiffusionCall())
    assert plain != digest({**SD15, "beta_end": 0.02}, StableDiffusionCall())
    assert plain != digest(SD15, StableDiffusionCall(eta=1.0))


@pytest.fixture(scope="module")
def pipelines():
    """Real pipelines around a tiny UNet, text to image and image to image."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    ).eval()  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4,) * 4, norm_num_groups=2, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip
    return {
        "unet": unet, "vae": vae, "text_encoder": None, "tokenizer": None, "safety_checker": None,
        "feature_extractor": None, "requires_safety_checker": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", [DEFAULT, "ddim", "euler", "euler_a", "dpmpp_2m_sde_karras", "unipc", "heun", "dpm2_a", "lcm"]
)
@pytest.mark.parametrize("strength", [None, 0.6])
def test_the_loop_equals_the_real_pipeline(pipelines, name, strength):
    """StableDiffusionPipeline itself, with a UNet, two images with a generator each, and no guidance."""
    kind = diffusers.StableDiffusionPipeline if strength is None else diffusers.StableDiffusionImg2ImgPipeline
    steps, seed, embeds = 6, 21, torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(5))
    pipe = kind(scheduler=diffusers.PNDMScheduler.from_config(SD15), **pipelines)
    pipe.set_progress_bar_config(disable=True)
    if name != DEFAULT:
        choice = SCHEDULERS[name]
        pipe.scheduler = getattr(diffusers, choice.class_name).from_config(pipe.scheduler.config, **choice.overrides)
    clean = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(6))
    size = {"height": 64, "width": 64} if strength is None else {"image": clean, "strength": strength}
    expected = pipe(
        prompt_embeds=embeds.repeat(2, 1, 1), num_inference_steps=steps, guidance_scale=1.0, output_type="latent",
        generator=[torch.Generator().manual_seed(seed + i) for i in range(2)], **size,
    ).images.numpy()  # fmt: skip

    start = None if strength is None else 3
    pages, _ = compile_sampler(make_scheduler(SD15, name), name, StableDiffusionCall(), steps=[steps])
    table = read_table(pages.info(), pages.tensors(), steps, start)

    def unet(latent, timestep, _index):
        with torch.no_grad():
            return pipelines["unet"](torch.from_numpy(latent), timestep, encoder_hidden_states=embeds).sample.numpy()

    for image in range(2):
        stream = TorchStream(seed + image)
        begin = None if strength is None else clean[image : image + 1].numpy()
        got = run_loop(table, unet, stream.randn(SHAPE), clean=begin, draw=lambda stream=stream: stream.randn(SHAPE))
        assert np.abs(got[0] - expected[image]).max() <= 1e-5 * np.abs(expected[image]).max()


@pytest.mark.parametrize("name", [DEFAULT, "euler_a", "dpmpp_2m_karras", "unipc", "heun"])
@pytest.mark.parametrize("strength", [1.0, 0.6])
def test_the_masked_loop_equals_the_real_inpainting_pipeline(pipelines, name, strength, tmp_path):
    """StableDiffusionInpaintPipeline with a UNet of 4 channels, which knows nothing of masks; strength 1: no start."""
    steps, seed, embeds = 6, 4, torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(5))
    pipe = diffusers.StableDiffusionInpaintPipeline(scheduler=diffusers.PNDMScheduler.from_config(SD15), **pipelines)
    pipe.set_progress_bar_config(disable=True)
    if name != DEFAULT:
        choice = SCHEDULERS[name]
        pipe.scheduler = getattr(diffusers, choice.class_name).from_config(pipe.scheduler.config, **choice.overrides)
    clean = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(6))
    expected = pipe(
        prompt_embeds=embeds, num_inference_steps=steps, guidance_scale=1.0, output_type="latent", image=clean,
        mask_image=torch.from_numpy(MASK).repeat_interleave(8, 2).repeat_interleave(8, 3).float(),
        masked_image_latents=clean, height=64, width=64, strength=strength,
        generator=torch.Generator().manual_seed(seed),
    ).images.numpy()  # fmt: skip

    compile_samplers(SD15, [name], path=tmp_path / "book", steps=[steps])
    table = SamplerBook.open(tmp_path / "book").masked_table(name, steps, None if strength == 1 else 3)

    def unet(latent, timestep, _index):
        with torch.no_grad():
            return pipelines["unet"](torch.from_numpy(latent), timestep, encoder_hidden_states=embeds).sample.numpy()

    stream = TorchStream(seed)
    noise = stream.randn(SHAPE)
    got = run_loop(table, unet, noise, clean=clean.numpy(), draw=lambda: stream.randn(SHAPE), mask=MASK)
    assert np.array_equal(got[..., MASK[0, 0] == 0], clean.numpy()[..., MASK[0, 0] == 0])
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
