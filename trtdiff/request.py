"""A request for pictures, checked: every number that cannot be meant is refused here, before anything runs.

Pictures are numbered as diffusers numbers them: all pictures of the first prompt, then all of the second. Picture i has
seed `seed + i`, so that two prompts with `count=2` are

    generators = [torch.Generator().manual_seed(seed + i) for i in range(4)]
    pipeline([p1, p2], num_images_per_prompt=2, generator=generators)  # diffusers
"""

import difflib
import math
import operator
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from PIL import Image

from trtdiff.bundle import BundleManifest
from trtdiff.errors import ProfileError, UsageError
from trtdiff.images import open_image
from trtdiff.noise import check_seed
from trtdiff.sampler import start_of_strength
from trtdiff.tokens import check_text
from trtdiff.types import names

LoopKind: TypeAlias = Literal["device", "host"]
"""`device`: sampler and guidance inside the engine. `host`: the sampler in numpy, the engine a plain denoiser."""
Source: TypeAlias = str | Path | Image.Image

MOST = 100_000
"""Pictures of one request; more is a slip of the finger, and would be kept in memory until the last is done."""
STRENGTH = 0.8
"""Of image-to-image, where none is asked for; diffusers' own default."""


@dataclass(frozen=True)
class Shot:
    """One picture of a request."""

    index: int
    prompt: str
    negative: str
    seed: int
    source: Image.Image | None
    """Picture to start from, upright RGB, not yet resized."""


@dataclass(frozen=True)
class Request:
    """What was asked, with nothing left open."""

    prompts: tuple[str, ...]
    negatives: tuple[str, ...]
    """One a prompt; not used where guidance is 1 or less."""
    count: int
    """Pictures a prompt."""
    seed: int
    steps: int
    guidance: float
    scheduler: str
    height: int
    width: int
    batch: int
    """Pictures computed at once, at most."""
    sources: tuple[Image.Image, ...]
    """None, or one a prompt."""
    strength: float | None
    start: int | None
    """Steps skipped in image-to-image."""
    loop: LoopKind

    @property
    def branches(self) -> int:
        """G: 2 with a negative prompt, 1 where guidance is off, which is 1 or less as in diffusers."""
        return 2 if self.guidance > 1 else 1

    @property
    def pictures(self) -> int:
        """How many pictures were asked for."""
        return len(self.prompts) * self.count

    @property
    def shots(self) -> tuple[Shot, ...]:
        """Every picture in order, prompt by prompt."""
        return tuple(
            Shot(
                index=prompt * self.count + copy,
                prompt=self.prompts[prompt],
                negative=self.negatives[prompt],
                seed=self.seed + prompt * self.count + copy,
                source=self.sources[prompt] if self.sources else None,
            )
            for prompt in range(len(self.prompts))
            for copy in range(self.count)
        )


MOST_GUIDANCE = 1e6
"""Far beyond what any model is used with; its float32 products stay finite."""


def make_request(
    manifest: BundleManifest,
    prompts: str | Sequence[str],
    *,
    negative: str | Sequence[str] | None = None,
    steps: int = 20,
    guidance: float | None = None,
    seed: int | None = 0,
    count: int = 1,
    height: int | None = None,
    width: int | None = None,
    scheduler: str | None = None,
    image: Source | Sequence[Source] | None = None,
    strength: float | None = None,
    batch: int | None = None,
    loop: LoopKind = "device",
) -> Request:
    """Fill in what was left open and refuse what cannot be meant. Raises UsageError and ProfileError."""
    texts = _texts(prompts)
    number = _whole("count", count, least=1)
    if len(texts) * number > MOST:
        raise UsageError(f"{len(texts) * number} pictures are more than {MOST}", hint="make several requests")
    sources = _sources(image, len(texts), manifest)
    if strength is not None and not sources:
        raise UsageError("strength is for image-to-image, and no image was given", hint="give an image to start from")
    if sources:
        strength = _real("strength", STRENGTH if strength is None else strength)
    step_count = _whole("steps", steps, least=1)
    rows, columns = _size(manifest, height, width, sources)
    scale = _real("guidance", manifest.facts.guidance if guidance is None else guidance)
    if scale > MOST_GUIDANCE:
        raise UsageError(f"guidance {scale:g} is beyond any use", hint="1 or less means no guidance; 4 to 9 are usual")
    if scale < 0:
        raise UsageError(f"guidance {scale:g} is negative", hint="1 or less means no guidance; 4 to 9 are usual")
    if loop not in get_args(LoopKind):
        raise UsageError(f"no loop is called {loop!r}", hint=f"known: {', '.join(get_args(LoopKind))}")
    return Request(
        prompts=texts,
        negatives=_negatives(negative, len(texts)),
        count=number,
        seed=_seed(seed, len(texts) * number),
        steps=step_count,
        guidance=scale,
        scheduler=_scheduler(manifest, scheduler),
        height=rows,
        width=columns,
        batch=_batch(manifest, batch),
        sources=sources,
        strength=strength,
        start=None if strength is None else start_of_strength(step_count, strength),
        loop=loop,
    )


def _texts(prompts: str | Sequence[str]) -> tuple[str, ...]:
    listed = (prompts,) if isinstance(prompts, str) else tuple(prompts)
    if not listed:
        raise UsageError("no prompt was given", hint='an empty prompt is written ""')
    return tuple(check_text(text, what=f"prompt {number}") for number, text in enumerate(listed, 1))


def _negatives(negative: str | Sequence[str] | None, prompts: int) -> tuple[str, ...]:
    if negative is None or isinstance(negative, str):
        return (check_text(negative or "", what="the negative prompt"),) * prompts
    listed = tuple(check_text(text, what=f"negative prompt {number}") for number, text in enumerate(negative, 1))
    if len(listed) not in {1, prompts}:
        raise UsageError(f"there are {prompts} prompts and {len(listed)} negative prompts",
                         hint="give one negative prompt for all, or one for every prompt")  # fmt: skip
    return listed if len(listed) == prompts else listed * prompts


def _sources(
    image: Source | Sequence[Source] | None, prompts: int, manifest: BundleManifest
) -> tuple[Image.Image, ...]:
    if image is None:
        return ()
    if not any("vae_encoder" in components for components in manifest.engines.values()):
        raise UsageError(f"the bundle {manifest.name} makes no pictures from pictures: it has no vae_encoder engine",
                         hint="build it with all components")  # fmt: skip
    listed = (image,) if isinstance(image, str | Path | Image.Image) else tuple(image)
    if len(listed) not in {1, prompts}:
        raise UsageError(f"there are {prompts} prompts and {len(listed)} images",
                         hint="give one image for all, or one for every prompt")  # fmt: skip
    opened = tuple(open_image(source) for source in listed)
    return opened if len(opened) == prompts else opened * prompts


def _size(
    manifest: BundleManifest, height: int | None, width: int | None, sources: Sequence[Image.Image]
) -> tuple[int, int]:
    """Asked for, else the first source's own size rounded down (as diffusers does), else the checkpoint's native."""
    latent, step = manifest.facts.latent, manifest.facts.sizes_multiple_of
    native = {"height": latent.height, "width": latent.width}
    if sources:
        native = {"height": sources[0].height // step * step, "width": sources[0].width // step * step}
    sizes = {}
    for name, asked in (("height", height), ("width", width)):
        size = native[name] if asked is None else _whole(name, asked, least=1)
        if size % step:
            span = manifest.profile.dims.get(name)
            near = {size // step * step, -(-size // step) * step}
            fitting = sorted(value for value in near if value > 0 and (span is None or value in span)) or sorted(
                near - {0}
            )
            raise ProfileError(f"{name} {size} is not a multiple of {step}",
                               hint=f"nearest: {' or '.join(map(str, fitting))}")  # fmt: skip
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


def _batch(manifest: BundleManifest, batch: int | None) -> int:
    span = manifest.profile.dims.get("batch")
    if batch is None:
        return span.max if span else 1
    size = _whole("batch", batch, least=1)
    manifest.profile.check({"batch": size})
    return size


def _scheduler(manifest: BundleManifest, scheduler: str | None) -> str:
    if scheduler is None:
        return manifest.samplers[0]
    if scheduler not in manifest.samplers:
        near = difflib.get_close_matches(str(scheduler), manifest.samplers, 3, 0.5)
        raise UsageError(
            f"the bundle has no scheduler {scheduler!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""),
            hint=f"it has {names(manifest.samplers, 30)}",
        )
    return scheduler


def _seed(seed: int | None, pictures: int) -> int:
    first = secrets.randbits(32) if seed is None else check_seed(seed)
    check_seed(first + pictures - 1)
    return first


def _whole(name: str, value: Any, *, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} {value!r} is not a whole number") from None
    if isinstance(value, bool):
        raise UsageError(f"{name} {value!r} is not a whole number")
    if number < least:
        raise UsageError(f"{name} {number} is less than {least}")
    return number


def _real(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} {value!r} is not a number") from None
    if not math.isfinite(number):
        raise UsageError(f"{name} {number} is not a finite number")
    return number
