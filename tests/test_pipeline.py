"""The runtime against diffusers' own pipelines, and against itself under every way of cutting a batch."""

import threading

import numpy as np
import pytest
from PIL import Image

import trtdiff
from trtdiff.execution import Execution
from trtdiff.request import make_request

SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_a": "EulerAncestralDiscreteScheduler",
    "dpmpp_2m": "DPMSolverMultistepScheduler",
}
PROMPTS, NEGATIVES = ["a red cat", "the large green ship"], ["blue", "a photo of three trees"]


@pytest.fixture(scope="module")
def pipeline(tiny_bundle):
    with trtdiff.load(tiny_bundle, threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def theirs(tiny_checkpoint):
    """diffusers' pictures and latents: `theirs(scheduler, image=…, **options)`."""
    import diffusers
    import torch

    torch.set_num_threads(1)
    text = diffusers.StableDiffusionPipeline.from_pretrained(str(tiny_checkpoint), safety_checker=None)
    image_to_image = diffusers.StableDiffusionImg2ImgPipeline(**text.components, requires_safety_checker=False)
    own = text.scheduler.config
    text.set_progress_bar_config(disable=True)
    image_to_image.set_progress_bar_config(disable=True)

    def run(scheduler, prompts, *, seed, count=1, image=None, **options):
        def once(kind):
            chosen = text if image is None else image_to_image
            chosen.scheduler = getattr(diffusers, SCHEDULERS[scheduler]).from_config(own)
            generators = [torch.Generator().manual_seed(seed + number) for number in range(len(prompts) * count)]
            extra = {} if image is None else {"image": image}
            return chosen(
                prompts, num_images_per_prompt=count, generator=generators, output_type=kind, **extra, **options
            )

        return np.stack([np.asarray(one, int) for one in once("pil").images]), once("latent").images.numpy()

    return run


def assert_same_pictures(result, expected):
    pictures, latents = expected
    assert len(result.images) == len(pictures)
    assert np.abs(np.stack([np.asarray(image, int) for image in result.images]) - pictures).max() <= 2
    assert np.linalg.norm(result.latents - latents) <= 1e-4 * np.linalg.norm(latents)


def source(width=64, height=64):
    return Image.fromarray(np.random.default_rng(5).integers(0, 256, (height, width, 3), np.uint8))


# --- the same pictures as diffusers


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_text_to_image(pipeline, theirs, scheduler):
    result = pipeline(PROMPTS, negative=NEGATIVES, scheduler=scheduler, steps=6, guidance=4, seed=7, count=2)
    expected = theirs(
        scheduler, PROMPTS, negative_prompt=NEGATIVES, num_inference_steps=6, guidance_scale=4, seed=7, count=2
    )
    assert_same_pictures(result, expected)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_image_to_image(pipeline, theirs, scheduler):
    result = pipeline(
        PROMPTS,
        image=source(),
        strength=0.7,
        negative="blue",
        scheduler=scheduler,
        steps=6,
        guidance=4,
        seed=3,
        batch=1,
    )
    expected = theirs(
        scheduler, PROMPTS, image=source(), strength=0.7, negative_prompt=["blue"] * 2, num_inference_steps=6,
        guidance_scale=4, seed=3,
    )  # fmt: skip
    assert_same_pictures(result, expected)


@pytest.mark.parametrize("strength", [0.2, 1.0])
def test_image_to_image_from_a_picture_of_odd_size(pipeline, theirs, strength):
    image = source(width=77, height=50)
    result = pipeline("a cat", image=image, strength=strength, scheduler="dpmpp_2m", steps=6, seed=3)
    expected = theirs(
        "dpmpp_2m", ["a cat"], image=image, strength=strength, num_inference_steps=6, guidance_scale=7.5, seed=3
    )
    assert result.images[0].size == (72, 48)
    assert_same_pictures(result, expected)


@pytest.mark.parametrize("guidance", [0, 1])
def test_without_guidance(pipeline, theirs, guidance):
    result = pipeline(["a cat"], negative="dog", guidance=guidance, scheduler="euler", steps=6)
    assert_same_pictures(result, theirs("euler", ["a cat"], guidance_scale=guidance, num_inference_steps=6, seed=0))
    assert result.receipt.pictures[0].negative is None


def test_another_size(pipeline, theirs):
    result = pipeline("a cat", height=32, width=96, scheduler="ddim", steps=6)
    expected = theirs("ddim", ["a cat"], height=32, width=96, guidance_scale=7.5, num_inference_steps=6, seed=0)
    assert_same_pictures(result, expected)


def test_the_checkpoint_s_own_scheduler_is_the_default(pipeline, theirs):
    result = pipeline("a cat", steps=2)
    assert_same_pictures(result, theirs("ddim", ["a cat"], guidance_scale=7.5, num_inference_steps=2, seed=0))


def test_one_step(pipeline, theirs):
    result = pipeline("a cat", steps=1, scheduler="euler")
    assert_same_pictures(result, theirs("euler", ["a cat"], guidance_scale=7.5, num_inference_steps=1, seed=0))


# --- the same pictures as itself


def test_start_noises_do_not_depend_on_the_batch_and_are_pytorch_s(pipeline):
    import torch

    request = make_request(pipeline.manifest, "a cat", seed=7, count=3, steps=6)
    execution = Execution(pipeline._engines, request, None)
    together = execution._sources.start(request.shots).start.noise
    for number, shot in enumerate(request.shots):
        np.testing.assert_array_equal(together[number : number + 1], execution._sources.start([shot]).start.noise)
        expected = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(7 + number))
        np.testing.assert_allclose(together[number], expected[0], atol=2e-6)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("image", [None, source()])
def test_any_batch_gives_the_same_pictures(pipeline, batch, image):
    options = {"negative": NEGATIVES, "scheduler": "euler_a", "steps": 6, "seed": 1, "count": 2, "image": image}
    whole = pipeline(PROMPTS, **options)
    parts = pipeline(PROMPTS, batch=batch, **options)
    assert whole.receipt.batches == (4,)
    assert sum(parts.receipt.batches) == 4
    assert max(parts.receipt.batches) == batch
    np.testing.assert_allclose(parts.latents, whole.latents, atol=1e-5 * np.abs(whole.latents).max())


def test_more_pictures_than_a_batch_takes_are_split(pipeline):
    result = pipeline("a cat", count=5, steps=2)
    assert result.receipt.batches == (4, 1)
    assert [picture.facts.seed for picture in result.pictures] == [0, 1, 2, 3, 4]
    assert result.pictures[4].facts.sha256 == pipeline("a cat", seed=4, steps=2).pictures[0].facts.sha256


def test_buffers_are_reused_and_leave_no_trace(pipeline):
    first = pipeline("a cat", steps=6, scheduler="euler_a", seed=3)
    pipeline(PROMPTS, steps=2, scheduler="dpmpp_2m", seed=9, count=2)
    pipeline("a dog", image=source(), steps=6, scheduler="euler_a")
    pipeline("a cat", height=32, steps=6, guidance=1)
    again = pipeline("a cat", steps=6, scheduler="euler_a", seed=3)
    np.testing.assert_array_equal(again.latents, first.latents)
    assert again.receipt.pictures == first.receipt.pictures


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_host_loop_gives_the_same_pictures(pipeline, scheduler):
    options = {"scheduler": scheduler, "steps": 6, "image": source(), "strength": 0.7, "count": 2}
    device, host = pipeline("a cat", **options), pipeline("a cat", loop="host", **options)
    assert (device.receipt.loop, host.receipt.loop) == ("device", "host")
    np.testing.assert_allclose(host.latents, device.latents, atol=1e-5 * np.abs(device.latents).max())


def test_a_step_is_one_call_and_a_second_request_binds_nothing(tiny_bundle):
    with trtdiff.load(tiny_bundle, threads=1) as pipeline:
        session, counts = pipeline._engines.session("denoiser"), {"bind": 0, "call": 0, "run": 0}
        bind, run = session.bind, session.run

        def counted_bind(buffers):
            counts["bind"] += 1
            call = bind(buffers)

            def counted_call():
                counts["call"] += 1
                call()

            return counted_call

        def counted_run(feeds):
            counts["run"] += 1
            return run(feeds)

        session.bind, session.run = counted_bind, counted_run
        pipeline("a cat", steps=6)
        assert counts == {"bind": 6, "call": 6, "run": 0}
        pipeline("a dog", steps=6, scheduler="euler", seed=4)
        assert counts == {"bind": 6, "call": 12, "run": 0}


def test_a_profile_that_wants_more_images_than_are_left_is_filled(pipeline, changed_bundle):
    bundle = changed_bundle(lambda about: about["profile"]["dims"]["batch"].update(min=2, opt=2))
    with trtdiff.load(bundle, threads=1) as filled:
        result = filled("a cat", count=3, steps=2, batch=2)
    assert result.receipt.batches == (2, 1)
    expected = pipeline("a cat", count=3, steps=2)
    np.testing.assert_allclose(result.latents, expected.latents, atol=1e-5 * np.abs(expected.latents).max())


def test_threads_wait_for_each_other(pipeline):
    expected = {seed: pipeline("a cat", seed=seed, steps=2).receipt.pictures for seed in range(4)}
    found = {}
    workers = [
        threading.Thread(
            target=lambda seed=seed: found.update({seed: pipeline("a cat", seed=seed, steps=2).receipt.pictures})
        )
        for seed in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == expected


# --- what is told on the way, and afterwards


def test_progress_counts_every_call_and_pictures_come_batch_by_batch(pipeline):
    steps, events = [], []
    pipeline(
        "a cat", count=3, batch=2, steps=2, progress=lambda *done: steps.append(done),
        finished=lambda picture: events.append((picture.index, len(steps))),
    )  # fmt: skip
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert events == [(0, 2), (1, 2), (2, 4)]


def test_an_interruption_leaves_the_pipeline_usable(pipeline):
    def interrupt(done, total):
        raise KeyboardInterrupt

    expected = pipeline("a cat", steps=6, scheduler="euler_a").receipt.pictures
    with pytest.raises(KeyboardInterrupt):
        pipeline("a dog", steps=6, scheduler="euler_a", progress=interrupt)
    assert pipeline("a cat", steps=6, scheduler="euler_a").receipt.pictures == expected


def test_the_receipt_says_what_was_asked_and_what_came_out(tiny_bundle):
    from trtdiff.images import pixel_digest

    with trtdiff.load(tiny_bundle, threads=1) as pipeline:
        assert set(pipeline._engines.used()) == {"text_encoder", "denoiser", "vae_decoder"}
        result = pipeline(PROMPTS, negative="blue", image=source(), strength=0.5, steps=6, scheduler="euler", seed=11)
        second = pipeline(PROMPTS[0], negative="blue", steps=2)
    receipt, manifest = result.receipt, pipeline.manifest
    assert receipt.checkpoint == manifest.checkpoint
    assert {name: use.key for name, use in receipt.engines.items()} == manifest.engines["onnxruntime"]
    assert all(use.load_seconds > 0 for use in receipt.engines.values())
    assert (receipt.scheduler.name, receipt.scheduler.steps, receipt.scheduler.start, receipt.scheduler.calls) == (
        "euler", 6, 3, 3,
    )  # fmt: skip
    assert [(facts.prompt, facts.negative, facts.seed) for facts in receipt.pictures] == [
        (PROMPTS[0], "blue", 11), (PROMPTS[1], "blue", 12),
    ]  # fmt: skip
    assert [facts.sha256 for facts in receipt.pictures] == [pixel_digest(image) for image in result.images]
    assert {facts.source for facts in receipt.pictures} == {pixel_digest(source())}
    assert {name: stage.count for name, stage in receipt.stages.items()} == {
        "text_encoder": 3, "vae_encoder": 1, "noise": 1, "step": 3, "vae_decoder": 1,
    }  # fmt: skip
    assert (receipt.first_run, second.receipt.first_run) == (True, False)
    assert "text_encoder" not in second.receipt.stages  # that prompt is remembered
    assert receipt.seconds >= sum(stage.total for stage in receipt.stages.values()) * 0.99
    assert receipt.threads == 1
    assert not receipt.warnings


def test_a_drawn_seed_is_recorded(pipeline):
    result = pipeline("a cat", seed=None, steps=1)
    seed = result.receipt.pictures[0].seed
    assert pipeline("a cat", seed=seed, steps=1).receipt.pictures == result.receipt.pictures
    assert result.pictures[0].parameters["seed"] == seed


def test_options_that_do_nothing_are_said(pipeline):
    idle = pipeline("a cat", negative="a dog", rescale=0.5, guidance=1.0, steps=1).receipt.warnings
    assert idle == ("the negative prompt is not used: guidance is 1", "rescale is not used: guidance is 1")
    assert pipeline("a cat", negative="a dog", rescale=0.5, guidance=4.0, steps=1).receipt.warnings == ()


@pytest.mark.parametrize(("negative", "recorded"), [(None, None), ("", ""), ("a dog", "a dog")])
def test_no_negative_prompt_and_an_empty_one_are_told_apart(negative, recorded, pipeline):
    made = pipeline("a cat", negative=negative, guidance=4.0, steps=1)
    assert made.receipt.pictures[0].negative == recorded
    assert made.pictures[0].parameters["negative"] == recorded


def test_words_that_do_not_fit_are_named(pipeline):
    # 16 ids are 14 words of this vocabulary: a cat, and four times three
    result = pipeline("a cat " + "on the house " * 8 + "in a TREE", negative="", steps=1)
    (warning,) = result.receipt.warnings
    assert warning.endswith("these words were cut: " + "on the house " * 4 + "in a TREE")
    assert "16 tokens" in warning
