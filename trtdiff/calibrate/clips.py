"""Which clip a tensor gets, from what a calibration saw of it.

max           its largest magnitude: nothing is clipped
mse           the clip tried whose rounding lost least, by the sum of squared errors
percentile    the least edge of the grid beyond which lies no larger a share of elements than was allowed
"""

from collections.abc import Mapping

from trtdiff.calibrate.cache import Statistics
from trtdiff.errors import ArtefactError
from trtdiff.passes.eight_bits import GRID, EightBits, grid_index
from trtdiff.recipes.quantization import Method

PERCENTILE = 99.99
"""Of elements, in percent, that lie within the clip, where nobody says otherwise."""
_BELOW: Mapping[EightBits, int] = {"int8": 4, "float8": 0}
_ABOVE: Mapping[EightBits, int] = {"int8": 0, "float8": 3}
"""Steps of the grid that are tried below and above the largest magnitude.

int8's steps are as wide as the clip says, so that a lower clip pays where few elements are large. Those of float8 grow
with the number: a clip twice as high loses only numbers that are nearly 0, so clipping hardly pays, and what matters is
where the numbers fall within a binade: four phases of an octave.
"""
EDGES = 16
"""Edges at which elements are counted: from the largest magnitude down to a sixteenth of it."""


def tried_clips(statistics: Statistics, name: EightBits) -> tuple[int, ...]:
    """Give the indexes of clips to try for a tensor, by its largest magnitude; none where it is always 0."""
    top = _top(statistics)
    return () if top is None else tuple(range(top - _BELOW[name], top + _ABOVE[name] + 1))


def counted_edges(statistics: Statistics) -> tuple[int, ...]:
    """Give the indexes of edges to count at; none where the tensor is always 0."""
    top = _top(statistics)
    return () if top is None else tuple(range(top - EDGES, top + 1))


def _top(statistics: Statistics) -> int | None:
    largest = max(statistics.amax, default=0.0)
    return grid_index(largest) if largest > 0 else None


def clip_of(statistics: Statistics, name: EightBits, method: Method, percentile: float = PERCENTILE) -> float:
    """Choose the clip of a tensor: its largest number of 8 bits stands for this magnitude. 0: it is always 0.

    One that something else chose is taken whatever the method.
    Raises ArtefactError where the calibration did not measure what the method needs.
    """
    largest = max(statistics.amax, default=0.0)
    if method == "max" or largest == 0 or statistics.imported:
        return largest
    if method == "mse":
        errors = statistics.errors.get(name)
        if not errors:
            raise _lacks(f"the error of rounding to {name}", f"--method mse --precision {_FLAGS[name]}")
        clip = float(GRID ** min(errors, key=lambda index: (errors[index], index)))
        return min(clip, largest) if name == "int8" else clip  # the grid's clip above what was seen only widens steps
    if not statistics.beyond:
        raise _lacks("counts of elements by magnitude", "--method percentile")
    allowed = (1 - percentile / 100) * sum(statistics.elements)
    fitting = [index for index, count in statistics.beyond.items() if count <= allowed]
    return min(largest, float(GRID ** min(fitting))) if fitting else largest


_FLAGS: Mapping[EightBits, str] = {"int8": "int8", "float8": "fp8"}
"""Type → the word after `--precision`."""


def _lacks(what: str, options: str) -> ArtefactError:
    return ArtefactError(f"the calibration did not measure {what}", where="calibration cache",
                         hint=f"add it: trtdiff calibrate --resume {options}")  # fmt: skip
