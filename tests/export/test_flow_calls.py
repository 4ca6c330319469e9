"""Flow-matching tables against the real pipelines of Stable Diffusion 3 and FLUX, around tiny transformers."""

from dataclasses import replace

import numpy as np
import pytest

from trtdiff.errors import SamplerError, UsageError
from trtdiff.flow import flow_table
from trtdiff.noise import TorchStream
from trtdiff.sampler import run_loop, start_of_strength
from trtdiff.sampler_book import SamplerBook, read_table

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from trtdiff.export import closed_form  # noqa: E402
from trtdiff.export.flow_calls import FluxCall, StableDiffusion3Call  # noqa: E402
from trtdiff.export.schedulers import (  # noqa: E402
    DEFAULT,
    FLOW_SCHEDULERS,
    compile_sampler,
    compile_samplers,
    make_scheduler,
)

SD3 = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
SCHNELL = {
    **SD3, "base_image_seq_len": 256, "base_shift": 0.5, "max_image_seq_len": 4096, "max_shift": 1.15, "shift": 1.0,
    "use_dynamic_shifting": False,
}  # fmt: skip
DEV = {**SCHNELL, "shift": 3.0, "use_dynamic_shifting": True}
TOKENS = 16  # of a latent of 8 by 8
MASK = (np.arange(64) % 3 > 0).astype(np.float32).reshape(1, 1, 8, 8)
STATIC = [(StableDiffusion3Call(TOKENS), SD3), (FluxCall(TOKENS), SCHNELL)]


def table_of(config, name, call, steps, start):
    scheduler = make_scheduler(config, name, call, FLOW_SCHEDULERS)
    pages, report = compile_sampler(scheduler, name, call, steps=[steps])
    assert report.affinity < 1e-11
    return read_table(pages.info(), pages.tensors(), steps, start)


def vae():
    return diffusers.AutoencoderKL(
        block_out_channels=(4,) * 4, norm_num_groups=2, latent_channels=16, shift_factor=0.0,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip


def close(got, expected):
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.fixture(scope="module")
def sd3():
    torch.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=16, num_layers=1, attention_head_dim=4, num_attention_heads=2,
        joint_attention_dim=8, caption_projection_dim=8, pooled_projection_dim=8, out_channels=16,
        pos_embed_max_size=8,
    ).eval()  # fmt: skip
    names = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
    embeds = {"prompt_embeds": torch.randn(1, 3, 8), "pooled_prompt_embeds": torch.randn(1, 8)}
    return {"transformer": transformer, "vae": vae(), **dict.fromkeys(names)}, embeds


@pytest.fixture(scope="module")
def flux():
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4),
    ).eval()  # fmt: skip
    names = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    embeds = {"prompt_embeds": torch.randn(1, 3, 8), "pooled_prompt_embeds": torch.randn(1, 8)}
    return {"transformer": transformer, "vae": vae(), **dict.fromkeys(names)}, embeds


def run_pipeline(kind, parts, embeds, scheduler, strength, masked):
    """Run a real pipeline from seed 8; gives its latent and what it started from."""
    pipe = kind(scheduler=scheduler, **parts)
    pipe.set_progress_bar_config(disable=True)
    clean = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(6))
    options = {"guidance_scale": 1.0, "height": 64, "width": 64}
    if strength is not None:
        options |= {"image": clean, "strength": strength}
    if masked:
        wide = torch.from_numpy(MASK).repeat_interleave(8, 2).repeat_interleave(8, 3)
        options |= {"mask_image": wide, "masked_image_latents": clean}
    latent = pipe(
        **embeds, num_inference_steps=6, output_type="latent", generator=torch.Generator().manual_seed(8), **options
    ).images
    return latent.numpy(), clean.numpy()


def noise():
    return TorchStream(8).randn((1, 16, 8, 8))


@pytest.mark.parametrize("config", [SD3, DEV], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [DEFAULT, "flow_heun", "flow_dpmpp_2m", "flow_unipc"])
@pytest.mark.parametrize(("strength", "masked"), [(None, False), (0.6, False), (0.6, True), (1.0, True)])
def test_tables_equal_stable_diffusion_3(sd3, config, name, strength, masked):
    call = StableDiffusion3Call(TOKENS)
    if name == "flow_heun" and config is DEV:
        with pytest.raises(SamplerError, match="unexpected keyword argument 'mu'"):
            table_of(config, name, call, 6, None)
        return
    if strength is not None and name in {"flow_dpmpp_2m", "flow_unipc"}:
        assert table_of(config, name, call, 6, 2) is None  # no scale_noise, here as there
        return
    parts, embeds = sd3
    kind = (
        diffusers.StableDiffusion3InpaintPipeline if masked
        else diffusers.StableDiffusion3Pipeline if strength is None else diffusers.StableDiffusion3Img2ImgPipeline
    )  # fmt: skip
    scheduler = make_scheduler(config, name, call, FLOW_SCHEDULERS)
    expected, clean = run_pipeline(kind, parts, embeds, scheduler, strength, masked)
    start = None if strength in {None, 1.0} else start_of_strength(6, strength, "fewer")
    table = table_of(config, name, call, 6, start)

    def transformer(latent, timestep, _index):
        with torch.no_grad():
            return parts["transformer"](
                torch.from_numpy(latent), timestep=torch.tensor([timestep]),
                pooled_projections=embeds["pooled_prompt_embeds"], encoder_hidden_states=embeds["prompt_embeds"],
            ).sample.numpy()  # fmt: skip

    got = run_loop(
        table, transformer, noise(), clean=None if strength is None else clean, mask=MASK if masked else None
    )
    close(got, expected)


@pytest.mark.parametrize("config", [SCHNELL, DEV], ids=["schnell", "dev"])
@pytest.mark.parametrize("name", [DEFAULT, "flow_dpmpp_2m", "flow_unipc"])
@pytest.mark.parametrize(("strength", "masked"), [(None, False), (0.6, False), (0.6, True), (1.0, True)])
def test_tables_equal_flux(flux, config, name, strength, masked):
    call = FluxCall(TOKENS)
    if name == "flow_dpmpp_2m" and config is SCHNELL:
        with pytest.raises(SamplerError, match="runs at no step count: AssertionError"):
            table_of(config, name, call, 6, None)
        return
    if strength is not None and name != DEFAULT:
        assert table_of(config, name, call, 6, 2) is None
        return
    parts, embeds = flux
    kind = (
        diffusers.FluxInpaintPipeline if masked
        else diffusers.FluxPipeline if strength is None else diffusers.FluxImg2ImgPipeline
    )  # fmt: skip
    scheduler = make_scheduler(config, name, call, FLOW_SCHEDULERS)
    expected, clean = run_pipeline(kind, parts, embeds, scheduler, strength, masked)
    table = table_of(config, name, call, 6, None if strength is None else start_of_strength(6, strength, "fewer"))
    places = diffusers.FluxPipeline._prepare_latent_image_ids(1, 4, 4, "cpu", torch.float32)

    def pack(latent):
        return diffusers.FluxPipeline._pack_latents(torch.from_numpy(latent), 1, 16, 8, 8)

    def transformer(latent, timestep, _index):
        with torch.no_grad():
            packed = parts["transformer"](
                pack(latent), timestep=torch.tensor([timestep]) / 1000,
                pooled_projections=embeds["pooled_prompt_embeds"],
                encoder_hidden_states=embeds["prompt_embeds"], txt_ids=torch.zeros(3, 3), img_ids=places,
            ).sample  # fmt: skip
        return diffusers.FluxPipeline._unpack_latents(packed, 64, 64, 8).numpy()

    got = run_loop(
        table, transformer, noise(), clean=None if strength is None else clean, mask=MASK if masked else None
    )
    close(pack(got).numpy(), expected)


@pytest.mark.parametrize("call", [StableDiffusion3Call(TOKENS), FluxCall(TOKENS)])
def test_what_draws_noise_is_refused_as_the_pipelines_give_no_generator(call):
    with pytest.raises(SamplerError, match="draws noise from elsewhere"):
        compile_sampler(make_scheduler({**SD3, "stochastic_sampling": True}, DEFAULT, call), DEFAULT, call, steps=[3])


def test_the_shift_of_the_checkpoint_goes_to_schedulers_that_call_it_otherwise():
    for name, choice in FLOW_SCHEDULERS.items():
        scheduler = make_scheduler({**SD3, "shift": 2.5}, name, StableDiffusion3Call(TOKENS), FLOW_SCHEDULERS)
        assert type(scheduler).__name__ == choice.class_name
        assert scheduler.config.get("flow_shift", scheduler.config.get("shift")) == 2.5


def test_a_book_derives_tables_of_other_sizes(tmp_path):
    """Where the schedule depends on the size: those that a book compiled for that size has, but for float32 rows."""
    names = ["flow_euler", "flow_dpmpp_2m"]
    here, there = (
        compile_and_open(tmp_path / str(tokens), DEV, names, FluxCall(tokens), image_tokens=[1, 4096])
        for tokens in (TOKENS, 1024)
    )
    for start in (None, 0, 2):
        mine, its = here.table("flow_euler", 5, start, image_tokens=1024), there.table("flow_euler", 5, start)
        assert mine.digest == its.digest
        for field in ("coefficients", "known", "scales", "timesteps", "draws"):
            assert np.array_equal(getattr(mine, field).astype(np.float32), getattr(its, field).astype(np.float32))
        assert not np.array_equal(mine.timesteps, here.table("flow_euler", 5, start).timesteps)
    assert here.masked_table("flow_euler", 5, 1, TOKENS).calls == 4
    with pytest.raises(UsageError, match="compiled for 16 image tokens, not 1024"):
        here.table("flow_dpmpp_2m", 5, image_tokens=1024)
    with pytest.raises(UsageError, match="no table for 6 steps"):
        here.table("flow_euler", 6, image_tokens=1024)


def test_a_static_schedule_is_the_same_at_every_size(tmp_path):
    for call, config in STATIC:
        here = compile_and_open(tmp_path / "here", config, ["flow_euler"], call)
        there = compile_and_open(tmp_path / "there", config, ["flow_euler"], replace(call, image_tokens=4096))
        mine, its = here.table("flow_euler", 5, 1, image_tokens=4096), there.table("flow_euler", 5, 1)
        assert np.array_equal(mine.coefficients, its.coefficients)
        assert np.array_equal(mine.timesteps, its.timesteps)


def compile_and_open(path, config, names, call, **options):
    compile_samplers(config, names, path=path, call=call, choices=FLOW_SCHEDULERS, steps=[1, 5], **options)
    return SamplerBook.open(path)


def test_a_closed_form_that_is_off_is_not_kept(monkeypatch):
    def shifted(name, identity, steps, start, tokens):
        return flow_table(name, identity, steps, start, tokens + (tokens == 4096))

    monkeypatch.setattr(closed_form, "flow_table", shifted)
    call = FluxCall(TOKENS)
    scheduler = make_scheduler(DEV, DEFAULT, call)
    compile_sampler(scheduler, "it", call, steps=[5], image_tokens=[1024])
    with pytest.raises(SamplerError, match=r"closed form is off by .* at 4096 image tokens, 5 steps"):
        compile_sampler(scheduler, "it", call, steps=[5], image_tokens=[1024, 4096])
