"""Compare a result with its reference: how far apart, where worst, and whether that is within the tolerance.

Comparing nothing is a failure: empty arrays, different shapes, NaN or infinity never pass.
"""

import math
from dataclasses import dataclass

import numpy as np

from trtdiff.types import Array


@dataclass(frozen=True)
class ParityResult:
    """One comparison. `needed` is the tolerance that would have passed; infinite where none would."""

    name: str
    """What was compared: `denoiser.prediction`, `trajectory`, `picture`."""
    at: str
    """The shape or request it was compared at."""
    metric: str
    """`relative L2`, or `levels` (largest difference of 8-bit values)."""
    needed: float
    tolerance: float
    worst: str
    """Where the difference is largest."""
    problem: str = ""
    """Why nothing could be compared: a shape, an emptiness, a NaN."""

    @property
    def passed(self) -> bool:
        """Within the tolerance, and something was compared."""
        return not self.problem and self.needed <= self.tolerance


def relative_l2(got: Array, expected: Array) -> float:
    """‖got - expected‖₂ / ‖expected‖₂ in float64; of a reference that is zero, whether the result is too."""
    difference = float(np.linalg.norm(got.astype(np.float64).ravel() - expected.astype(np.float64).ravel()))
    scale = float(np.linalg.norm(expected.astype(np.float64).ravel()))
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / scale


def compare_tensors(name: str, at: str, got: Array, expected: Array, tolerance: float) -> ParityResult:
    """Compare in relative L2, image by image: the number is that of the worst image (first axis) of the batch."""
    metric = "relative L2"
    if problem := _incomparable(got, expected):
        return ParityResult(name, at, metric, math.inf, tolerance, "", problem)
    errors = [relative_l2(g, e) for g, e in zip(got, expected, strict=True)]
    image = int(np.argmax(errors))
    place = np.unravel_index(int(np.argmax(np.abs(got[image] - expected[image]))), got[image].shape)
    return ParityResult(name, at, metric, errors[image], tolerance, f"image {image}, element {list(map(int, place))}")


def compare_trajectories(name: str, at: str, got: Array, expected: Array, tolerance: float) -> ParityResult:
    """Compare latents [steps, B, …] step by step: the number is that of the worst image at the worst step."""
    metric = "relative L2"
    if problem := _incomparable(got, expected):
        return ParityResult(name, at, metric, math.inf, tolerance, "", problem)
    errors = np.array(
        [[relative_l2(g, e) for g, e in zip(*pair, strict=True)] for pair in zip(got, expected, strict=True)]
    )
    step, image = (int(i) for i in np.unravel_index(int(np.argmax(errors)), errors.shape))
    return ParityResult(
        name, at, metric, float(errors[step, image]), tolerance, f"step {step + 1} of {len(got)}, image {image}"
    )


def compare_pictures(name: str, at: str, got: Array, expected: Array, tolerance: float) -> ParityResult:
    """Compare 8-bit pictures [B, H, W, 3] in levels: the largest difference of any channel of any pixel."""
    metric = "levels"
    if problem := _incomparable(got, expected):
        return ParityResult(name, at, metric, math.inf, tolerance, "", problem)
    difference = np.abs(got.astype(np.int16) - expected.astype(np.int16))
    image, row, column, _ = (int(i) for i in np.unravel_index(int(np.argmax(difference)), difference.shape))
    off = float(np.mean(difference > 0))
    worst = f"picture {image}, row {row}, column {column}; {off:.1%} of the values differ" if off else ""
    return ParityResult(name, at, metric, float(difference.max()), tolerance, worst)


def _incomparable(got: Array, expected: Array) -> str:
    """Why two arrays cannot be compared; empty where they can."""
    if got.shape != expected.shape:
        return f"shape {list(got.shape)}, the reference has {list(expected.shape)}"
    if got.size == 0:
        return "nothing to compare: the arrays are empty"
    for who, array in (("the result", got), ("the reference", expected)):
        bad = ~np.isfinite(array)
        if bad.any():
            place = list(map(int, np.argwhere(bad)[0]))
            return f"{who} has {int(bad.sum())} values that are not finite, the first at {place}"
    return ""
