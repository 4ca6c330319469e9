"""What a request may be: numbering, defaults, and every refusal with the words that a user reads."""

import pickle

import pytest
from PIL import Image

from trtdiff.bundle import BundleManifest
from trtdiff.errors import ProfileError, UsageError
from trtdiff.export.manifest import CheckpointOrigin
from trtdiff.families.base import LatentFacts, ModelFacts, TokenFacts
from trtdiff.request import make_request
from trtdiff.types import ShapeProfile, TensorSpec


def manifest(profile="batch=1:1:4,height=256:512:768,width=256:512:768", components=("denoiser", "vae_encoder")):
    return BundleManifest(
        schema=1,
        trtdiff="0",
        name="toy",
        family="stable-diffusion",
        checkpoint=CheckpointOrigin("toy", None, "0", "StableDiffusionPipeline"),
        facts=ModelFacts(
            latent=LatentFacts(channels=4, downscale=8, scaling=1.0, shift=0.0, height=512, width=640),
            conditions=(TensorSpec("encoder_hidden_states", "float32", ("batch", "tokens", 8)),),
            tokens={"tokenizer": TokenFacts(77, "<|endoftext|>")},
            guidance=7.5,
            sizes_multiple_of=8,
        ),
        dtype="stored",
        precision="fp32",
        profile=ShapeProfile.parse(profile),
        engines={"onnxruntime": dict.fromkeys(components, "key")},
        window=0,
        samplers=("ddim", "euler", "euler_a", "dpmpp_2m"),
        tokenizers={},
        files={},
        made_from={},
    )


def request(prompts="a cat", **options):
    return make_request(manifest(), prompts, **options)


def test_what_is_left_open_comes_from_the_checkpoint():
    made = request()
    assert (made.height, made.width, made.guidance, made.scheduler) == (512, 640, 7.5, "ddim")
    assert (made.seed, made.count, made.start, made.batch, made.negatives) == (0, 1, None, 4, (None,))


def test_pictures_are_numbered_prompt_by_prompt_and_seeds_go_up():
    made = request(["a", "b"], negative=["x", "y"], count=3, seed=10)
    assert [(shot.index, shot.prompt, shot.negative, shot.seed) for shot in made.shots] == [
        (0, "a", "x", 10), (1, "a", "x", 11), (2, "a", "x", 12),
        (3, "b", "y", 13), (4, "b", "y", 14), (5, "b", "y", 15),
    ]  # fmt: skip


def test_seed_nought_is_a_seed_and_none_is_drawn():
    assert request(seed=0).seed == 0
    assert len({request(seed=None).seed for _ in range(4)}) > 1


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 - 1, 2**32 + 5])
def test_seeds_that_pytorch_takes_are_taken(seed):
    import torch

    torch.Generator().manual_seed(seed)
    assert request(seed=seed).seed == seed


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seeds_that_pytorch_refuses_are_refused(seed):
    import torch

    with pytest.raises((RuntimeError, ValueError, OverflowError)):
        torch.Generator().manual_seed(seed)
    with pytest.raises(UsageError, match="out of range"):
        request(seed=seed)


def test_the_last_picture_s_seed_must_exist_too():
    with pytest.raises(UsageError, match="out of range"):
        request(seed=2**64 - 2, count=3)


@pytest.mark.parametrize(("guidance", "branches"), [(0, 1), (0.5, 1), (1, 1), (1.01, 2), (7.5, 2)])
def test_guidance_of_one_or_less_needs_no_negative_branch(guidance, branches):
    assert request(guidance=guidance).branches == branches


def test_one_negative_prompt_serves_all():
    assert request(["a", "b"], negative="x").negatives == request(["a", "b"], negative=["x"]).negatives == ("x", "x")


REFUSED = {
    "no prompt": ({"prompts": []}, UsageError, "no prompt was given"),
    "prompt of another type": ({"prompts": ["a", 7]}, UsageError, "prompt 2 is int"),
    "prompt that is not UTF-8": ({"prompts": "\udce9"}, UsageError, "prompt 1 is not UTF-8"),
    "negative prompt that is not UTF-8": ({"negative": "\udce9"}, UsageError, "the negative prompt is not UTF-8"),
    "negative prompts of another number": ({"prompts": ["a", "b", "c"], "negative": ["x", "y"]}, UsageError,
                                           "3 prompts and 2 negative prompts"),
    "no steps": ({"steps": 0}, UsageError, "steps 0 is less than 1"),
    "steps that are no number": ({"steps": "many"}, UsageError, "steps 'many' is not a whole number"),
    "steps that are a fraction": ({"steps": 2.5}, UsageError, "steps 2.5 is not a whole number"),
    "steps that are a truth": ({"steps": True}, UsageError, "steps True is not a whole number"),
    "no pictures": ({"count": 0}, UsageError, "count 0 is less than 1"),
    "pictures without end": ({"prompts": ["a", "b"], "count": 10**9}, UsageError, "2000000000 pictures are more than"),
    "guidance NaN": ({"guidance": float("nan")}, UsageError, "guidance nan is not a finite number"),
    "guidance infinite": ({"guidance": float("inf")}, UsageError, "guidance inf is not a finite number"),
    "guidance negative": ({"guidance": -1}, UsageError, "guidance -1 is negative"),
    "seed that is no number": ({"seed": "x"}, UsageError, "seed 'x' is not a whole number"),
    "height off the grid": ({"height": 500}, ProfileError, r"height 500 is not a multiple of 8\n.*496 or 504"),
    "height off the grid at the edge": ({"height": 770}, ProfileError, r"multiple of 8\n.*nearest: 768$"),
    "height nought": ({"height": 0}, UsageError, "height 0 is less than 1"),
    "width too large": ({"width": 1024}, ProfileError, r"1024 was asked, .* take 256 to 768(.|\n)*nearest: 768"),
    "height too small": ({"height": 128}, ProfileError, r"height 128 was asked(.|\n)*nearest: 256"),
    "batch too large": ({"batch": 5}, ProfileError, r"batch 5 was asked, the engines take 1 to 4(.|\n)*nearest: 4"),
    "batch nought": ({"batch": 0}, UsageError, "batch 0 is less than 1"),
    "unknown scheduler": ({"scheduler": "eular"}, UsageError, r"'eular'; did you mean euler(.|\n)*has ddim"),
    "strength without an image": ({"strength": 0.5}, UsageError, "no image was given"),
    "unknown loop": ({"loop": "gpu"}, UsageError, "no loop is called 'gpu'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    options, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message) as caught:
        request(**options)
    assert caught.value.exit_code == 2
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_batch_below_the_profile_is_refused():
    with pytest.raises(ProfileError, match="batch 1 was asked, the engines take 2 to 4"):
        make_request(manifest("batch=2:2:4,height=512,width=640"), "a cat", batch=1)


# --- image to image

SOURCE = Image.new("RGB", (300, 517), "red")


def test_the_size_is_the_image_s_own_rounded_down_as_diffusers_rounds():
    from diffusers.image_processor import VaeImageProcessor

    made = request(image=SOURCE)
    assert (made.height, made.width) == VaeImageProcessor(vae_scale_factor=8).get_default_height_width(SOURCE)
    assert request(image=SOURCE, height=512, width=256).height == 512


@pytest.mark.parametrize(("steps", "strength", "start"), [(20, 0.8, 4), (20, 1.0, 0), (10, 0.35, 7), (50, 0.02, 49)])
def test_strength_skips_the_first_steps(steps, strength, start):
    made = request(image=SOURCE, steps=steps, strength=strength)
    assert (made.start, made.strength) == (start, strength)


def test_strength_is_diffusers_own_where_none_is_asked():
    import inspect

    from diffusers import StableDiffusionImg2ImgPipeline

    own = inspect.signature(StableDiffusionImg2ImgPipeline.__call__).parameters["strength"].default
    assert request(image=SOURCE).strength == own


@pytest.mark.parametrize(("strength", "message"), [(-0.1, "not between 0 and 1"), (1.1, "not between 0 and 1"),
                                                   (0.0, "leaves no step"), (0.04, "leaves no step"),
                                                   (float("nan"), "not a finite number")])  # fmt: skip
def test_strengths_that_cannot_be_meant(strength, message):
    with pytest.raises(UsageError, match=message):
        request(image=SOURCE, steps=20, strength=strength)


def test_an_image_smaller_than_the_profile_says_what_to_do():
    with pytest.raises(ProfileError, match=r"the image is 64 x 64(.|\n)*give height and width"):
        request(image=Image.new("RGB", (64, 64)))


def test_images_are_one_for_all_or_one_a_prompt():
    other = Image.new("RGB", (300, 517), "blue")
    assert [shot.source.getpixel((0, 0)) for shot in request(["a", "b"], image=[SOURCE, other]).shots] == [
        (255, 0, 0), (0, 0, 255),
    ]  # fmt: skip
    assert len(request(["a", "b"], image=SOURCE).sources) == 2
    with pytest.raises(UsageError, match="3 prompts and 2 images"):
        request(["a", "b", "c"], image=[SOURCE, other])


def test_a_bundle_without_an_encoder_makes_no_pictures_from_pictures():
    with pytest.raises(UsageError, match="no vae_encoder"):
        make_request(manifest(components=("denoiser",)), "a cat", image=SOURCE)
