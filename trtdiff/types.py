"""The small values that everything else is written in: tensors, symbolic dimensions, shape profiles, tolerances."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Self, TypeAlias

import numpy.typing as npt

from trtdiff.errors import ProfileError, UsageError

Array: TypeAlias = npt.NDArray[Any]
Dim: TypeAlias = int | str
Point: TypeAlias = Literal["min", "opt", "max"]

_DIM = re.compile(r"(?P<name>[a-z_]+)(?:/(?P<divisor>[1-9]\d*))?")


def dim_value(dim: Dim, sizes: Mapping[str, int], *, where: str = "") -> int:
    """Give the number that a dimension stands for: `4`, `"batch"`, or `"height/8"` (exactly divisible)."""
    if isinstance(dim, int):
        return dim
    match = _DIM.fullmatch(dim)
    if match is None:
        raise UsageError(f"{dim!r} is not a dimension", where=where, hint="write 4, 'batch' or 'height/8'")
    name, divisor = match["name"], int(match["divisor"] or 1)
    if name not in sizes:
        raise UsageError(f"no size given for dimension {name!r}", where=where, hint=f"known: {', '.join(sizes)}")
    value, rest = divmod(sizes[name], divisor)
    if rest:
        raise ProfileError(f"{name} {sizes[name]} is not a multiple of {divisor}", where=where,
                           hint=f"nearest: {value * divisor} or {(value + 1) * divisor}")  # fmt: skip
    return value


@dataclass(frozen=True)
class TensorSpec:
    """Name, element type (numpy's word, or `bfloat16`) and dimensions of one tensor; symbolic ones by name.

    A dimension is a number, a name (`"batch"`) or a name over a divisor (`"height/8"`: latent rows of an image height).
    """

    name: str
    dtype: str
    dims: tuple[Dim, ...]

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the symbolic dimensions, in order, each once."""
        return tuple(dict.fromkeys(dim.partition("/")[0] for dim in self.dims if isinstance(dim, str)))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of this tensor where the symbolic dimensions have these sizes."""
        return tuple(dim_value(dim, sizes, where=f"tensor {self.name}") for dim in self.dims)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class DimRange:
    """Sizes a dimension may take; the compiler tunes for `opt`."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 0 < self.min <= self.opt <= self.max:
            raise UsageError(f"a range needs 0 < min ≤ opt ≤ max, not {self}",
                             hint="write it as min:opt:max, for example 1:1:4")  # fmt: skip

    @classmethod
    def parse(cls, text: str, *, where: str = "") -> Self:
        """Read `512` (fixed) or `256:512:1024`."""
        try:
            numbers = [int(part) for part in text.split(":")]
        except ValueError:
            numbers = []
        if len(numbers) not in {1, 3}:
            raise UsageError(f"{text!r} is not a range", where=where, hint="write 512 or 256:512:1024 (min:opt:max)")
        try:
            return cls(numbers[0], numbers[len(numbers) // 2], numbers[-1])
        except UsageError as error:
            raise UsageError(error.message, where=where, hint=error.hint) from None

    def __contains__(self, size: int) -> bool:
        return self.min <= size <= self.max

    def __str__(self) -> str:
        return str(self.opt) if self.min == self.max else f"{self.min}:{self.opt}:{self.max}"


@dataclass(frozen=True)
class ShapeProfile:
    """The range of every symbolic dimension, in the user's units: images in a batch, pixels, tokens."""

    dims: Mapping[str, DimRange]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `batch=1:1:4,height=256:512:1024`."""
        dims = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, equals, span = (piece.strip() for piece in item.partition("="))
            if not equals or not name:
                raise UsageError(f"{item!r} is not a profile entry", where="--profile", hint="write batch=1:1:4")
            if name in dims:
                raise UsageError(f"{name} is given twice", where="--profile")
            dims[name] = DimRange.parse(span, where=f"--profile {name}")
        return cls(dims)

    def merged(self, other: "ShapeProfile") -> "ShapeProfile":
        """Let `other` replace some ranges; a dimension that this profile does not know is an error."""
        if unknown := sorted(set(other.dims) - set(self.dims)):
            raise UsageError(f"no dimension is called {', '.join(unknown)}", where="--profile",
                             hint=f"known: {', '.join(self.dims)}")  # fmt: skip
        return ShapeProfile({**self.dims, **other.dims})

    def sizes(self, point: Point) -> dict[str, int]:
        """Give every dimension's size at one point of the profile."""
        return {name: getattr(span, point) for name, span in self.dims.items()}

    def check(self, sizes: Mapping[str, int]) -> None:
        """Refuse sizes outside the profile, saying what was asked, what there is, and what is nearest."""
        for name, size in sizes.items():
            span = self.dims.get(name)
            if span is not None and size not in span:
                raise ProfileError(
                    f"{name} {size} was asked, the engines take {span.min} to {span.max}",
                    where=f"profile {self}",
                    hint=f"nearest: {min(max(size, span.min), span.max)}"
                    + (
                        f"; or build with --profile {name}={min(span.min, size)}:{span.opt}:{max(span.max, size)}"
                        if size > 0
                        else ""
                    ),
                )

    def __str__(self) -> str:
        return ",".join(f"{name}={span}" for name, span in self.dims.items())


@dataclass(frozen=True)
class Tolerance:
    """How far results may be from their reference. There are no defaults: whoever compares states every bound.

    Bounds are relative L2, ‖got - expected‖₂ / ‖expected‖₂, but for `levels`.
    """

    components: Mapping[str, float]
    """Pattern of component names → bound for each of its outputs; the first that matches holds."""
    latents: float
    """After any step of a whole run."""
    levels: float
    """Largest difference of 8-bit image values."""

    def __post_init__(self) -> None:
        relative = {**{f"components.{name}": bound for name, bound in self.components.items()}, "latents": self.latents}
        wrong = {name: bound for name, bound in relative.items() if not 0 <= bound < 1}
        if not 0 <= self.levels <= 255:
            wrong["levels"] = self.levels
        for name, bound in wrong.items():
            raise UsageError(f"{bound} is no tolerance", where=f"tolerance.{name}",
                             hint="relative ones are from 0 to less than 1, levels from 0 to 255")  # fmt: skip

    def component(self, name: str) -> float:
        """Give the bound of a component. Raises UsageError where none is stated."""
        for pattern, bound in self.components.items():
            if fnmatchcase(name, pattern):
                return bound
        raise UsageError(f"no tolerance is stated for {name}", where=f"tolerances of {', '.join(self.components)}",
                         hint="state one in the precision's recipe")  # fmt: skip


def names(items: Iterable[str], limit: int = 8) -> str:
    """List a few names for a message, and how many were left out."""
    listed = list(items)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
