"""Masks against diffusers' own mask processor and inpainting pipeline, and against torch's nearest pixels."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageDraw

from trtdiff.errors import UsageError
from trtdiff.images import to_array
from trtdiff.masks import check_aspect, grey_warning, mask_latent, mask_pixels, masked_image, open_mask


def blobs(width=61, height=47, seed=0):
    """A mask of white shapes on black, their edges smoothed."""
    rng = np.random.default_rng(seed)
    large = Image.new("L", (4 * width, 4 * height))
    draw = ImageDraw.Draw(large)
    for _ in range(4):
        x, y, size = rng.integers(0, 3 * width), rng.integers(0, 3 * height), rng.integers(width // 2, 2 * width)
        draw.ellipse([x, y, x + size, y + size * 2 // 3], fill=255)
    return large.resize((width, height), Image.Resampling.BOX)


def theirs(mask, height, width):
    from diffusers.image_processor import VaeImageProcessor

    processor = VaeImageProcessor(
        vae_scale_factor=1, do_normalize=False, do_binarize=True, do_convert_grayscale=True
    )  # as every inpainting pipeline makes it, but for sizes that are no multiples of eight
    return processor.preprocess(mask, height=height, width=width)


def noise():
    return Image.fromarray(np.random.default_rng(3).integers(0, 256, (47, 61), np.uint8))


SIZES = [(47, 61), (64, 64), (40, 56), (96, 128), (8, 8), (104, 72)]


@pytest.mark.parametrize("mask", [blobs(), blobs(seed=1), noise()], ids=["blobs", "others", "noise"])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_masks_are_prepared_as_diffusers_prepares_them(mask, height, width):
    got = mask_pixels(open_mask(mask), height, width)
    np.testing.assert_array_equal(got[None], theirs(mask, height, width).numpy())
    assert got.shape == (1, height, width)
    assert got.dtype == np.float32


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "CMYK", "YCbCr"])
def test_grey_masks_of_every_kind_are_prepared_as_diffusers_prepares_them(mode):
    mask = noise().convert(mode)
    np.testing.assert_array_equal(mask_pixels(open_mask(mask), 64, 80)[None], theirs(mask, 64, 80).numpy())


@pytest.mark.parametrize("mode", ["1", "P"])
def test_masks_of_few_levels_are_diffusers_at_their_own_size(mode):
    mask = blobs(64, 48).convert(mode)
    np.testing.assert_array_equal(mask_pixels(open_mask(mask), 48, 64)[None], theirs(mask, 48, 64).numpy())


def test_a_mask_of_one_bit_is_resized_like_the_same_mask_in_grey():
    bits = blobs(64, 48).point(lambda level: 255 * (level > 127))
    np.testing.assert_array_equal(
        mask_pixels(open_mask(bits.convert("1")), 96, 128), mask_pixels(open_mask(bits), 96, 128)
    )


def test_half_is_repainted_and_a_level_less_is_not():
    assert mask_pixels(Image.fromarray(np.array([[127, 128]], np.uint8)), 1, 2).tolist() == [[[0, 1]]]


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [
        (64, 64, 8, 8),
        (72, 104, 9, 13),
        (67, 45, 8, 5),
        (47, 61, 47, 61),
        (40, 56, 80, 112),
        (30, 50, 7, 11),
        (9, 5, 13, 7),
    ],
)
def test_the_latent_takes_the_pixels_that_torch_takes(height, width, rows, columns):
    import torch

    pixels = (np.random.default_rng(5).random((1, height, width)) < 0.5).astype(np.float32)
    expected = torch.nn.functional.interpolate(torch.from_numpy(pixels)[None], size=(rows, columns))[0]
    np.testing.assert_array_equal(mask_latent(pixels, rows, columns), expected.numpy())


def test_every_pair_of_sizes_takes_the_pixels_that_torch_takes():
    import torch

    for size in range(1, 200):
        line = np.arange(1, size + 1, dtype=np.float32)[None, None]
        for fewer in {1, size, 2 * size, *range(1, 200, 7)}:
            expected = torch.nn.functional.interpolate(torch.from_numpy(line)[None], size=(1, fewer))[0]
            np.testing.assert_array_equal(mask_latent(line, 1, fewer), expected.numpy(), f"{size} to {fewer}")


def test_the_latent_mask_is_that_of_diffusers_inpainting_pipeline():
    import torch
    from diffusers import StableDiffusionInpaintPipeline

    mask = blobs(104, 72)
    expected, _ = StableDiffusionInpaintPipeline.prepare_mask_latents(
        SimpleNamespace(vae_scale_factor=8), theirs(mask, 72, 104), torch.zeros(1, 4, 9, 13), 1, 72, 104,
        torch.float32, "cpu", None, do_classifier_free_guidance=False,
    )  # fmt: skip
    np.testing.assert_array_equal(mask_latent(mask_pixels(open_mask(mask), 72, 104), 9, 13)[None], expected.numpy())


def test_what_is_repainted_is_blanked_as_diffusers_blanks_it():
    import torch

    image = to_array(Image.fromarray(np.random.default_rng(1).integers(0, 256, (48, 64, 3), np.uint8)), 48, 64)
    mask = mask_pixels(blobs(64, 48), 48, 64)
    got = masked_image(image, mask)
    np.testing.assert_array_equal(got, (torch.from_numpy(image) * (torch.from_numpy(mask) < 0.5)).numpy())
    assert got.dtype == np.float32
    assert not got[:, mask[0] == 1].any()


# --- what a mask may be -----------------------------------------------------------------------------------------------


def with_alpha(colours, alpha):
    made = Image.fromarray(np.asarray(colours, np.uint8)).convert("RGBA")
    made.putalpha(Image.fromarray(np.asarray(alpha, np.uint8)))
    return made


def test_holes_of_a_picture_are_repainted(tmp_path):
    colours = np.random.default_rng(2).integers(0, 256, (2, 4, 3))
    alpha = [[255, 0, 100, 255], [255, 255, 200, 0]]
    with_alpha(colours, alpha).save(tmp_path / "hole.png")
    assert np.asarray(open_mask(tmp_path / "hole.png")).tolist() == [[0, 255, 155, 0], [0, 0, 55, 255]]


def test_holes_in_black_are_repainted():
    assert np.asarray(open_mask(with_alpha(np.zeros((1, 2, 3)), [[255, 0]]))).tolist() == [[0, 255]]


def test_a_mask_that_is_clear_throughout_repaints_all():
    assert np.asarray(open_mask(Image.new("RGBA", (2, 1)))).tolist() == [[255, 255]]


def test_an_opaque_alpha_channel_is_ignored():
    mask = blobs()
    np.testing.assert_array_equal(open_mask(mask.convert("RGBA")), mask)
    np.testing.assert_array_equal(open_mask(mask.convert("LA")), mask)


@pytest.mark.parametrize("ground", [0, 255])
def test_white_strokes_on_a_transparent_layer_are_refused(ground):
    colours = np.full((4, 4, 3), ground)
    colours[:2] = 255
    alpha = np.zeros((4, 4))
    alpha[:2] = 255
    with pytest.raises(UsageError, match="either could say what is repainted"):
        open_mask(with_alpha(colours, alpha))


def test_a_palette_with_a_transparent_entry_is_repainted_there(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 0, 0])
    image.putdata([0, 1])
    image.save(tmp_path / "palette.png", transparency=1)
    assert np.asarray(open_mask(tmp_path / "palette.png")).tolist() == [[0, 255]]


def test_sixteen_bits_one_bit_and_rotation(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.array([[0, 40000, 65535]], np.uint16)).save(tmp_path / "deep.png", exif=exif)
    assert np.asarray(open_mask(tmp_path / "deep.png")).tolist() == [[0], [156], [255]]  # 40000 / 257 = 155.6
    Image.fromarray(np.array([[True, False]])).save(tmp_path / "bits.png")
    assert np.asarray(open_mask(tmp_path / "bits.png")).tolist() == [[255, 0]]


def test_a_mask_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "text.png").write_text("hello")
    with pytest.raises(UsageError, match=r"text\.png is not a picture"):
        open_mask(tmp_path / "text.png")
    with pytest.raises(UsageError, match=r"there is no mask gone\.png"):
        open_mask(tmp_path / "gone.png")


def test_a_mask_that_is_given_stays_as_it_was():
    mask = blobs()
    open_mask(mask).paste(0, (0, 0, *mask.size))
    assert mask.tobytes() == blobs().tobytes()


# --- what cannot be meant ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "image"),
    [((64, 48), (64, 48)), ((32, 24), (64, 48)), ((512, 341), (1000, 667)),
     ((1000, 667), (512, 341)), ((3, 4), (767, 1024))],
)  # fmt: skip
def test_a_mask_of_the_same_aspect_ratio_fits(mask, image):
    check_aspect(Image.new("L", mask), Image.new("RGB", image))


@pytest.mark.parametrize(
    ("mask", "image"),
    [((64, 64), (64, 48)), ((48, 64), (64, 48)), ((1024, 768), (1000, 667)), ((512, 512), (512, 504))],
)
def test_a_mask_of_another_aspect_ratio_is_refused_with_both_sizes(mask, image):
    words = f"{mask[0]} x {mask[1]}, its image {image[0]} x {image[1]}"
    with pytest.raises(UsageError, match=words):
        check_aspect(Image.new("L", mask), Image.new("RGB", image))


def test_a_black_mask_is_refused_and_a_white_one_is_not():
    with pytest.raises(UsageError, match="nothing to repaint"):
        mask_pixels(Image.new("L", (64, 64), 127), 64, 64)
    white = mask_pixels(Image.new("L", (64, 64), 255), 64, 64)
    assert white.min() == 1
    assert mask_latent(white, 8, 8).min() == 1


def test_a_spot_that_no_row_of_the_latent_meets_is_refused():
    pixels = np.zeros((1, 64, 64), np.float32)
    pixels[0, 1:8, 1:8] = 1  # the latent looks at every eighth pixel, from the first on
    with pytest.raises(UsageError, match="nothing to repaint: it is black everywhere at the latent's 8 x 8"):
        mask_latent(pixels, 8, 8)


def test_smoothed_edges_are_no_reason_to_warn():
    assert grey_warning(blobs(512, 512)) == ""
    assert grey_warning(Image.new("L", (8, 8), 250)) == ""


def test_a_photograph_as_mask_is_told():
    levels = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    assert grey_warning(levels).startswith("88% of the mask is neither black nor white")  # 16 to 239: 224 of 256
