"""SDXL's base begins and its refiner finishes, as in diffusers with `denoising_end` and `denoising_start`."""

import numpy as np
import pytest

PROMPTS = ["a red cat", "small photo of a green house"]
NEGATIVE = "blurry"
SIZE = {"height": 32, "width": 48}
LATENTS, LEVELS = 1e-4, 2


def _theirs(base, refiner, at, scheduler):
    import torch
    from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline

    from trtdiff.export.schedulers import make_scheduler

    first = StableDiffusionXLPipeline.from_pretrained(base / "checkpoint", torch_dtype=torch.float32)
    second = StableDiffusionXLImg2ImgPipeline.from_pretrained(refiner / "checkpoint", torch_dtype=torch.float32)
    for pipeline in (first, second):
        pipeline.set_progress_bar_config(disable=True)
        pipeline.scheduler = make_scheduler(dict(pipeline.scheduler.config), scheduler)

    def seeds():
        return [torch.Generator().manual_seed(5 + i) for i in range(2)]

    shared = {"negative_prompt": [NEGATIVE] * 2, "num_inference_steps": 5, "guidance_scale": 4.0}
    half = first(PROMPTS, **shared, **SIZE, denoising_end=at, output_type="latent", generator=seeds()).images
    finish = {"image": half, "denoising_start": at}
    latents = second(PROMPTS, **shared, **finish, output_type="latent", generator=seeds()).images
    pixels = second(PROMPTS, **shared, **finish, output_type="np", generator=seeds()).images
    return half.numpy(), latents.numpy(), (pixels * 255).round().astype(np.uint8)


@pytest.mark.parametrize(("at", "scheduler"), [(0.8, "euler"), (0.4, "dpmpp_2m")])
def test_a_refiner_finishes_what_the_base_began(at, scheduler, made):
    import trtdiff
    from trtdiff.request import make_request

    base, refiner = made("sdxl"), made("sdxl-refiner")
    half, latents, pixels = _theirs(base, refiner, at, scheduler)
    asked = {"negative": NEGATIVE, "steps": 5, "guidance": 4.0, "seed": 5, "scheduler": scheduler, **SIZE}
    with trtdiff.load(base / "bundle", threads=1) as first, trtdiff.load(refiner / "bundle", threads=1) as second:
        begun = first.begin(make_request(first.manifest, PROMPTS, **asked), at)
        done = second.run(make_request(second.manifest, PROMPTS, **asked), half_done=begun)
    assert np.linalg.norm(begun.latents - half) <= LATENTS * np.linalg.norm(half)
    assert np.linalg.norm(done.latents - latents) <= LATENTS * np.linalg.norm(latents)
    made_pixels = np.stack([np.asarray(image) for image in done.images]).astype(int)
    assert np.abs(made_pixels - pixels).max() <= LEVELS
    assert done.receipt.settings["begun"]["bundle"] == first.manifest.name
    assert done.receipt.settings["begun"]["at"] == at


def test_a_refiner_refuses_latents_of_another_request(made):
    import trtdiff
    from trtdiff.errors import UsageError
    from trtdiff.request import make_request

    asked = {"steps": 5, "scheduler": "euler", **SIZE}
    with trtdiff.load(made("sdxl") / "bundle", threads=1) as first:
        begun = first.begin(make_request(first.manifest, PROMPTS, **asked), 0.8)
    with trtdiff.load(made("sdxl-refiner") / "bundle", threads=1) as second:
        other = make_request(second.manifest, PROMPTS[:1], **asked)
        with pytest.raises(UsageError, match="latents of shape") as caught:
            second.run(other, half_done=begun)
    assert "same prompts" in caught.value.hint


@pytest.mark.parametrize("at", [0.0, 1.0, 0.01])
def test_a_fraction_that_leaves_one_model_nothing_is_refused(at, made):
    import trtdiff
    from trtdiff.errors import UsageError
    from trtdiff.request import make_request

    with trtdiff.load(made("sdxl") / "bundle", threads=1) as first:
        request = make_request(first.manifest, PROMPTS, steps=5, scheduler="euler", **SIZE)
        with pytest.raises(UsageError, match="fraction"):
            first.begin(request, at)
