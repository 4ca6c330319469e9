"""`trtdiff run` with pictures and masks of every kind, as people have them."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trtdiff.cli import exit_code as run

ROWS, COLUMNS = np.mgrid[0:64, 0:96]
LEVELS = np.stack([ROWS * 4, COLUMNS * 2, np.full_like(ROWS, 90)], axis=-1).astype(np.uint8)
GREY = (ROWS * 3).astype(np.uint8)
SPOT = np.where((ROWS - 30) ** 2 + (COLUMNS - 40) ** 2 < 500, 255, 0).astype(np.uint8)


@pytest.fixture
def go(tiny_bundle, tmp_path, monkeypatch, capsys):
    """Paint from pictures in a folder of its own: `go("--image", "x.png")` gives exit code, errors and the receipt."""
    monkeypatch.chdir(tmp_path)
    picture("plain.png", LEVELS)
    picture("grey.png", GREY)
    picture("mask.png", SPOT)

    def call(*arguments, prompts=("a red cat",)):
        given = ["run", str(tiny_bundle), *prompts, "--threads", "1", "--steps", "2", "--scheduler", "ddim", "--json"]
        code = run([*given, *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, err, json.loads(out) if code == 0 else None

    return call


def picture(name, levels, mode=None, **options):
    image = Image.fromarray(levels)
    (image.convert(mode) if mode else image).save(name, **options)


def painted(answer):
    code, _, receipt = answer
    assert code == 0
    return [made["sha256"] for made in receipt["pictures"]]


# --- the same picture, stored otherwise ------------------------------------------------------------------------------


def rotated(name):
    """Lie on its side, with a tag that sets it upright."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by 90 degrees
    picture(name, np.rot90(LEVELS).copy(), exif=exif)


SAME = {
    "opaque alpha": ("plain.png", lambda name: picture(name, LEVELS, "RGBA")),
    "EXIF rotation": ("plain.png", rotated),
    "palette": ("grey.png", lambda name: picture(name, GREY, "P")),
    "16 bits": ("grey.png", lambda name: Image.fromarray(GREY.astype(np.uint16) * 257).save(name)),
    "grey as colours": ("grey.png", lambda name: picture(name, GREY, "RGB")),
}


@pytest.mark.parametrize("kind", SAME)
def test_how_a_picture_is_stored_changes_nothing(kind, go):
    plain, make = SAME[kind]
    make("other.png")
    assert painted(go("--image", "other.png")) == painted(go("--image", plain))


def test_transparent_parts_are_white(go):
    clear = np.dstack([LEVELS, np.where(COLUMNS < 48, 0, 255).astype(np.uint8)])
    picture("clear.png", clear)
    picture("white.png", np.where(COLUMNS[..., None] < 48, 255, LEVELS).astype(np.uint8))
    assert (
        painted(go("--image", "clear.png"))
        == painted(go("--image", "white.png"))
        != painted(go("--image", "plain.png"))
    )


def test_a_mask_of_another_size_and_kind_is_the_same_mask(go):
    picture("large.png", np.kron(SPOT, np.ones((2, 2), np.uint8)))
    picture("one-bit.png", SPOT, "1")
    picture("hole.png", np.dstack([LEVELS, 255 - SPOT]))  # what is transparent is repainted
    expected = painted(go("--image", "plain.png", "--mask", "mask.png"))
    for name in ("large.png", "one-bit.png", "hole.png"):
        assert painted(go("--image", "plain.png", "--mask", name)) == expected
    assert painted(go("--image", "plain.png", "--strength", 1)) != expected


def test_what_the_mask_keeps_is_the_picture_whatever_the_seed(go):
    """A random VAE gives no likeness; so compare where the mask keeps with what another seed gives there."""
    picture("edge.png", np.where(COLUMNS < 8, 255, 0).astype(np.uint8))
    pictures = []
    for seed in (0, 1):
        assert go("--image", "plain.png", "--mask", "edge.png", "--seed", seed)[0] == 0
        pictures.append(np.asarray(Image.open("out.png")).astype(int))
    apart = np.abs(pictures[0] - pictures[1])
    assert apart[:, :8].max() > 0
    assert apart[:, :8].mean() > 3 * apart[:, 48:].mean()


# --- strength --------------------------------------------------------------------------------------------------------


def test_strength_1_keeps_every_step(go):
    code, _, receipt = go("--image", "plain.png", "--strength", 1)
    assert (code, receipt["strength"], receipt["scheduler"]["start"]) == (0, 1.0, 0)


def test_an_empty_prompt_is_a_prompt(go):
    assert len(painted(go("--image", "plain.png", prompts=("",)))) == 1


def test_lists_of_equal_length_are_paired(go):
    both = painted(go("--image", "plain.png", "--image", "grey.png", "--seed", 4, prompts=("a cat", "a dog")))
    assert both[1:] == painted(go("--image", "grey.png", "--seed", 5, prompts=("a dog",)))


def test_a_mask_that_is_not_black_and_white_is_said_and_cut_at_half(go):
    picture("soft.png", (COLUMNS * 2.6).astype(np.uint8))
    picture("cut.png", np.where((COLUMNS * 2.6).astype(np.uint8) >= 128, 255, 0).astype(np.uint8))
    soft, cut = (go("--image", "plain.png", "--mask", name) for name in ("soft.png", "cut.png"))
    assert painted(soft) == painted(cut)
    assert "of the mask is neither black nor white" in soft[1]
    assert cut[1] == ""


# --- refused ---------------------------------------------------------------------------------------------------------

TWO = ("a cat", "a dog")
REFUSED = {
    "strength 0": (["--image", "plain.png", "--strength", "0"], ("a",), "leaves no step"),
    "strength above 1": (["--image", "plain.png", "--strength", "1.5"], ("a",), "not between 0 and 1"),
    "strength NaN": (["--image", "plain.png", "--strength", "nan"], ("a",), "not a finite number"),
    "a mask alone": (["--mask", "mask.png"], ("a",), "no image was given"),
    "a mask of another shape": (
        ["--image", "plain.png", "--mask", "tall.png"],
        ("a",),
        "they do not lie on each other",
    ),
    "a black mask": (["--image", "plain.png", "--mask", "black.png"], ("a",), "leaves nothing to repaint"),
    "a mask that is gone": (["--image", "plain.png", "--mask", "gone.png"], ("a",), "there is no mask gone.png"),
    "a mask that is no picture": (["--image", "plain.png", "--mask", "notes.txt"], ("a",), "not a picture"),
    "a picture that ends early": (["--image", "cut.png"], ("a",), "cannot read the picture cut.png"),
    "a picture smaller than the engines": (["--image", "small.png"], ("a",), "the image is 16 x 16"),
    "three pictures for two": (["--image", "plain.png"] * 3, TWO, "there are 2 prompts and 3 images"),
    "three masks for two": (["--image", "plain.png", *["--mask", "mask.png"] * 3], TWO, "2 prompts and 3 masks"),
    "three negatives for two": (["--negative", "x"] * 3, TWO, "2 prompts and 3 negative prompts"),
    "a picture in floating point": (["--image", "float.tiff"], ("a",), "mode F has no agreed white"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_written(case, go):
    arguments, prompts, message = REFUSED[case]
    picture("tall.png", SPOT.T.copy())
    picture("black.png", np.zeros_like(SPOT))
    picture("small.png", LEVELS[:16, :16].copy())
    Path("notes.txt").write_text("a cat")
    Path("cut.png").write_bytes(Path("plain.png").read_bytes()[:-120])
    Image.fromarray(GREY.astype(np.float32)).save("float.tiff")
    code, err, _ = go(*arguments, prompts=prompts)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not list(Path().glob("out*"))
