"""Named profiles: what an engine is made for, in one word, in place of numbers."""

from collections.abc import Callable, Mapping

from trtdiff.errors import UsageError
from trtdiff.types import DimRange, ShapeProfile

DEFAULT = "default"


def _fixed(profile: ShapeProfile, **batch: DimRange) -> ShapeProfile:
    """Fix height and width at what they are tuned for."""
    spans = {name: profile.dims[name] for name in ("height", "width")}
    sizes = {name: DimRange(span.opt, span.opt, span.opt) for name, span in spans.items()}
    return ShapeProfile({**profile.dims, **sizes, **batch})


PRESETS: Mapping[str, tuple[str, Callable[[ShapeProfile], ShapeProfile]]] = {
    DEFAULT: ("half to twice the native size, up to 4 images", lambda own: own),
    "native": ("the native size, up to 4 images", lambda own: _fixed(own, batch=own.dims["batch"])),
    "latency": ("one image of the native size", lambda own: _fixed(own, batch=DimRange(1, 1, 1))),
    "throughput": ("the native size, 1 to 16 images, tuned for 8", lambda own: _fixed(own, batch=DimRange(1, 8, 16))),
}
"""Name → what it is for, and how it follows from the family's own profile."""


def resolve(text: str, own: ShapeProfile) -> ShapeProfile:
    """Read `native`, `batch=1:2:8`, or `native,batch=1:2:8`: a preset, then ranges that replace some of its own.

    `own` is the family's profile for this checkpoint. Raises UsageError.
    """
    first, _, rest = text.partition(",")
    preset = first.strip()
    if not preset or "=" in preset:
        preset, rest = DEFAULT, text
    if preset not in PRESETS:
        raise UsageError(
            f"no profile is called {preset!r}", where="--profile",
            hint=f"write {', '.join(PRESETS)}, or ranges such as batch=1:1:4,height=256:512:1024"
        )  # fmt: skip
    return PRESETS[preset][1](own).merged(ShapeProfile.parse(rest))
