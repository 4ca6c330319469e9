"""The schedule calls of SDXL and PixArt against what their pipelines do."""

import numpy as np
import pytest

from trtdiff.noise import TorchStream
from trtdiff.sampler import run_loop
from trtdiff.sampler_book import read_table

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from trtdiff.export.schedule_call import PixArtCall, StableDiffusionXLCall  # noqa: E402
from trtdiff.export.schedulers import DEFAULT, compile_sampler, make_scheduler  # noqa: E402
from trtdiff.families.stable_diffusion import StableDiffusion  # noqa: E402

PIXART = {  # the scheduler config of PixArt-alpha
    "_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "dpmsolver++", "beta_end": 0.02,
    "beta_schedule": "linear", "beta_start": 0.0001, "clip_sample": False, "num_train_timesteps": 1000,
    "prediction_type": "epsilon", "solver_order": 2, "solver_type": "midpoint", "thresholding": False,
    "timestep_spacing": "linspace", "use_karras_sigmas": False,
}  # fmt: skip
SHAPE = (1, 4, 8, 8)


def test_sdxl_leaves_the_scheduler_as_it_came():
    config = {"_class_name": "DDIMScheduler", "steps_offset": 0, "clip_sample": True}
    for call, kept in ((None, (1, False)), (StableDiffusionXLCall(), (0, True)), (PixArtCall(), (0, True))):
        scheduler = make_scheduler(config, DEFAULT, call)
        assert (scheduler.config.steps_offset, scheduler.config.clip_sample) == kept


@pytest.mark.parametrize("scheduler", ["DDIMScheduler", "PNDMScheduler", "LCMScheduler", "EulerDiscreteScheduler"])
@pytest.mark.parametrize("name", StableDiffusion.pipelines)
def test_a_scheduler_s_config_is_what_each_pipeline_makes_of_it(name, scheduler):
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(4, 4), norm_num_groups=2, attention_head_dim=2, cross_attention_dim=4,
        in_channels=9 if "Inpaint" in name else 4, layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    own = getattr(diffusers, scheduler).from_config({"_class_name": scheduler})
    theirs = getattr(diffusers, name)(**parts, unet=unet, scheduler=own, requires_safety_checker=False).scheduler
    ours = make_scheduler({"_class_name": scheduler}, DEFAULT, StableDiffusion().schedule_call(name, 0))
    fields = [field for field in theirs.config if not field.startswith("_")]
    assert {field: ours.config[field] for field in fields} == {field: theirs.config[field] for field in fields}


@pytest.fixture(scope="module")
def pixart():
    torch.manual_seed(0)
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=8, patch_size=2, num_layers=1, num_attention_heads=2, attention_head_dim=4, in_channels=4,
        out_channels=8, cross_attention_dim=8, caption_channels=8, norm_type="ada_norm_single",
    ).eval()  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4,) * 4, norm_num_groups=2, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip
    return {"transformer": transformer, "vae": vae, "text_encoder": None, "tokenizer": None}


@pytest.mark.parametrize(
    ("name", "steps"),
    [(DEFAULT, 6), ("euler_a", 6), ("dpmpp_2m_sde_karras", 6), ("unipc", 6), ("heun", 6), ("ddim", 1), ("lcm", 1)],
)
def test_pixart(pixart, name, steps):
    """One step is the scheduler's estimate of the clean latent."""
    seed, embeds = 3, torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(1))
    pipe = diffusers.PixArtAlphaPipeline(scheduler=make_scheduler(PIXART, name, PixArtCall()), **pixart)
    pipe.set_progress_bar_config(disable=True)
    expected = pipe(
        prompt_embeds=embeds, prompt_attention_mask=torch.ones(1, 3), negative_prompt=None, height=64, width=64,
        num_inference_steps=steps, guidance_scale=1.0, use_resolution_binning=False, output_type="latent",
        generator=torch.Generator().manual_seed(seed),
    ).images.numpy()  # fmt: skip
    pages, _ = compile_sampler(make_scheduler(PIXART, name, PixArtCall()), name, PixArtCall(), steps=[steps])
    stream = TorchStream(seed)

    def transformer(latent, timestep, _index):
        with torch.no_grad():
            both = pixart["transformer"](
                torch.from_numpy(latent), encoder_hidden_states=embeds, timestep=torch.tensor([timestep]),
                encoder_attention_mask=torch.ones(1, 3),
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            ).sample  # fmt: skip
        return both[:, :4].numpy()

    table = read_table(pages.info(), pages.tensors(), steps, None)
    got = run_loop(table, transformer, stream.randn(SHAPE), draw=lambda: stream.randn(SHAPE))
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_scheduler_without_an_estimate_of_the_clean_latent_takes_pixart_no_single_step():
    _, report = compile_sampler(make_scheduler(PIXART, DEFAULT, PixArtCall()), "it", PixArtCall(), steps=[1, 2])
    assert "IndexError" in report.refused_steps[1]
    assert report.steps == (2,)
