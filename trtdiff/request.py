"""A request for pictures, checked: every number that cannot be meant is refused here, before anything runs.

Pictures are numbered as diffusers numbers them: all pictures of the first prompt, then all of the second. Picture i has
seed `seed + i`, so that two prompts with `count=2` are

    generators = [torch.Generator().manual_seed(seed + i) for i in range(4)]
    pipeline([p1, p2], num_images_per_prompt=2, generator=generators)  # diffusers
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from PIL import Image

from trtdiff import request_checks as check
from trtdiff.bundle import BundleManifest
from trtdiff.errors import UsageError
from trtdiff.families.base import Framing, Wish
from trtdiff.request_checks import MOST_GUIDANCE, Source
from trtdiff.sampler import start_of_strength

__all__ = ["MOST_GUIDANCE", "LoopKind", "Request", "Shot", "Source", "make_request"]

LoopKind: TypeAlias = Literal["device", "host"]
"""`device`: sampler and guidance inside the engine. `host`: the sampler in numpy, the engine a plain denoiser."""

MOST = 100_000
"""Pictures of one request; more is a slip of the finger, and would be kept in memory until the last is done."""


@dataclass(frozen=True)
class Shot:
    """One picture of a request."""

    index: int
    prompt: str
    negative: str | None
    seed: int
    source: Image.Image | None
    """Picture to start from, upright RGB, not yet resized."""
    mask: Image.Image | None
    """White where it is painted anew, not yet resized."""


@dataclass(frozen=True)
class Request:
    """What was asked, with nothing left open."""

    prompts: tuple[str, ...]
    negatives: tuple[str | None, ...]
    """One a prompt, None where nobody gave any; not used where guidance is 1 or less."""
    count: int
    """Pictures a prompt."""
    seed: int
    steps: int
    guidance: float
    branch_guidance: float
    """Scale of the guidance branches: `guidance` itself, or another where the model embeds that; 1 or less: none."""
    rescale: float
    """Share of the guidance rescale, 0 to 1."""
    clip_skip: int
    weighted: bool
    """Whether weights and BREAK in prompts mean something, and long ones get more rows."""
    scheduler: str
    height: int
    width: int
    framing: Framing
    batch: int
    """Pictures computed at once, at most."""
    sources: tuple[Image.Image, ...]
    """None, or one a prompt."""
    masks: tuple[Image.Image, ...]
    """None, or one a prompt."""
    strength: float | None
    start: int | None
    """Steps skipped in image-to-image; None: pure noise."""
    loop: LoopKind

    @property
    def branches(self) -> int:
        """G: 2 with a negative prompt, 1 where guidance is off, which is 1 or less as in diffusers."""
        return 2 if self.branch_guidance > 1 else 1

    @property
    def weights(self) -> tuple[float, ...]:
        """Of the branches; the negative prompt's comes first."""
        return (1 - self.branch_guidance, self.branch_guidance) if self.branches == 2 else (1.0,)

    @property
    def wish(self) -> Wish:
        """What a family makes conditions of, beside prompts."""
        return Wish(self.height, self.width, self.guidance, self.branches, self.framing)

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
                mask=self.masks[prompt] if self.masks else None,
            )
            for prompt in range(len(self.prompts))
            for copy in range(self.count)
        )


def make_request(
    manifest: BundleManifest,
    prompts: str | Sequence[str],
    *,
    negative: str | Sequence[str] | None = None,
    steps: int = 20,
    guidance: float | None = None,
    true_guidance: float | None = None,
    rescale: float = 0.0,
    clip_skip: int = 0,
    weighted: bool = False,
    seed: int | None = 0,
    count: int = 1,
    height: int | None = None,
    width: int | None = None,
    original_size: Sequence[int] | None = None,
    crop: Sequence[int] | None = None,
    target_size: Sequence[int] | None = None,
    scheduler: str | None = None,
    image: Source | Sequence[Source] | None = None,
    mask: Source | Sequence[Source] | None = None,
    strength: float | None = None,
    batch: int | None = None,
    loop: LoopKind = "device",
) -> Request:
    """Fill in what was left open and refuse what cannot be meant. Raises UsageError and ProfileError."""
    texts = check.texts(prompts)
    number = check.whole("count", count, least=1)
    if len(texts) * number > MOST:
        raise UsageError(f"{len(texts) * number} pictures are more than {MOST}", hint="make several requests")
    sources = check.sources(image, len(texts), manifest)
    masks = check.masks(mask, sources, manifest)
    if strength is not None and not sources:
        raise UsageError("strength is for image-to-image, and no image was given", hint="give an image to start from")
    if sources:
        usual = manifest.facts.strengths[bool(masks)]
        strength = check.real("strength", usual if strength is None else strength)
    step_count = check.whole("steps", steps, least=1)
    rows, columns = check.size(manifest, height, width, sources)
    unlike = check.negatives(manifest, negative, len(texts))
    scale, branch_scale = check.guidance_of(manifest, guidance, true_guidance, unlike)
    if loop not in get_args(LoopKind):
        raise UsageError(f"no loop is called {loop!r}", hint=f"known: {', '.join(get_args(LoopKind))}")
    return Request(
        prompts=texts,
        negatives=unlike,
        count=number,
        seed=check.seed(seed, len(texts) * number),
        steps=step_count,
        guidance=scale,
        branch_guidance=branch_scale,
        rescale=check.fraction("rescale", rescale),
        clip_skip=check.skipped(manifest, clip_skip),
        weighted=check.weighted(manifest, weighted),
        scheduler=check.scheduler(manifest, scheduler),
        height=rows,
        width=columns,
        framing=Framing(
            original=check.pair(manifest, "original_size", original_size, (rows, columns), least=1),
            crop=check.pair(manifest, "crop", crop, (0, 0), least=0),
            target=check.pair(manifest, "target_size", target_size, (rows, columns), least=1),
        ),
        batch=check.batch(manifest, batch),
        sources=sources,
        masks=masks,
        strength=strength,
        start=_start(step_count, strength, manifest.facts.skips, masked=bool(masks)),
        loop=loop,
    )


def _start(steps: int, strength: float | None, skips: Literal["more", "fewer"], *, masked: bool) -> int | None:
    """Give the steps that are skipped. diffusers' inpainting takes strength 1 for pure noise, without the picture."""
    if strength is None or (masked and strength == 1):
        return None
    return start_of_strength(steps, strength, skips)
