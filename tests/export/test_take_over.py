"""A refiner goes on where a base model stopped: cut and taken-over tables against diffusers' SDXL pipelines."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from trtdiff.noise import TorchStream
from trtdiff.sampler import run_loop, start_of_fraction
from trtdiff.sampler_book import read_table

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from trtdiff.errors import UsageError  # noqa: E402
from trtdiff.export.affinity import table_error  # noqa: E402
from trtdiff.export.schedule_call import StableDiffusionXLCall  # noqa: E402
from trtdiff.export.schedulers import compile_sampler, make_scheduler  # noqa: E402

SDXL = {  # the scheduler config of Stable Diffusion XL
    "_class_name": "EulerDiscreteScheduler", "clip_sample": False, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "beta_start": 0.00085, "interpolation_type": "linear", "num_train_timesteps": 1000,
    "prediction_type": "epsilon", "sample_max_value": 1.0, "set_alpha_to_one": False, "skip_prk_steps": True,
    "steps_offset": 1, "timestep_spacing": "leading", "trained_betas": None, "use_karras_sigmas": False,
}  # fmt: skip
TRAINED = 1000
SHAPE = (1, 4, 8, 8)
MASK = (np.arange(64) % 3 > 0).astype(float).reshape(1, 1, 8, 8)
NAMES = [
    "ddim",
    "euler",
    "euler_a",
    "euler_karras",
    "dpmpp_2m",
    "dpmpp_2m_sde",
    "dpmpp_3m",
    "unipc",
    "pndm",
    "sa_solver",
]


@dataclass(frozen=True)
class Base(StableDiffusionXLCall):
    """The loop of a base model with `denoising_end`: a part of the timesteps."""

    fraction: float = 0

    def timesteps(self, scheduler, start):
        timesteps = super().timesteps(scheduler, start)
        return timesteps[timesteps >= round(TRAINED - self.fraction * TRAINED)]


@dataclass(frozen=True)
class Refiner(StableDiffusionXLCall):
    """The loop of a refiner with `denoising_start`: the other part, from the latent as it is."""

    fraction: float = 0

    def timesteps(self, scheduler, start):
        return refiner_timesteps(scheduler, scheduler.num_inference_steps, self.fraction)[0]

    def first_latent(self, scheduler, noise, clean, timesteps):
        return clean


def refiner_timesteps(scheduler, steps, fraction):
    pipeline = SimpleNamespace(scheduler=scheduler)
    return diffusers.StableDiffusionXLImg2ImgPipeline.get_timesteps(pipeline, steps, 0.3, "cpu", fraction)


@pytest.fixture(scope="module")
def compiled():
    pages = {
        name: compile_sampler(make_scheduler(SDXL, name), name, StableDiffusionXLCall(), steps=(4, 11))
        for name in NAMES
    }
    return {name: (page.info(), page.tensors()) for name, (page, _) in pages.items()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("steps", "fraction"), [(4, 0.5), (11, 0.8), (11, 0.3)])
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
def test_cut_and_taken_over_tables_equal_diffusers_loops(compiled, name, steps, fraction, mask):
    scheduler = make_scheduler(SDXL, name)
    full = read_table(*compiled[name], steps, None)
    base = full.until(fraction, TRAINED)
    assert 0 < base.calls < full.calls
    assert table_error(scheduler, Base(fraction=fraction), base, mask=mask) < 1e-12

    start = start_of_fraction(full, fraction, TRAINED)
    scheduler.set_timesteps(steps)
    assert full.calls - start == refiner_timesteps(scheduler, steps, fraction)[1]
    refiner = read_table(*compiled[name], steps, start).taken_over()
    assert table_error(scheduler, Refiner(fraction=fraction), refiner, mask=mask) < 1e-12


def test_two_calls_a_step_cannot_be_cut():
    for name in ("heun", "dpm2"):
        pages, _ = compile_sampler(make_scheduler(SDXL, name), name, StableDiffusionXLCall(), steps=(4,))
        with pytest.raises(UsageError, match="2 times a step"):
            read_table(pages.info(), pages.tensors(), 4, None).until(0.5, TRAINED)


@pytest.fixture(scope="module")
def pipelines():
    """Real pipelines around a tiny UNet: base and refiner."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4, addition_embed_type="text_time", addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=6 * 4 + 8,
    ).eval()  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4,) * 4, norm_num_groups=2, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip
    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    return {"unet": unet, "vae": vae, "add_watermarker": False, **parts}


@pytest.mark.parametrize("name", ["euler", "euler_a", "dpmpp_2m", "unipc"])
def test_tables_equal_the_real_pipelines(pipelines, compiled, name):
    """StableDiffusionXLPipeline and StableDiffusionXLImg2ImgPipeline, with a generator each, and no guidance."""
    steps, fraction, seeds = 11, 0.7, (3, 5)
    random = torch.Generator().manual_seed(9)
    embeds = {"prompt_embeds": torch.randn(1, 3, 8, generator=random)}
    embeds["pooled_prompt_embeds"] = torch.randn(1, 8, generator=random)
    common = {
        **embeds, "num_inference_steps": steps, "guidance_scale": 1.0, "output_type": "latent",
        "original_size": (64, 64), "target_size": (64, 64),
    }  # fmt: skip

    def pipe(kind, **options):
        made = kind(scheduler=make_scheduler(SDXL, name), **pipelines, **options)
        made.set_progress_bar_config(disable=True)
        return made

    half = pipe(diffusers.StableDiffusionXLPipeline)(
        **common, height=64, width=64, denoising_end=fraction, generator=torch.Generator().manual_seed(seeds[0])
    ).images
    expected = pipe(diffusers.StableDiffusionXLImg2ImgPipeline)(
        **common, image=half, denoising_start=fraction, generator=torch.Generator().manual_seed(seeds[1])
    ).images.numpy()

    added = {"text_embeds": embeds["pooled_prompt_embeds"], "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]])}

    def unet(latent, timestep, _index):
        with torch.no_grad():
            return pipelines["unet"](
                torch.from_numpy(latent), timestep, encoder_hidden_states=embeds["prompt_embeds"],
                added_cond_kwargs=added,
            ).sample.numpy()  # fmt: skip

    def run(table, stream, noise, clean):
        return run_loop(table, unet, noise, clean=clean, draw=lambda: stream.randn(SHAPE))

    full = read_table(*compiled[name], steps, None)
    base, refiner = (TorchStream(seed) for seed in seeds)
    got = run(full.until(fraction, TRAINED), base, base.randn(SHAPE), None)
    assert np.abs(got - half.numpy()).max() <= 1e-5 * np.abs(half.numpy()).max()
    table = read_table(*compiled[name], steps, start_of_fraction(full, fraction, TRAINED)).taken_over()
    got = run(table, refiner, np.zeros(SHAPE, np.float32), got)  # a refiner draws no first noise
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
