"""Requests of every mode: what masks, scales and sizes may be, and what is refused where a bundle cannot follow."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from trtdiff.bundle import BundleManifest
from trtdiff.errors import ProfileError, UsageError
from trtdiff.export.manifest import CheckpointOrigin
from trtdiff.families.base import LatentFacts, ModelFacts, TokenFacts
from trtdiff.request import make_request
from trtdiff.types import ShapeProfile, TensorSpec

SIZE = (640, 512)
FRAMED = ("original_size", "crop", "target_size")
PICTURE = Image.new("RGB", SIZE, "teal")


def manifest(profile="batch=1:1:4,height=256:512:768,width=256:512:768,branches=1:2:2", **facts):
    base = ModelFacts(
        latent=LatentFacts(channels=4, downscale=8, scaling=1.0, shift=0.0, height=512, width=640),
        conditions=(TensorSpec("encoder_hidden_states", "float32", ("batch", "context", 8)),),
        tokens={"tokenizer": TokenFacts(77, "<|endoftext|>")},
        guidance=7.5,
        sizes_multiple_of=8,
        clip_layers=3,
    )
    return BundleManifest(
        schema=1, trtdiff="0", name="toy", family="toys", dtype="stored", precision={"onnxruntime": "fp32"},
        checkpoint=CheckpointOrigin("toy", None, "0", "ToyPipeline"), facts=replace(base, **facts),
        profile=ShapeProfile.parse(profile), window=0, samplers=("ddim",), tokenizers={}, files={}, made_from={},
        engines={"onnxruntime": dict.fromkeys(("denoiser", "vae_encoder"), "key")},
    )  # fmt: skip


def mask(size=SIZE):
    pixels = np.zeros(size[::-1], np.uint8)
    pixels[100:200, 50:300] = 255
    return Image.fromarray(pixels)


def test_a_mask_of_strength_1_starts_from_noise_and_is_the_default():
    made = make_request(manifest(), "a cat", image=PICTURE, mask=mask())
    assert (made.strength, made.start) == (1.0, None)
    assert make_request(manifest(), "a cat", image=PICTURE, mask=mask(), strength=0.5, steps=10).start == 5
    assert make_request(manifest(), "a cat", image=PICTURE, strength=1.0, steps=10).start == 0


@pytest.mark.parametrize(("steps", "strength", "more", "fewer"), [(4, 0.6, 2, 1), (10, 0.5, 5, 5), (5, 0.5, 3, 2)])
def test_steps_that_a_strength_skips_are_rounded_as_the_family_s_pipelines_do(steps, strength, more, fewer):
    asked = {"image": PICTURE, "strength": strength, "steps": steps}
    assert make_request(manifest(), "a cat", **asked).start == more
    assert make_request(manifest(skips="fewer"), "a cat", **asked).start == fewer


def test_one_mask_serves_all_prompts_or_each_has_its_own():
    two = ["a cat", "a dog"]
    assert len(make_request(manifest(), two, image=PICTURE, mask=mask()).masks) == 2
    own = make_request(manifest(), two, image=[PICTURE] * 2, mask=[mask(), mask()], count=2)
    assert [shot.mask is own.masks[index // 2] for index, shot in enumerate(own.shots)] == [True] * 4


def test_scales_of_models_that_embed_their_guidance():
    lcm = make_request(manifest(guided_by="embedded"), "a cat", guidance=8.0)
    assert (lcm.guidance, lcm.branches, lcm.weights) == (8.0, 1, (1.0,))
    flux = manifest(guided_by="embedded, branches", guidance=3.5)
    assert make_request(flux, "a cat").branches == 1
    both = make_request(flux, "a cat", guidance=2.0, true_guidance=4.0, negative="")
    assert (both.guidance, both.branches, both.weights) == (2.0, 2, (-3.0, 4.0))
    assert both.wish.guidance == 2.0


def test_strength_is_that_of_the_family_s_pipelines_unless_asked():
    family = manifest(strengths=(0.3, 0.6))
    assert make_request(family, "a cat", image=PICTURE).strength == 0.3
    assert make_request(family, "a cat", image=PICTURE, mask=mask()).strength == 0.6


def test_the_usual_size_is_the_engines_where_they_do_not_take_the_native_one():
    small = manifest("batch=1,height=128:256:384,width=128:192:1024,branches=1:2:2")
    made = make_request(small, "a cat")
    assert (made.height, made.width) == (256, 640)
    with pytest.raises(ProfileError, match="height 33 is not a multiple of 8") as caught:
        make_request(small, "a cat", height=33)
    assert caught.value.hint == "the engines take 128:256:384"


def test_engines_of_two_branches_cannot_go_without_guidance():
    double = manifest("batch=1,height=512,width=640,branches=2")
    assert make_request(double, "a cat").branches == 2
    with pytest.raises(UsageError, match="guidance 1 needs engines that leave the negative prompt out"):
        make_request(double, "a cat", guidance=1)


def test_an_engine_of_one_branch_has_no_guidance_unless_asked():
    single = manifest("batch=1,height=512,width=640,branches=1")
    assert make_request(single, "a cat").weights == (1.0,)
    with pytest.raises(UsageError, match=r"guidance 7\.5 needs a branch for the negative prompt") as caught:
        make_request(single, "a cat", guidance=7.5)
    assert "--profile branches=1:2:2" in caught.value.hint


def test_what_sdxl_is_told_follows_the_size_unless_asked():
    plain = make_request(manifest(), "a cat", height=256, width=512).framing
    assert (plain.original, plain.crop, plain.target) == ((256, 512), (0, 0), (256, 512))
    told = make_request(
        manifest(framed=FRAMED), "a cat", original_size=[900, 800], crop=(5, 6), target_size=(700, 600)
    ).framing
    assert (told.original, told.crop, told.target) == ((900, 800), (5, 6), (700, 600))


def test_an_empty_prompt_is_a_prompt_and_no_negative_prompt_is_none():
    made = make_request(manifest(), ["", "a cat"])
    assert (made.prompts, made.negatives) == (("", "a cat"), (None, None))
    assert make_request(manifest(), "", negative="").negatives == ("",)


REFUSED = {
    "mask without image": ({"mask": mask()}, {}, "no image was given"),
    "mask of another shape": ({"image": PICTURE, "mask": mask((640, 640))}, {}, "640 x 640, its image 640 x 512"),
    "more masks than prompts": ({"image": PICTURE, "mask": [mask()] * 2}, {}, "1 prompts and 2 masks"),
    "a family without inpainting": (
        {"image": PICTURE, "mask": mask()},
        {"modes": ("text", "image")},
        "does not inpaint",
    ),
    "a family of text alone": ({"image": PICTURE}, {"modes": ("text",)}, "from text alone"),
    "an inpainting model, text": ({}, {"modes": ("inpaint-channels",)}, "needs an image and a mask"),
    "an inpainting model, image": ({"image": PICTURE}, {"modes": ("inpaint-channels",)}, "needs an image and a mask"),
    "strength 0": ({"image": PICTURE, "mask": mask(), "strength": 0}, {}, "leaves no step"),
    "strength 0, flow": ({"image": PICTURE, "strength": 0}, {"skips": "fewer"}, "leaves no step"),
    "strength 1.1": ({"image": PICTURE, "strength": 1.1}, {"skips": "fewer"}, "not between 0 and 1"),
    "true guidance of none": ({"true_guidance": 3.0}, {}, "embed their guidance"),
    "rescale 1.5": ({"rescale": 1.5}, {}, "rescale 1.5 is not between 0 and 1"),
    "rescale NaN": ({"rescale": float("nan")}, {}, "not a finite number"),
    "clip skip 3 of 3": ({"clip_skip": 3}, {}, "has 3 layers to choose from"),
    "clip skip -1": ({"clip_skip": -1}, {}, "clip_skip -1 is less than 0"),
    "clip skip without CLIP": ({"clip_skip": 1}, {"clip_layers": 0}, "reads no layers of CLIP"),
    "weights without rows": ({"weighted": True}, {}, "cannot be weighted"),
    "a crop of three": ({"crop": (1, 2, 3)}, {"framed": FRAMED}, "crop .* is not a pair"),
    "a size of words": ({"original_size": ("a", "b")}, {"framed": FRAMED}, "original_size 'a' is not a whole number"),
    "a size of nothing": ({"target_size": (0, 9)}, {"framed": FRAMED}, "target_size 0 is less than 1"),
    "a crop that nobody reads": ({"crop": (1, 2)}, {}, "is told no crop"),
    "a target for a refiner": ({"target_size": (9, 9)}, {"framed": FRAMED[:2]}, "is told no target size"),
    "guidance embedded, negative": ({"negative": "a dog"}, {"guided_by": "embedded"}, "takes no negative prompt"),
    "true guidance alone": ({"true_guidance": 2.0}, {"guided_by": "embedded, branches"}, "none was given"),
    "prompts that are a number": ({"negative": 5}, {}, "negative prompts are a int: 5"),
    "an image that is a number": ({"image": 5}, {}, "images are a int: 5"),
    "weighted is a word": ({"weighted": "no"}, {"weighted": True}, "neither True nor False"),
    "guidance is True": ({"guidance": True}, {}, "guidance True is not a number"),
    "negative prompts": ({"negative": ["a", "b"]}, {}, "1 prompts and 2 negative prompts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    asked, facts, message = REFUSED[case]
    with pytest.raises(UsageError, match=message) as caught:
        make_request(manifest(**facts), "a cat", **asked)
    assert len(caught.value.message) < 200
