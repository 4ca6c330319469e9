"""Engines without the second branch, for models that need no guidance: one step of SD-Turbo."""

import numpy as np
import pytest

PROMPTS = ["a red cat", "small photo of a green house"]


def test_one_step_of_an_engine_with_one_branch_is_that_of_diffusers(made, compile_kind, tmp_path):
    import torch
    from diffusers import EulerDiscreteScheduler, StableDiffusionPipeline

    import trtdiff
    from trtdiff.errors import UsageError

    folder = made("sd1")
    compile_kind("turbo", folder / "export", tmp_path / "bundle", profile="branches=1")
    with trtdiff.load(tmp_path / "bundle", threads=1) as ours:
        denoiser = next(spec for spec in ours._engines.session("denoiser").inputs if spec.name == "guidance")
        made_here = ours(PROMPTS, steps=1, seed=4, scheduler="euler")
        with pytest.raises(UsageError, match="needs a branch for the negative prompt"):
            ours(PROMPTS, steps=1, guidance=3.0)
    assert denoiser.dims == ("branches", "batch")
    assert ours.manifest.profile.dims["branches"].max == 1
    assert made_here.receipt.guidance == 1.0

    pipeline = StableDiffusionPipeline.from_pretrained(folder / "checkpoint", torch_dtype=torch.float32)
    pipeline.scheduler = EulerDiscreteScheduler.from_config(pipeline.scheduler.config)
    pipeline.set_progress_bar_config(disable=True)
    seeds = [torch.Generator().manual_seed(4 + i) for i in range(2)]
    latents = pipeline(
        PROMPTS, num_inference_steps=1, guidance_scale=0.0, generator=seeds, output_type="latent", height=64, width=64
    ).images.numpy()
    assert np.linalg.norm(made_here.latents - latents) <= 1e-4 * np.linalg.norm(latents)
