"""Pictures in against diffusers' VaeImageProcessor and hand-made files; pictures out against their own bytes."""

import hashlib
import json
import os
import struct
import zlib
from pathlib import Path

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


UPRIGHT = {
    1: lambda stored: stored,
    2: np.fliplr,
    3: lambda stored: np.rot90(stored, 2),
    4: np.flipud,
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: np.rot90(stored.swapaxes(0, 1), 2),
    8: np.rot90,
}
"""Upright pixels of what is stored, by EXIF's orientation: which side of the picture the first row and column are."""


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_exif_rotation_is_applied(tmp_path, orientation, kind):
    stored = np.kron(picture(3, 2), np.ones((16, 16, 1), np.uint8))  # whole blocks, which JPEG keeps nearly exactly
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(stored).save(tmp_path / "turned", kind, exif=exif, quality=100, lossless=True, subsampling=0)
    got = np.asarray(open_image(tmp_path / "turned"), int)
    expected = UPRIGHT[orientation](stored)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, atol=3 if kind == "JPEG" else 0)


def test_sixteen_bit_grey_is_turned_too(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.array([[0, 257, 65535]], np.uint16)).save(tmp_path / "turned.png", exif=exif)
    assert np.asarray(open_image(tmp_path / "turned.png"))[:, :, 0].tolist() == [[0], [1], [255]]


@pytest.mark.parametrize("exif", [b"Exif\0\0nonsense", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_exif_turns_nothing(tmp_path, exif):
    Image.new("RGB", (4, 2), "red").save(tmp_path / "damaged.jpg", exif=exif)
    assert open_image(tmp_path / "damaged.jpg").size == (4, 2)


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
    with pytest.raises(UsageError, match="is a folder, not a picture"):
        open_image(tmp_path)


def write_png(file, depth, colour, rows, *chunks):
    """Write a PNG by hand, of a depth and kind that Pillow does not write."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    width = rows.shape[1] // channels if rows.size else 60_000
    facts = struct.pack(">IIBBBBB", width, rows.shape[0] or 60_000, depth, colour, 0, 0, 0)
    body = b"".join(b"\0" + row.astype(">u2" if depth == 16 else "u1").tobytes() for row in rows)
    parts = [chunk(b"IHDR", facts), *(chunk(*each) for each in chunks), chunk(b"IDAT", zlib.compress(body))]
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b""))
    return file


def test_of_sixteen_bit_colours_the_upper_eight_bits_are_read(tmp_path):
    levels = np.array([[0, 32768, 65535, 257, 514, 25700]])
    got = np.asarray(open_image(write_png(tmp_path / "deep.png", 16, 2, levels)), int)
    np.testing.assert_allclose(got.reshape(1, 6), levels / 257, atol=0.5)


@pytest.mark.parametrize(("colour", "levels"), [(4, [[0, 65535, 9000, 0]]), (6, [[0, 0, 0, 65535, 9, 9, 9, 0]])])
def test_sixteen_bit_transparency_is_laid_over_white(tmp_path, colour, levels):
    got = np.asarray(open_image(write_png(tmp_path / "deep.png", 16, colour, np.array(levels))))
    assert got.tolist() == [[[0, 0, 0], [255, 255, 255]]]


@pytest.mark.parametrize("depth", [8, 16])
def test_a_grey_level_that_means_transparent_is_laid_over_white(tmp_path, depth):
    key = (b"tRNS", struct.pack(">H", 100))
    got = open_image(write_png(tmp_path / "grey.png", depth, 0, np.array([[0, 100]]), key))
    assert np.asarray(got).tolist() == [[[0, 0, 0], [255, 255, 255]]]


def test_a_colour_that_means_transparent_is_laid_over_white(tmp_path):
    key = (b"tRNS", struct.pack(">3H", 10, 20, 30))
    got = open_image(write_png(tmp_path / "colour.png", 8, 2, np.array([[10, 20, 31, 10, 20, 30]]), key))
    assert np.asarray(got).tolist() == [[[10, 20, 31], [255, 255, 255]]]


def test_a_sixteen_bit_colour_that_means_transparent_is_refused(tmp_path):
    key = (b"tRNS", struct.pack(">3H", 1000, 2000, 3000))
    with pytest.raises(UsageError, match="cannot be told apart in 8 bits"):
        open_image(write_png(tmp_path / "deep.png", 16, 2, np.array([[0, 0, 0, 1000, 2000, 3000]]), key))


def test_a_palette_without_transparency_gives_its_colours(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 0, 0])
    image.putdata([1, 0])
    image.save(tmp_path / "palette.png")
    assert np.asarray(open_image(tmp_path / "palette.png")).tolist() == [[[200, 0, 0], [10, 20, 30]]]


def test_a_palette_with_an_alpha_for_every_entry_is_laid_over_white(tmp_path):
    image = Image.new("P", (2, 1))
    image.putpalette([0, 0, 0, 0, 0, 0])
    image.putdata([0, 1])
    image.save(tmp_path / "palette.png", transparency=bytes([255, 51]))
    np.testing.assert_allclose(np.asarray(open_image(tmp_path / "palette.png"), int)[0, :, 0], [0, 204], atol=1)


def test_one_bit_pictures_are_black_and_white(tmp_path):
    Image.fromarray(np.array([[True, False]])).save(tmp_path / "bits.png")
    assert np.asarray(open_image(tmp_path / "bits.png")).tolist() == [[[255] * 3, [0] * 3]]


def test_cmyk_is_read_as_ink_not_light(tmp_path):
    ink = np.zeros((16, 32, 4), np.uint8)
    ink[:, 16:] = [0, 255, 255, 0]  # magenta and yellow: red
    Image.fromarray(ink, "CMYK").save(tmp_path / "print.jpg", quality=100)
    got = np.asarray(open_image(tmp_path / "print.jpg"), int)
    np.testing.assert_allclose(got[8, 8], [255, 255, 255], atol=2)
    np.testing.assert_allclose(got[8, 24], [255, 0, 0], atol=2)


def test_grey_with_alpha_is_laid_over_white():
    image = Image.merge("LA", [Image.new("L", (1, 1), 100), Image.new("L", (1, 1), 51)])
    np.testing.assert_allclose(np.asarray(open_image(image), int), 0.2 * 100 + 0.8 * 255, atol=1)


def test_of_an_animation_the_first_frame_is_taken(tmp_path):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue", "lime")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    assert np.asarray(open_image(tmp_path / "moving.gif")).reshape(-1, 3).tolist() == [[255, 0, 0]] * 16


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF", "TIFF", "BMP", "PNG"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_kind_of_file_that_ends_early_is_refused(tmp_path, kind, share):
    picture(64, 64).save(tmp_path / "whole", kind)
    whole = (tmp_path / "whole").read_bytes()
    (tmp_path / "part").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(UsageError, match="part"):
        open_image(tmp_path / "part")


def test_an_empty_file_is_no_picture(tmp_path):
    (tmp_path / "empty.png").touch()
    with pytest.raises(UsageError, match=r"empty\.png is not a picture"):
        open_image(tmp_path / "empty.png")


def test_a_pipe_is_refused_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(UsageError, match=r"pipe\.png is not a file"):
        open_image(tmp_path / "pipe.png")


@pytest.mark.parametrize(
    "address",
    ["https://example.com/cat.png", Path("https://example.com/cat.png"), "data:image/png;base64," + "A" * 9000],
)
def test_an_address_is_no_file(address):
    with pytest.raises(UsageError, match="is an address, not a file"):
        open_image(address)


@pytest.mark.parametrize("name", ["", "a" * 5000, "a\0b"])
def test_names_that_cannot_be_files_are_refused(name):
    with pytest.raises(UsageError):
        open_image(name)


def test_a_file_that_says_it_is_huge_is_refused_before_it_is_read(tmp_path):
    bomb = write_png(tmp_path / "bomb.png", 8, 2, np.zeros((0, 3)))  # 60,000 by 60,000 in 70 bytes
    with pytest.raises(UsageError, match="decompression bomb"):
        open_image(bomb)


@pytest.mark.parametrize("source", [np.zeros((4, 4, 3), np.uint8), b"picture.png", None, 7])
def test_what_is_neither_file_nor_picture_is_refused(source):
    with pytest.raises(UsageError, match="is a path or a PIL image, not"):
        open_image(source)


def test_a_picture_without_pixels_is_refused():
    with pytest.raises(UsageError, match="0 x 3 has no pixels"):
        open_image(Image.new("RGB", (0, 3)))


def test_a_picture_that_was_closed_is_refused():
    image = Image.new("RGB", (2, 2))
    image.close()
    with pytest.raises(UsageError, match="cannot read the picture"):
        open_image(image)


def test_a_picture_that_is_given_stays_open_and_as_it_was():
    image = picture().convert("RGBA")
    before = image.tobytes()
    assert open_image(image).mode == "RGB"
    assert (image.mode, image.tobytes()) == ("RGBA", before)


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
