"""The checks that a request goes through, one field at a time; what cannot be meant is a UsageError or ProfileError."""

import difflib
import math
import operator
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from PIL import Image

from trtdiff.bundle import BundleManifest
from trtdiff.errors import ProfileError, UsageError
from trtdiff.images import open_image
from trtdiff.masks import check_aspect, open_mask
from trtdiff.noise import check_seed
from trtdiff.tokens import check_text
from trtdiff.types import names

Source: TypeAlias = str | Path | Image.Image

MOST_GUIDANCE = 1e6
"""Far beyond what any model is used with; its float32 products stay finite."""


def texts(prompts: str | Sequence[str]) -> tuple[str, ...]:
    """Give the prompts, of which there is one at least."""
    listed = _several("prompts", prompts)
    if not listed:
        raise UsageError("no prompt was given", hint='an empty prompt is written ""')
    return tuple(check_text(text, what=f"prompt {number}") for number, text in enumerate(listed, 1))


def _several(name: str, given: Any) -> tuple[Any, ...]:
    """Give one or several values as a tuple."""
    if isinstance(given, str | Path | Image.Image):
        return (given,)
    try:
        return tuple(given)
    except TypeError:
        raise UsageError(f"{name} are a {type(given).__name__}: {str(given)[:80]}",
                         hint="give one, or a list of them") from None  # fmt: skip


def negatives(manifest: BundleManifest, negative: str | Sequence[str] | None, prompts: int) -> tuple[str | None, ...]:
    """Give one a prompt; None where nobody gave any, which is not to every model what an empty one is."""
    if negative is None:
        return (None,) * prompts
    if manifest.facts.guided_by == "embedded":
        raise UsageError(f"{manifest.name} embeds its guidance, and takes no negative prompt", hint="leave it out")
    if isinstance(negative, str):
        return (check_text(negative, what="the negative prompt"),) * prompts
    given = _several("negative prompts", negative)
    listed = tuple(check_text(text, what=f"negative prompt {number}") for number, text in enumerate(given, 1))
    if len(listed) not in {1, prompts}:
        raise UsageError(f"there are {prompts} prompts and {len(listed)} negative prompts",
                         hint="give one negative prompt for all, or one for every prompt")  # fmt: skip
    return listed if len(listed) == prompts else listed * prompts


def sources(image: Source | Sequence[Source] | None, prompts: int, manifest: BundleManifest) -> tuple[Image.Image, ...]:
    """Give one picture a prompt, where there are any."""
    if image is None:
        return ()
    if not {"image", "inpaint", "inpaint-channels"} & set(manifest.facts.modes):
        raise UsageError(
            f"{manifest.name} is of a family that makes pictures from text alone", hint="leave the image out"
        )
    if not any("vae_encoder" in components for components in manifest.engines.values()):
        raise UsageError(f"the bundle {manifest.name} makes no pictures from pictures: it has no vae_encoder engine",
                         hint="build it with all components")  # fmt: skip
    return _each(tuple(open_image(source) for source in _several("images", image)), prompts, "images")


def masks(
    mask: Source | Sequence[Source] | None, pictures: Sequence[Image.Image], manifest: BundleManifest
) -> tuple[Image.Image, ...]:
    """Give one a prompt, where there are any, each fitting its picture."""
    modes = manifest.facts.modes
    if mask is None:
        if "inpaint-channels" in modes:
            raise UsageError(f"{manifest.name} only paints into pictures: it needs an image and a mask",
                             hint="give both, or use a checkpoint that makes pictures from text")  # fmt: skip
        return ()
    if not pictures:
        raise UsageError("a mask says where to paint a picture anew, and no image was given", hint="give an image too")
    if not {"inpaint", "inpaint-channels"} & set(modes):
        raise UsageError(f"{manifest.name} is of a family that does not inpaint", hint="leave the mask out")
    opened = _each(tuple(open_mask(source) for source in _several("masks", mask)), len(pictures), "masks")
    for one, picture in zip(opened, pictures, strict=True):
        check_aspect(one, picture)
    return opened


def _each(given: tuple[Image.Image, ...], prompts: int, what: str) -> tuple[Image.Image, ...]:
    if len(given) not in {1, prompts}:
        raise UsageError(f"there are {prompts} prompts and {len(given)} {what}",
                         hint=f"give one of the {what} for all, or one for every prompt")  # fmt: skip
    return given if len(given) == prompts else given * prompts


def size(
    manifest: BundleManifest, height: int | None, width: int | None, sources: Sequence[Image.Image]
) -> tuple[int, int]:
    """Asked for, else the first source's own size rounded down, else the checkpoint's native.

    Where the engines do not take the native size, it is the one that they are tuned for.
    A source's own size is what image to image of Stable Diffusion and XL takes in diffusers; the other pipelines there
    that take a picture stretch it to the native size.
    """
    latent, step = manifest.facts.latent, manifest.facts.sizes_multiple_of
    spans = manifest.profile.dims
    native = {
        name: size if name not in spans or size in spans[name] else spans[name].opt
        for name, size in (("height", latent.height), ("width", latent.width))
    }
    if sources:
        native = {"height": sources[0].height // step * step, "width": sources[0].width // step * step}
    sizes = {}
    for name, asked in (("height", height), ("width", width)):
        size = native[name] if asked is None else whole(name, asked, least=1)
        if size % step:
            near = sorted({size // step * step, -(-size // step) * step} - {0})
            span = spans.get(name)
            fitting = [value for value in near if span is None or value in span]
            hint = f"the engines take {span}" if not fitting else f"nearest: {' or '.join(map(str, fitting))}"
            raise ProfileError(f"{name} {size} is not a multiple of {step}", hint=hint)
        sizes[name] = size
    try:
        manifest.profile.check(sizes)
    except ProfileError as error:
        if not sources:
            raise
        raise ProfileError(
            error.message,
            where=f"{error.where}; the image is {sources[0].width} x {sources[0].height}",
            hint=f"{error.hint}; or give height and width: the image is resized to them",
        ) from None
    return sizes["height"], sizes["width"]


def batch(manifest: BundleManifest, batch: int | None) -> int:
    """Give how many pictures are computed at once: as many as the engines take, unless fewer are asked for."""
    span = manifest.profile.dims.get("batch")
    if batch is None:
        return span.max if span else 1
    size = whole("batch", batch, least=1)
    manifest.profile.check({"batch": size})
    return size


def scheduler(manifest: BundleManifest, scheduler: str | None) -> str:
    """Give the scheduler's name: the checkpoint's own, unless another of the bundle's is asked for."""
    if scheduler is None:
        return manifest.samplers[0]
    if scheduler not in manifest.samplers:
        near = difflib.get_close_matches(str(scheduler), manifest.samplers, 3, 0.5)
        raise UsageError(
            f"the bundle has no scheduler {scheduler!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""),
            hint=f"it has {names(manifest.samplers, 30)}",
        )
    return scheduler


def seed(seed: int | None, pictures: int) -> int:
    """Give the first picture's seed, drawn where None is asked for; the last one's must be a seed too."""
    first = secrets.randbits(32) if seed is None else check_seed(seed)
    check_seed(first + pictures - 1)
    return first


def whole(name: str, value: Any, *, least: int) -> int:
    """Check a whole number."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} {value!r} is not a whole number") from None
    if isinstance(value, bool):
        raise UsageError(f"{name} {value!r} is not a whole number")
    if number < least:
        raise UsageError(f"{name} {number} is less than {least}")
    return number


def guidance_of(
    manifest: BundleManifest, guidance: float | None, true_guidance: float | None, negatives: Sequence[str | None]
) -> tuple[float, float]:
    """Give the scale that was asked for, and the one that weighs the branches: 1 where there is only one."""
    facts, span = manifest.facts, manifest.profile.dims.get("branches")
    most = span.max if span else 2
    single = facts.guided_by == "branches" and most == 1
    scale = _scale("guidance", (1.0 if single else facts.guidance) if guidance is None else guidance)
    if true_guidance is not None and facts.guided_by != "embedded, branches":
        raise UsageError("true_guidance is for models that embed their guidance and can have a negative prompt too",
                         hint="give guidance")  # fmt: skip
    other = {"branches": scale, "embedded": 1.0}
    branches = other.get(facts.guided_by, _scale("true_guidance", 1.0 if true_guidance is None else true_guidance))
    if facts.guided_by == "embedded, branches" and branches > 1 and None in negatives:
        raise UsageError("true_guidance weighs a negative prompt, and none was given", hint='give one; "" is one too')
    if branches > 1 and most == 1:
        raise UsageError(f"guidance {branches:g} needs a branch for the negative prompt, which the engines do not have",
                         hint="give guidance 1, or build with --profile branches=1:2:2")  # fmt: skip
    if branches <= 1 and span and span.min > 1:
        raise UsageError(f"guidance {branches:g} needs engines that leave the negative prompt out, and these cannot",
                         hint="give more than 1, or build with --profile branches=1:2:2")  # fmt: skip
    return scale, branches


def _scale(name: str, value: Any) -> float:
    scale = real(name, value)
    if not 0 <= scale <= MOST_GUIDANCE:
        what = "is beyond any use" if scale > 0 else "is negative"
        raise UsageError(f"{name} {scale:g} {what}", hint="1 or less means no guidance; 4 to 9 are usual")
    return scale


def skipped(manifest: BundleManifest, clip_skip: int) -> int:
    """Check how many of CLIP's last layers are left out."""
    layers, asked = manifest.facts.clip_layers, whole("clip_skip", clip_skip, least=0)
    if asked and not layers:
        raise UsageError(f"{manifest.name} reads no layers of CLIP that could be skipped", hint="leave clip_skip out")
    if asked and asked >= layers:
        raise UsageError(f"clip_skip {asked}: the text encoder has {layers} layers to choose from",
                         hint=f"give 0 to {layers - 1}")  # fmt: skip
    return asked


def weighted(manifest: BundleManifest, asked: bool) -> bool:  # noqa: FBT001
    """Check that weights in prompts can be followed."""
    if asked and not manifest.facts.weighted:
        raise UsageError(f"prompts of {manifest.family} cannot be weighted or longer than a row",
                         hint="leave weighted out")  # fmt: skip
    if not isinstance(asked, bool):
        raise UsageError(f"weighted {asked!r} is neither True nor False")
    return asked


def fraction(name: str, value: float) -> float:
    """Check a number from 0 to 1."""
    number = real(name, value)
    if not 0 <= number <= 1:
        raise UsageError(f"{name} {number:g} is not between 0 and 1")
    return number


def pair(manifest: BundleManifest, name: str, value: Any, usual: tuple[int, int], *, least: int) -> tuple[int, int]:
    """Check a size [height, width] or a place [top, left], in pixels, of what a model is told."""
    if value is None:
        return usual
    if name not in manifest.facts.framed:
        raise UsageError(f"{manifest.name} is told no {name.replace('_', ' ')}", hint=f"leave {name} out")
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise UsageError(f"{name} {value!r} is not a pair of pixels", hint="give height and width, or top and left")
    first, second = (whole(name, side, least=least) for side in value)
    return first, second


def real(name: str, value: Any) -> float:
    """Check a finite number."""
    if isinstance(value, bool):
        raise UsageError(f"{name} {value!r} is not a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} {value!r} is not a number") from None
    if not math.isfinite(number):
        raise UsageError(f"{name} {number} is not a finite number")
    return number
