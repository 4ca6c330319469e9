"""Masks of inpainting: white is repainted, black is kept; prepared as diffusers' pipelines prepare them.

    mask = open_mask("mask.png")
    check_aspect(mask, image)
    pixels = mask_pixels(mask, height, width)          # 0 and 1
    latent = mask_latent(pixels, rows, columns)        # what the loop mixes with, or the denoiser reads
    kept = masked_image(to_array(image, height, width), pixels)

As in diffusers it is resized with Lanczos, then cut at one half, then brought to the latent's size by taking the
nearest pixel. Four things differ. A mask in colours becomes grey before it is resized, there after it, which is a level
here and there. A mask of 1 bit or with a palette is resized as smoothly as a grey one, where Pillow alone would take
the nearest pixel. Transparency is looked at (see `open_mask`); diffusers drops it. And a mask that leaves nothing to
repaint is refused.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from trtdiff.errors import UsageError
from trtdiff.images import read_picture
from trtdiff.types import Array

BETWEEN = (16, 239)
"""Levels from here to there are neither black nor white; JPEG keeps those within 15 of their end."""
USUAL_BETWEEN = 0.05
"""Share of such levels that a mask may have: its edges, smoothed, are a few per cent even of a small mask."""
WHITE_FROM = 128
"""Levels from here on are repainted: diffusers cuts at level / 255 >= 0.5."""


def open_mask(source: Path | str | Image.Image) -> Image.Image:
    """Read a mask as upright 8-bit grey: 255 is repainted, 0 is kept.

    Where a mask has transparent parts, they are what is repainted, whatever colour lies under them, as image editors
    export a picture with a hole; an alpha channel that is opaque throughout is ignored. White strokes on a transparent
    layer could mean either, and are refused. Raises UsageError for this and for what cannot be read.
    """
    return read_picture(source, _grey, what="mask")


def check_aspect(mask: Image.Image, image: Image.Image) -> None:
    """Refuse a mask whose sides have another ratio than its image's; a rounded pixel of either is no difference."""
    error = abs(mask.height * image.width - mask.width * image.height)
    if error >= max(*mask.size, *image.size):
        raise UsageError(
            f"the mask is {mask.width} x {mask.height}, its image {image.width} x {image.height}:"
            " they do not lie on each other",
            hint="give a mask of the image's size, or of the same aspect ratio",
        )


def mask_pixels(mask: Image.Image, height: int, width: int) -> Array:  # [1, height, width] float32, 0 and 1
    """Resize with Lanczos and cut at one half, as diffusers' mask processor does. All black is a UsageError."""
    resized = mask if mask.size == (width, height) else mask.resize((width, height), Image.Resampling.LANCZOS)
    return _something((np.asarray(resized)[None] >= WHITE_FROM).astype(np.float32), f"{width} x {height} pixels")


def mask_latent(pixels: Array, rows: int, columns: int) -> Array:  # [1, height, width] -> [1, rows, columns]
    """Take the nearest pixels, at the places where `torch.nn.functional.interpolate` takes them."""
    _, height, width = pixels.shape
    small = pixels[:, _nearest(height, rows)[:, None], _nearest(width, columns)]
    return _something(small, f"the latent's {columns} x {rows}")


def masked_image(pixels: Array, mask: Array) -> Array:  # [3, height, width], [1, height, width] -> [3, height, width]
    """Give the image with what is repainted at 0, the middle grey of -1 … 1: an inpainting denoiser sees this."""
    return pixels * (mask < 0.5)


def grey_warning(mask: Image.Image) -> str:
    """Say that a mask is not black and white, where more than its edges is grey; empty where all is well."""
    levels = np.asarray(mask)
    share = float(((levels >= BETWEEN[0]) & (levels <= BETWEEN[1])).mean())
    if share <= USUAL_BETWEEN:
        return ""
    return (
        f"{share:.0%} of the mask is neither black nor white; what is lighter than half is repainted, the rest is kept."
        " A picture given as mask, or soft edges, which inpainting does not keep soft?"
    )


def _grey(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("L")
    colours = image.convert("RGBA")
    alpha = np.asarray(colours.getchannel("A"))
    grey = colours.convert("RGB").convert("L")
    if alpha.min() == 255:
        return grey
    seen = np.asarray(grey)[alpha >= WHITE_FROM]
    if seen.size and set(np.unique(seen)) <= {0, 255} and seen.max() == 255:
        raise UsageError(
            "the mask is black or white and has transparent parts too: either could say what is repainted",
            hint="save it without transparency, white where the image is repainted",
        )
    return Image.fromarray(255 - alpha)


def _nearest(size: int, fewer: int) -> npt.NDArray[np.int64]:  # [fewer]
    """Give the places torch reads in mode "nearest": the floor of i · size / fewer, in float32 as it computes them."""
    scale = np.float32(size) / np.float32(fewer)
    places: npt.NDArray[np.int64] = np.floor(np.arange(fewer, dtype=np.float32) * scale).astype(np.int64)
    return places.clip(max=size - 1)


def _something(mask: Array, size: str) -> Array:
    if not mask.any():
        raise UsageError(
            f"the mask leaves nothing to repaint: it is black everywhere at {size}",
            hint="paint white what is to be made anew; a spot must be larger than one row of the latent",
        )
    return mask
