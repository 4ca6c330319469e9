"""Masks for inpainting."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from trtdiff.errors import UsageError
from trtdiff.types import Array


def open_mask(source: Path | str | Image.Image) -> Image.Image:
    """Read a mask."""
    if isinstance(source, Image.Image):
        return source.convert("L")
    with Image.open(source) as image:
        return ImageOps.exif_transpose(image).convert("L")


def check_mask(mask: Image.Image, picture: Image.Image) -> None:
    """Refuse a mask of another aspect ratio."""
    if mask.size != picture.size:
        raise UsageError(f"the mask is {mask.width} x {mask.height}, the image {picture.width} x {picture.height}")


def mask_pixels(mask: Image.Image, height: int, width: int) -> Array:  # [1, height, width]
    """Resize and binarize."""
    if mask.size != (width, height):
        mask = mask.resize((width, height), Image.Resampling.LANCZOS)
    return (np.asarray(mask, np.float32) / 255 >= 0.5).astype(np.float32)[None]


def mask_latent(pixels: Array, rows: int, columns: int) -> Array:  # [1, rows, columns]
    """Nearest."""
    height, width = pixels.shape[1:]
    return pixels[:, (np.arange(rows) * height) // rows][:, :, (np.arange(columns) * width) // columns]


def masked_image(pixels: Array, mask: Array) -> Array:
    """Blank what is painted anew."""
    return pixels * (mask < 0.5)
