"""Calibration of one graph on inputs that are given: the passes, without the loop around them."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trtdiff.calibrate.cache import NOISE, Component
from trtdiff.calibrate.calibration import measurement_of
from trtdiff.calibrate.measurements import finished
from trtdiff.calibrate.opened import Opened
from trtdiff.calibrate.settings import passes_of
from trtdiff.passes.eight_bits import EightBits
from trtdiff.recipes.quantization import Method
from trtdiff.types import Array

Feeds = Sequence[tuple[int, Mapping[str, Array]]]
"""Timestep band and inputs by name, a sample each."""


def calibrate_feeds(
    graph: Path,
    feeds: Feeds,
    scratch: Path,
    *,
    method: Method = "mse",
    formats: Sequence[EightBits] = ("int8", "float8"),
    noise: Iterable[int] = (),
    component: str = "denoiser",
) -> Component:
    """Give what the passes of a method see of an exported graph; `noise` lists samples that layers' noise is of.

    `scratch` is a new folder, which is removed. Raises NonFiniteError.
    """
    bands = 1 + max((band for band, _ in feeds), default=0)
    few = [feeds[number] for number in noise]
    seen = Component()
    for kind in passes_of(method, noise=bool(few)):
        given = few if kind == NOISE else feeds
        measurement = measurement_of(kind, seen, bands=bands, formats=formats, method=method)
        session = Opened(component, graph, scratch, measurement, seen)
        try:
            for band, values in given if session.measures else ():
                session.run(values)
                session.count(band)
            seen = session.seen()
        finally:
            session.close()
            shutil.rmtree(scratch, ignore_errors=True)
    return finished(seen)
