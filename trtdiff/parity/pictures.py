"""Whole runs: the compiled loop against the diffusers pipeline itself, from the same seeds, step by step."""

import math
from collections.abc import Iterator

import numpy as np
from PIL import Image

from trtdiff.engines import Engines
from trtdiff.errors import NonFiniteError
from trtdiff.execution import Execution
from trtdiff.parity.compare import ParityResult, compare_pictures, compare_trajectories
from trtdiff.parity.reference import PictureRequest, Pictures, Reference
from trtdiff.request import Request, make_request
from trtdiff.types import Array, Tolerance


def check_pictures(
    engines: Engines,
    reference: Reference,
    request: PictureRequest,
    tolerance: Tolerance,
    image: Image.Image | None = None,
) -> Iterator[ParityResult]:
    """Compare the latents after every step and the 8-bit pictures; with an image, of image-to-image.

    Engines that give a value that is not finite fail both comparisons, and the results say in which layer it began.
    """
    kind = "text to image" if image is None else "image to image"
    at = f"{len(request.prompts)} of {request.height}x{request.width}"
    latents, picture = f"{kind}.latents", f"{kind}.picture"
    try:
        ours = compiled_pictures(engines, request, image)
    except NonFiniteError as error:
        problem = "; ".join(filter(None, (error.message, error.where)))
        yield ParityResult(latents, at, "relative L2", math.inf, tolerance.latents, "", problem)
        yield ParityResult(picture, at, "levels", math.inf, tolerance.levels, "", problem)
        return
    theirs = reference.pictures(request, image)
    yield compare_trajectories(latents, at, ours.latents, theirs.latents, tolerance.latents)
    yield compare_pictures(picture, at, ours.pixels, theirs.pixels, tolerance.levels)


def compiled_pictures(engines: Engines, request: PictureRequest, image: Image.Image | None = None) -> Pictures:
    """Run the request on the engines, and keep what diffusers' callback shows: the latent after every step."""
    seen: list[Array] = []
    asked = compiled_request(engines, request, image)
    execution = Execution(engines, asked, watcher=lambda latent: seen.append(latent.copy()))
    pictures = list(execution.pictures())
    pixels = np.stack([np.asarray(picture.image) for picture in pictures])
    calls = len(seen) // execution.batches
    latents = [np.concatenate(seen[call::calls])[: len(pictures)] for call in range(1, calls)]  # x_0 is the start
    latents.append(np.stack([picture.latent for picture in pictures]))
    return Pictures(np.stack(latents), pixels)


def compiled_request(engines: Engines, request: PictureRequest, image: Image.Image | None = None) -> Request:
    """Say in the runtime's words what is asked of both sides. Raises UsageError where it cannot be meant."""
    return make_request(
        engines.manifest,
        list(request.prompts),
        negative=[request.negative] * len(request.prompts),
        steps=request.steps,
        guidance=request.guidance,
        seed=request.seed,
        height=request.height,
        width=request.width,
        scheduler=request.scheduler,
        image=image,
        strength=None if image is None else request.strength,
    )
