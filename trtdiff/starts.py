"""What pictures begin with: noises from their own streams, latents of the pictures that they start from, masks.

Draws come in the order in which diffusers draws them, from each picture's own stream: the latent of its source, the
first noise, and for inpainting the latent of the source without what is painted anew, which a model of four channels
never sees.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from trtdiff.backends.blame import first_non_finite
from trtdiff.engines import Engines
from trtdiff.families.base import LatentFacts
from trtdiff.families.unet import MASK, MASKED
from trtdiff.images import to_array
from trtdiff.loop import Start, check_finite
from trtdiff.masks import mask_latent, mask_pixels, masked_image
from trtdiff.noise import TorchStream
from trtdiff.request import Request, Shot
from trtdiff.types import Array

Posterior = tuple[Array, Array]
"""Mean and deviation of a latent, each [1, C, h, w]."""


@dataclass(frozen=True)
class Started:
    """The beginning of a batch."""

    start: Start
    channels: Mapping[str, Array] = field(default_factory=dict)
    """Mask [B, 1, h, w] and masked latent [B, C, h, w], for denoisers that take them as channels."""


@dataclass(frozen=True)
class HalfDone:
    """Pictures that one model has begun and another one finishes."""

    latents: Array  # [N, C, h, w] float32, with noise in them
    at: float
    """Fraction of the way that is done."""
    request: Request
    """What was asked of the model that began them."""
    space: LatentFacts
    """Of that model."""
    by: Mapping[str, Any]
    """Who began them: bundle, scheduler, steps, guidance and seconds, for the receipt."""


class Sources:
    """Encodes a request's pictures, each once, and draws noises."""

    def __init__(
        self, engines: Engines, request: Request, stage: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._engines, self._request, self._stage = engines, request, stage
        facts = engines.manifest.facts
        self._by_channels = "inpaint-channels" in facts.modes
        latent = facts.latent
        self._rows, self._columns = request.height // latent.downscale, request.width // latent.downscale
        self._shape = (1, latent.channels, self._rows, self._columns)
        self._known: dict[tuple[int, int], Posterior] = {}

    def start(self, shots: Sequence[Shot], half_done: HalfDone | None = None) -> Started:
        """Draw what a batch begins with; what another model began needs no draw."""
        if half_done is not None:
            latents = half_done.latents[[shot.index for shot in shots]]
            return Started(Start(np.zeros_like(latents), latents, [TorchStream(shot.seed) for shot in shots]))
        streams = [TorchStream(shot.seed) for shot in shots]
        needs_clean = self._request.start is not None or not self._by_channels
        posteriors = [self._encoded(shot) if needs_clean else None for shot in shots]
        masked = [self._encoded(shot, masked=True) if self._by_channels else None for shot in shots]
        cleans, noises, hidden = [], [], []
        with self._stage("noise"):
            for stream, posterior, behind, shot in zip(streams, posteriors, masked, shots, strict=True):
                if posterior is not None:
                    cleans.append(self._drawn(stream, posterior))
                noises.append(stream.randn(self._shape))
                if behind is not None:
                    hidden.append(self._drawn(stream, behind))
                elif shot.mask is not None:
                    stream.randn(self._shape)
        masks = np.stack([self._mask(shot) for shot in shots]) if shots[0].mask is not None else None
        start = Start(
            np.concatenate(noises),
            np.concatenate(cleans) if cleans else None,
            streams,
            None if self._by_channels else masks,
        )
        if masks is None or not self._by_channels:
            return Started(start)
        return Started(start, {MASK: masks, MASKED: np.concatenate(hidden)})

    def _drawn(self, stream: TorchStream, posterior: Posterior) -> Array:
        mean, std = posterior
        drawn: Array = mean + std * stream.randn(self._shape)
        return drawn

    def _mask(self, shot: Shot) -> Array:  # [1, h, w]
        assert shot.mask is not None, "a request has a mask for every prompt or for none"  # noqa: S101
        pixels = mask_pixels(shot.mask, self._request.height, self._request.width)
        return mask_latent(pixels, self._rows, self._columns)

    def _encoded(self, shot: Shot, *, masked: bool = False) -> Posterior | None:
        """Encode a source, whole or without what is painted anew."""
        if shot.source is None:
            return None
        key = (id(shot.source), id(shot.mask) if masked else 0)
        if key not in self._known:
            self._known[key] = self._encode(shot.source, shot.mask if masked else None)
        return self._known[key]

    def _encode(self, source: Image.Image, mask: Image.Image | None) -> Posterior:
        height, width = self._request.height, self._request.width
        session = self._engines.session("vae_encoder")
        with self._stage("vae_encoder"):
            pixels = to_array(source, height, width)
            if mask is not None:
                pixels = masked_image(pixels, mask_pixels(mask, height, width))
            feeds = {"image": np.repeat(pixels[None], self._engines.least_batch, axis=0)}
            out = session.run(feeds)
        found = (out["mean"][:1], out["std"][:1])
        for values in found:
            check_finite(values, "the latent of the image to start from", lambda: first_non_finite(session, feeds))
        return found
