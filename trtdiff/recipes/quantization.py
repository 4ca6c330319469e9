"""What a recipe computes in 8 bits, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from trtdiff.errors import UsageError
from trtdiff.passes.eight_bits import EightBits
from trtdiff.passes.layers import Operator

Method: TypeAlias = Literal["max", "mse", "percentile"]
ALPHA = 0.5
"""SmoothQuant's, of int8: the paper's own choice for most networks."""


@dataclass(frozen=True)
class Quantization:
    """Which layers read 8 bits, in which type, and how their scales are chosen."""

    weights: EightBits
    """Type of stored weights, one scale an output channel."""
    activations: EightBits | None
    """Type of what goes into the layers, one scale a tensor; none: only weights are quantized."""
    operators: tuple[Operator, ...] = ("conv", "linear")
    components: tuple[str, ...] = ("denoiser",)
    """Names, or patterns of them, of those that are quantized; all others are of the base type alone."""
    keep: Mapping[str, str] = field(default_factory=dict)
    """Patterns of module paths whose layers stay in the base type → why."""
    least: int = 1
    """Layers whose sums have fewer terms, or which have fewer outputs, stay in the base type."""
    method: Method = "max"
    """How the clip of an activation is chosen: its largest magnitude, least squared error, or a share of elements."""
    percentile: float = 99.99
    """Of elements, in percent, that lie within the clip, for the method `percentile`."""
    smooth: float | None = None
    """SmoothQuant's alpha for linear layers (Xiao et al. 2023, eq. 4): how much goes from activations to weights."""

    def __post_init__(self) -> None:
        if self.activations is None and "attention" in self.operators:
            raise UsageError(
                "attention has no weights: its products cannot be quantized by weights alone",
                where="quantization.operators", hint="leave attention out, or name activations"
            )  # fmt: skip
        if self.activations is not None and self.activations != self.weights:
            raise UsageError(f"weights in {self.weights}, activations in {self.activations}: nothing multiplies those",
                             where="quantization.activations", hint="name one type for both")  # fmt: skip
        if self.activations == "int8" and "attention" in self.operators:
            raise UsageError("attention in int8 has no fused kernel", where="quantization.operators",
                             hint="leave attention out, or compute in float8")  # fmt: skip
        if self.least < 1:
            raise UsageError(f"least is {self.least}", where="quantization.least", hint="1 keeps none back, often 16")
        if not self.operators or not self.components:
            raise UsageError("a quantization of nothing", where="quantization",
                             hint="name operators and components")  # fmt: skip
        if self.smooth is not None and not 0 <= self.smooth <= 1:
            raise UsageError(
                f"alpha is {self.smooth}; it is a share", where="quantization.smooth", hint="0 to 1, often 0.5"
            )
        if not 0 < self.percentile <= 100:
            raise UsageError(f"{self.percentile} is no percentage of elements", where="quantization.percentile",
                             hint="often 99.9 to 99.999")  # fmt: skip

    @property
    def calibrated(self) -> bool:
        """Whether it needs to know how large activations get."""
        return self.activations is not None
