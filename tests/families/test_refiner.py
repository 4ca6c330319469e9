"""SDXL's base begins and its refiner finishes, as in diffusers with `denoising_end` and `denoising_start`."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

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
        with pytest.raises(UsageError, match="begun were pictures of prompts") as caught:
            second.run(other, half_done=begun)
        assert "same prompts" in caught.value.hint
        same = make_request(second.manifest, PROMPTS, **asked)
        with pytest.raises(UsageError, match=r"are latents \[1, 4, 4, 6\], not \[2, 4, 4, 6\]"):
            second.run(same, half_done=replace(begun, latents=begun.latents[:1]))
        with pytest.raises(UsageError, match="begun were pictures of seed 0, to finish are 9"):
            second.run(make_request(second.manifest, PROMPTS, **asked, seed=9), half_done=begun)
        space = replace(begun.space, scaling=0.18215)
        with pytest.raises(UsageError, match=r"its own have scaling 0\.13025, these 0\.18215"):
            second.run(same, half_done=replace(begun, space=space))


def test_a_mask_is_for_one_model(made):
    import trtdiff
    from trtdiff.errors import UsageError
    from trtdiff.request import make_request

    picture, mask = Image.new("RGB", (48, 32), "teal"), Image.new("L", (48, 32), "white")
    with trtdiff.load(made("sdxl") / "bundle", threads=1) as first:
        request = make_request(first.manifest, "a cat", image=picture, mask=mask, steps=5, scheduler="euler")
        with pytest.raises(UsageError, match="what a mask keeps"):
            first.begin(request, 0.8)
        with pytest.raises(UsageError, match="at 'half' is not a number"):
            first.begin(make_request(first.manifest, "a cat", steps=5), "half")


def test_latents_that_are_not_finite_are_the_first_model_s_fault(made, monkeypatch):
    import trtdiff
    from trtdiff.errors import NonFiniteError
    from trtdiff.request import make_request

    with trtdiff.load(made("sdxl") / "bundle", threads=1) as first:
        encode = first._engines.encode

        def lost(text, how):
            return {name: value + np.float32(np.nan) for name, value in encode(text, how).items()}

        lost.cache_info, lost.cache_clear = encode.cache_info, encode.cache_clear
        monkeypatch.setattr(first._engines, "encode", lost)
        with pytest.raises(NonFiniteError, match="the denoiser's prediction at step 1 of"):
            first.begin(make_request(first.manifest, "a cat", steps=5, scheduler="euler", **SIZE), 0.8)


def test_the_command_line_refines_and_refuses_before_anything_runs(made, tmp_path, capsys):
    from trtdiff.cli import exit_code as cli

    base, refiner = (str(made(kind) / "bundle") for kind in ("sdxl", "sdxl-refiner"))
    size = ["--height", "32", "--width", "48", "--steps", "5"]

    def go(*more):
        return cli(["run", base, "a cat", *size, "-o", str(tmp_path / "out.png"), *more])

    for more, said in {
        ("--refine-at", "0.5"): "there is no refiner to take over",
        ("--refiner", refiner, "--refine-at", "0"): "the fraction 0 leaves one of two models nothing",
        ("--refiner", refiner, "--refine-at", "1"): "the fraction 1 leaves one of two models nothing",
        ("--refiner", refiner, "--refine-at", "nan"): "at nan is not a finite number",
        ("--refiner", refiner, "--image", "x.png"): "x.png",
        ("--refiner", str(made("sd1") / "bundle")): "its own have scaling 0.18215, these 0.13025",
    }.items():
        assert go(*more) == 2
        assert said in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
    assert go("--refiner", refiner, "--target-size", "64", "64", "--crop", "8", "8") == 0
    assert json.loads((tmp_path / "out.json").read_text())["settings"]["begun"]["at"] == 0.8


@pytest.mark.parametrize("at", [0.0, 1.0, 0.01])
def test_a_fraction_that_leaves_one_model_nothing_is_refused(at, made):
    import trtdiff
    from trtdiff.errors import UsageError
    from trtdiff.request import make_request

    with trtdiff.load(made("sdxl") / "bundle", threads=1) as first:
        request = make_request(first.manifest, PROMPTS, steps=5, scheduler="euler", **SIZE)
        with pytest.raises(UsageError, match="fraction"):
            first.begin(request, at)
