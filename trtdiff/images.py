"""Pictures in and out: files to arrays as diffusers prepares them, arrays to PNG files that carry their parameters."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, PngImagePlugin, UnidentifiedImageError

from trtdiff.errors import UsageError
from trtdiff.records import whole_file

T = TypeVar("T")

METADATA = "trtdiff"
"""Key of the PNG text chunk that holds the parameters as JSON; `parameters` holds them as one line for people."""


def open_image(source: Path | str | Image.Image) -> Image.Image:
    """Read a picture as upright 8-bit RGB; of several frames the first.

    EXIF rotation is applied; transparency is laid over white (diffusers drops it and shows whatever colour lies under
    it; for opaque pictures the two agree); 16-bit grey is scaled, not clipped; of 16-bit colours the upper 8 bits are
    read; colour profiles are not applied, as in diffusers. Raises UsageError for what cannot be read.
    """
    return read_picture(source, _over_white, what="picture")


def read_picture(source: Path | str | Image.Image, prepare: Callable[[Image.Image], T], *, what: str) -> T:
    """Give what `prepare` makes of a picture that is upright and in 8 bits; errors call it `what`."""
    if isinstance(source, Image.Image):
        with _named(f"the {what}", where=""):
            return prepare(_eight_bits(source))
    path = _path(source, what)
    with _named(f"the {what} {path.name}", where=str(path)):
        if path.is_dir():
            raise UsageError(f"{path.name or path} is a folder, not a {what}")
        if not path.exists():
            raise UsageError(f"there is no {what} {path.name}")
        if not path.is_file():  # a pipe would be waited for
            raise UsageError(f"{path.name} is not a file")
        with Image.open(path) as image:
            return prepare(_eight_bits(image))


def _path(source: Any, what: str) -> Path:
    if not isinstance(source, str | Path):
        raise UsageError(
            f"a {what} is a path or a PIL image, not {type(source).__name__}",
            hint="PIL.Image.fromarray makes one of an array of 8-bit levels, PIL.Image.open of an open file",
        )
    if re.match(r"data:|[A-Za-z][A-Za-z0-9+.-]+:/", str(source)):
        raise UsageError(f"{str(source)[:80]} is an address, not a file", hint="download it, and give the file")
    return Path(source)


@contextmanager
def _named(name: str, *, where: str) -> Iterator[None]:
    """Turn whatever is raised while a picture is read into a UsageError that names it."""
    try:
        yield
    except UsageError as error:
        raise UsageError(error.message, where=where, hint=error.hint) from None
    except UnidentifiedImageError:
        raise UsageError(f"{Path(where).name} is not a picture that can be read", where=where) from None
    except Exception as error:  # noqa: BLE001 - damaged files raise whatever their bytes make of Pillow's readers
        raise UsageError(f"cannot read {name}: {error}", where=where) from None


def _eight_bits(image: Image.Image) -> Image.Image:
    """Turn a picture as its EXIF says; scale 16-bit grey to 8 bits, in which Pillow converts everything else."""
    if 0 in image.size:
        raise UsageError(f"a picture of {image.width} x {image.height} has no pixels")
    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    clear = image.info.get("transparency")  # one grey level or colour that is not to be seen
    image = ImageOps.exif_transpose(image)
    if sixteen:
        levels = np.asarray(image).astype(np.float64)
        grey = Image.fromarray(np.clip(levels / 257 + 0.5, 0, 255).astype(np.uint8))
        if clear is None:
            return grey
        return Image.merge("LA", [grey, Image.fromarray(np.where(levels == clear, 0, 255).astype(np.uint8))])
    if image.mode in {"I", "F"}:
        raise UsageError(f"a picture of mode {image.mode} has no agreed white", hint="save it as an 8-bit PNG")
    if isinstance(clear, tuple) and max(clear) > 255:
        raise UsageError(
            "16-bit colours, one of which means transparent, cannot be told apart in 8 bits",
            hint="save it with an alpha channel",
        )
    return image


def _over_white(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        page = Image.new("RGBA", colours.size, "white")
        return Image.alpha_composite(page, colours).convert("RGB")
    return image.convert("RGB")


def to_array(image: Image.Image, height: int, width: int) -> npt.NDArray[np.float32]:  # [3, height, width]
    """Resize with Lanczos and map 0 … 255 to -1 … 1, as diffusers' `VaeImageProcessor.preprocess` does."""
    resized = image if image.size == (width, height) else image.resize((width, height), Image.Resampling.LANCZOS)
    pixels = np.asarray(resized, np.float32) / np.float32(255)
    return np.ascontiguousarray((np.float32(2) * pixels - np.float32(1)).transpose(2, 0, 1))


def to_images(array: npt.NDArray[np.float32]) -> list[Image.Image]:
    """Map [B, 3, H, W] in -1 … 1 to 8-bit pictures: halved, clipped, rounded as diffusers does it."""
    pixels = np.clip(array * np.float32(0.5) + np.float32(0.5), 0, 1)
    levels = np.round(pixels * np.float32(255)).astype(np.uint8).transpose(0, 2, 3, 1)
    return [Image.fromarray(np.ascontiguousarray(picture)) for picture in levels]


def pixel_digest(image: Image.Image) -> str:
    """Hexadecimal sha256 of the picture's size and RGB bytes: the same for every file format and metadata."""
    size = f"{image.width}x{image.height}:".encode()
    return hashlib.sha256(size + image.convert("RGB").tobytes()).hexdigest()


def grid(images: Sequence[Image.Image], columns: int | None = None) -> Image.Image:
    """Lay pictures of one size on a contact sheet, row by row; nearly square unless `columns` says otherwise.

    Pictures smaller than 128 pixels are enlarged by a whole factor, pixel by pixel, so that a sheet can be looked at.
    """
    if not images:
        raise UsageError("a contact sheet needs at least one picture")
    columns = columns or math.ceil(math.sqrt(len(images)))
    factor = max(1, 128 // max(images[0].size))
    width, height = (side * factor for side in images[0].size)
    sheet = Image.new("RGB", (min(columns, len(images)) * width, -(-len(images) // columns) * height), "white")
    for index, image in enumerate(images):
        sheet.paste(
            image.resize((width, height), Image.Resampling.NEAREST),
            (index % columns * width, index // columns * height),
        )
    return sheet


def save_png(image: Image.Image, path: Path, parameters: Mapping[str, Any]) -> None:
    """Write a PNG whole or not at all, with its parameters in two text chunks: a line for people, JSON for programs."""
    texts = PngImagePlugin.PngInfo()
    texts.add_itxt("parameters", parameter_line(parameters))
    texts.add_itxt(METADATA, json.dumps(parameters, ensure_ascii=False))
    with whole_file(path) as temporary:
        image.save(temporary, format="PNG", pnginfo=texts)


def read_parameters(path: Path) -> dict[str, Any] | None:
    """Give the parameters that a PNG of ours carries; None where it carries none."""
    with Image.open(path) as image:
        text = getattr(image, "text", {}).get(METADATA)
    if text is None:
        return None
    found: dict[str, Any] = json.loads(text)
    return found


def parameter_line(parameters: Mapping[str, Any]) -> str:
    """Write parameters as the tools around Stable Diffusion do: prompt, negative prompt, then `Key: value, …`."""
    rest = {key: value for key, value in parameters.items() if key not in {"prompt", "negative"} and value is not None}
    lines = [str(parameters.get("prompt", ""))]
    if parameters.get("negative"):
        lines.append(f"Negative prompt: {parameters['negative']}")
    lines.append(", ".join(f"{key.replace('_', ' ').capitalize()}: {_plain(value)}" for key, value in rest.items()))
    return "\n".join(lines)


def _plain(value: Any) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if re.search(r'[,:"\n]', text) else text
