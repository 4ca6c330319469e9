"""What linear layers' inputs are divided by, channel by channel, before they are rounded, and weights multiplied by.

Xiao et al. 2023, "SmoothQuant", eq. 4: outliers of a few channels of an activation go into the weights, which have a
scale an output channel, and of which all that multiply one input channel are far from equally large.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from trtdiff.calibrate.cache import Statistics
from trtdiff.errors import ArtefactError
from trtdiff.passes.layer_inputs import measured
from trtdiff.passes.layers import Layer
from trtdiff.passes.weights_in_8_bits import channel_maxima
from trtdiff.types import Array

FARTHEST = 2.0**10
"""How far a factor of smoothing may be from all others' mean: its inverse is a weight that float16 must hold."""


def factors_of(found: Iterable[Layer], statistics: Mapping[str, Statistics], alpha: float) -> dict[str, Array]:
    """Give the factors of every value that goes into linear layers: one vector for all of these that read it.

    Raises ArtefactError for a value whose channels were not calibrated.
    """
    readers: dict[str, list[Array]] = {}
    for layer in found:
        if layer.operator == "linear" and layer.weight is not None:
            readers.setdefault(str(measured(layer, 0).name), []).append(channel_maxima(layer.weight))
    made = {}
    for name, weights in readers.items():
        if name not in statistics or not statistics[name].channels:
            raise ArtefactError(f"the calibration has no channels of {name}", where="calibration cache",
                                hint="calibrate this export again: trtdiff calibrate --force")  # fmt: skip
        made[name] = smoothing_factors(np.array(statistics[name].channels), np.max(weights, axis=0), alpha)
    return made


def smoothed_clip(seen: Statistics, factors: Array) -> float:
    """Give the largest magnitude of a value once it is divided."""
    return float((np.array(seen.channels) / factors).max())


def smoothing_factors(channels: Array, weights: Array, alpha: float) -> Array:  # [in], [in] → [in] float32
    """Give what to divide the channels of an activation by: largest magnitudes ** alpha / weights' ** (1 - alpha).

    SmoothQuant, eq. 4. A channel or weight that is always 0 has the factor 1.
    """
    seen = (channels > 0) & (weights > 0)
    factors = np.ones(len(channels))
    factors[seen] = channels[seen] ** alpha / weights[seen] ** (1 - alpha)
    if seen.any():  # only ratios matter: keep numbers about as large as they are, for the sake of float16
        factors[seen] /= np.exp(np.mean(np.log(factors[seen])))
        factors = np.clip(factors, 1 / FARTHEST, FARTHEST)
    made: Array = factors.astype(np.float32)
    return made
