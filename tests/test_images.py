"""Pictures in against diffusers' VaeImageProcessor and hand-made files; pictures out against their own bytes."""

import hashlib
import json

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from trtdiff.errors import StorageError, UsageError
from trtdiff.images import (
    grid,
    open_image,
    parameter_line,
    pixel_digest,
    read_parameters,
    save_png,
    to_array,
    to_images,
)


def picture(width=37, height=29, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@pytest.mark.parametrize(("height", "width"), [(32, 48), (24, 32), (64, 64)])
def test_pictures_are_prepared_as_diffusers_prepares_them(height, width):
    from diffusers.image_processor import VaeImageProcessor

    expected = VaeImageProcessor(vae_scale_factor=8).preprocess(picture(), height=height, width=width)[0].numpy()
    got = to_array(picture(), height, width)
    assert got.shape == (3, height, width)
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, expected)


def test_arrays_become_the_pictures_that_diffusers_makes():
    import torch
    from diffusers.image_processor import VaeImageProcessor

    array = np.random.default_rng(1).normal(size=(2, 3, 8, 16)).astype(np.float32)  # beyond -1 … 1 on both sides
    expected = VaeImageProcessor().postprocess(torch.from_numpy(array), output_type="pil")
    for ours, theirs in zip(to_images(array), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_exif_rotation_is_applied(tmp_path):
    image = picture(20, 10)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned a quarter: what is stored as the top row is the right column
    image.save(tmp_path / "turned.png", exif=exif)
    got = open_image(tmp_path / "turned.png")
    assert got.size == (10, 20)
    np.testing.assert_array_equal(np.asarray(got), np.rot90(np.asarray(image), -1))


def test_transparency_is_laid_over_white(tmp_path):
    colours = np.zeros((1, 3, 4), np.uint8)
    colours[0, :, 0], colours[0, :, 3] = 200, [255, 0, 51]  # opaque, clear, a fifth of the red
    Image.fromarray(colours).save(tmp_path / "clear.png")
    red, *others = np.moveaxis(np.asarray(open_image(tmp_path / "clear.png"), int)[0], 1, 0)
    np.testing.assert_allclose(red, [200, 255, 0.2 * 200 + 0.8 * 255], atol=1)
    for other in others:
        np.testing.assert_allclose(other, [0, 255, 0.8 * 255], atol=1)


def test_a_palette_with_a_transparent_entry_is_laid_over_white(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 0, 0])
    image.putdata([0, 1])
    image.save(tmp_path / "palette.png", transparency=1)
    assert np.asarray(open_image(tmp_path / "palette.png")).tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path):
    Image.fromarray(np.array([[0, 257, 32768, 65535]], np.uint16)).save(tmp_path / "deep.png")
    assert np.asarray(open_image(tmp_path / "deep.png"))[0, :, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize("mode", ["L", "LA", "1", "CMYK", "YCbCr", "RGBA", "P"])
def test_every_usual_kind_becomes_rgb(mode):
    assert open_image(picture().convert(mode)).mode == "RGB"


def test_floating_point_pictures_are_refused():
    with pytest.raises(UsageError, match="no agreed white"):
        open_image(Image.new("F", (4, 4)))


def test_a_missing_picture_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"there is no picture .*nowhere\.png"):
        open_image(tmp_path / "nowhere.png")


def test_a_file_that_is_no_picture_is_named(tmp_path):
    (tmp_path / "text.png").write_text("hello")
    with pytest.raises(UsageError, match=r"text\.png is not a picture"):
        open_image(tmp_path / "text.png")


def test_a_picture_that_ends_early_is_named(tmp_path):
    picture(64, 64).save(tmp_path / "whole.png")
    (tmp_path / "part.png").write_bytes((tmp_path / "whole.png").read_bytes()[:2000])
    with pytest.raises(UsageError, match=r"cannot read the picture part\.png"):
        open_image(tmp_path / "part.png")


def test_a_folder_is_no_picture(tmp_path):
    with pytest.raises(UsageError, match="cannot read the picture"):
        open_image(tmp_path)


@pytest.mark.parametrize(
    ("count", "columns", "size"), [(1, None, (1, 1)), (4, None, (2, 2)), (5, None, (3, 2)), (6, 2, (2, 3))]
)
def test_a_contact_sheet_holds_every_picture_in_order(count, columns, size):
    images = [picture(80, 60, seed) for seed in range(count)]
    sheet = grid(images, columns)
    assert sheet.size == (size[0] * 80, size[1] * 60)
    for index, image in enumerate(images):
        left, top = index % size[0] * 80, index // size[0] * 60
        assert pixel_digest(sheet.crop((left, top, left + 80, top + 60))) == pixel_digest(image)


def test_small_pictures_are_enlarged_on_a_contact_sheet_pixel_by_pixel():
    image = picture(40, 30, 0)
    sheet = grid([image, image])
    assert sheet.size == (2 * 3 * 40, 3 * 30)  # three times: 120 of at most 128 pixels
    assert pixel_digest(sheet.crop((0, 0, 120, 90)).resize((40, 30), Image.Resampling.NEAREST)) == pixel_digest(image)


def test_a_contact_sheet_of_nothing_is_refused():
    with pytest.raises(UsageError):
        grid([])


PARAMETERS = {"prompt": 'a cat — 猫, "quoted"\nnext', "negative": "a dog", "steps": 20, "seed": 7, "strength": None}


def test_a_png_carries_its_parameters_and_the_same_pixels(tmp_path):
    save_png(picture(), tmp_path / "out.png", PARAMETERS)
    assert read_parameters(tmp_path / "out.png") == PARAMETERS
    with Image.open(tmp_path / "out.png") as read:
        assert pixel_digest(read) == pixel_digest(picture())
        assert read.text["parameters"] == 'a cat — 猫, "quoted"\nnext\nNegative prompt: a dog\nSteps: 20, Seed: 7'
        assert json.loads(read.text["trtdiff"])["seed"] == 7


def test_values_with_commas_are_quoted_in_the_line_for_people():
    assert parameter_line({"prompt": "p", "source": "a, b"}).endswith('Source: "a, b"')


def test_a_png_of_somebody_else_carries_no_parameters_of_ours(tmp_path):
    other = PngImagePlugin.PngInfo()
    other.add_text("parameters", "a cat\nSteps: 20")
    picture().save(tmp_path / "other.png", pnginfo=other)
    assert read_parameters(tmp_path / "other.png") is None


def test_a_picture_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    picture(seed=1).save(tmp_path / "out.png")
    before = (tmp_path / "out.png").read_bytes()
    monkeypatch.setattr(
        Image.Image, "save", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(StorageError, match="No space left"):
        save_png(picture(), tmp_path / "out.png", {})
    assert (tmp_path / "out.png").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out.png"]


def test_the_digest_is_of_size_and_pixels():
    image = picture(4, 2)
    assert pixel_digest(image) == hashlib.sha256(b"4x2:" + np.asarray(image).tobytes()).hexdigest()
    assert pixel_digest(Image.new("RGB", (4, 2))) != pixel_digest(Image.new("RGB", (2, 4)))


def test_grey_pictures_of_32_bits_are_refused_and_of_16_are_scaled(tmp_path):
    deep = np.full((8, 8), 65535, np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert np.asarray(open_image(tmp_path / "deep.png")).min() == 255
    Image.fromarray(np.full((8, 8), 255, np.int32)).save(tmp_path / "wide.tif")
    with pytest.raises(UsageError, match="mode I has no agreed white"):
        open_image(tmp_path / "wide.tif")
