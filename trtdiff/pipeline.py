"""Run a bundle: a request becomes pictures and a receipt. No torch, no diffusers, no scheduler code.

    with load("engines/digits") as pipeline:
        result = pipeline(["a handwritten seven", "a handwritten two"], steps=20, guidance=4.0, seed=7, count=2)

A picture depends on its own prompt, seed and settings, never on its neighbours: each has its own random stream, every
prompt and source is encoded alone, and a batch that is cut differently gives the same pictures within rounding.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from PIL import Image

from trtdiff.bundle import BundleManifest
from trtdiff.engines import Engines
from trtdiff.errors import UsageError
from trtdiff.execution import Execution, HalfDone, Picture, Progress, finishing_table, warnings_of
from trtdiff.receipt import Receipt
from trtdiff.request import LoopKind, Request, Source, make_request
from trtdiff.request_checks import real
from trtdiff.types import Array

__all__ = ["HalfDone", "Picture", "Pipeline", "Result", "load"]


@dataclass(frozen=True)
class Result:
    """What a request gave."""

    pictures: tuple[Picture, ...]
    receipt: Receipt

    @property
    def images(self) -> list[Image.Image]:
        """The pictures as Pillow images, prompt by prompt."""
        return [picture.image for picture in self.pictures]

    @property
    def latents(self) -> Array:  # [N, C, h, w] float32
        """The latents that were decoded, in the denoiser's space."""
        return np.stack([picture.latent for picture in self.pictures])


def load(path: str | Path, backend: str | None = None, threads: int | None = None) -> "Pipeline":
    """Open a bundle and its engines: those of the best backend that this machine can run, unless one is named.

    Raises ArtefactError for what is not a whole bundle, or whose engines are another version's or device's, UsageError
    for a backend that it has no engines for, MissingDependency for one that is not installed or cannot run here.
    """
    return Pipeline(Engines.open(Path(path), backend, threads))


class Pipeline:
    """A loaded bundle. Calls from several threads wait for each other; load twice to run at once."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._lock = threading.Lock()
        self._closed = False

    @property
    def manifest(self) -> BundleManifest:
        """What the bundle says of itself: sizes, schedulers, precision, where it came from."""
        return self._engines.manifest

    @property
    def backend(self) -> str:
        """The backend whose engines run."""
        return self._engines.backend

    @property
    def precision(self) -> str:
        """The precision of those engines."""
        return self._engines.precision

    def __call__(
        self,
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
        progress: Progress | None = None,
        finished: Callable[[Picture], None] | None = None,
    ) -> Result:
        """Make `count` pictures of every prompt.

        Picture i, counted prompt by prompt, has seed `seed + i`; None draws a seed. `guidance` of 1 or less leaves the
        negative prompt out, as diffusers does. `image` starts from a picture (or one a prompt), which is changed the
        more the nearer `strength` is to 1; with a `mask`, only where that is white. `rescale` is the share of the
        guidance rescale; `true_guidance` weighs the negative prompt of models that embed `guidance`. `clip_skip` leaves
        out so many of CLIP's last layers for the prompts; `weighted` reads `(word:1.3)` and BREAK in prompts, and gives
        long ones as many rows as they need. `original_size`, `crop` (top, left) and `target_size` are what SDXL is told
        of its picture. `batch` bounds how many are computed at once. `loop="host"` computes the sampler in numpy.
        `finished` is given every picture as soon as its batch is done.

        Raises UsageError or ProfileError before anything runs, NonFiniteError where a network overflows.
        """
        request = make_request(
            self.manifest, prompts, negative=negative, steps=steps, guidance=guidance, true_guidance=true_guidance,
            rescale=rescale, clip_skip=clip_skip, weighted=weighted, seed=seed, count=count, height=height, width=width,
            original_size=original_size, crop=crop, target_size=target_size, scheduler=scheduler, image=image,
            mask=mask, strength=strength, batch=batch, loop=loop,
        )  # fmt: skip
        return self.run(request, progress=progress, finished=finished)

    def run(
        self,
        request: Request,
        *,
        half_done: HalfDone | None = None,
        progress: Progress | None = None,
        finished: Callable[[Picture], None] | None = None,
    ) -> Result:
        """Run what `make_request` made for this bundle; `half_done` is what another model left to finish."""
        with self._lock:
            execution = Execution(self._open(), request, progress, half_done=half_done)
            pictures = []
            for picture in execution.pictures():
                pictures.append(picture)
                if finished is not None:
                    finished(picture)
            return Result(tuple(pictures), execution.receipt(pictures))

    def begin(self, request: Request, at: float, *, progress: Progress | None = None) -> HalfDone:
        """Run the first part of the way, up to the fraction `at`, and give latents that another model goes on with.

        As `denoising_end` of diffusers' SDXL pipelines. Pass what it gives to the refiner's `run`.
        """
        fraction = real("at", at)
        if request.masks:
            raise UsageError("what a mask keeps would get noise again from the model that finishes",
                             hint="leave the mask out, or make the pictures with one model")  # fmt: skip
        with self._lock:
            return Execution(self._open(), request, progress, until=fraction).half_done()

    def check_finish(self, request: Request, base: "Pipeline", begun: Request, at: float) -> None:
        """Raise UsageError where `run(request, half_done=base.begin(begun, at))` would: before anything runs."""
        finishing_table(self._open(), request, begun, base.manifest.facts.latent, real("at", at))

    def _open(self) -> Engines:
        if self._closed:
            raise UsageError("the pipeline is closed", hint="load the bundle again")
        return self._engines

    def warnings(self, request: Request) -> tuple[str, ...]:
        """Say what of a request will not be followed as meant: words that prompts lose. The receipt has it too."""
        return warnings_of(self._engines, request)

    def close(self) -> None:
        """Free the engines and buffers. Closing twice is fine."""
        with self._lock:
            self._closed = True
            self._engines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
