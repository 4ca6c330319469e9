"""The real denoising loop over the graphs of an export, which can be replayed: for scans and calibrations.

Every execution is of one row (one image, one guidance branch), so that activations take as little memory as they can.
The sampler and guidance are computed on the host: the graphs are the exported ones, whose values have the names that
later passes know. What networks gave is kept in a `Recording`; where it is known, only samples are executed.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from trtdiff.calibrate.opened import Opened
from trtdiff.calibrate.recording import Recording
from trtdiff.calibrate.settings import ScanSettings
from trtdiff.errors import MissingDependency
from trtdiff.export.manifest import ExportManifest
from trtdiff.families import family
from trtdiff.families.base import Framing, Reading, Wish
from trtdiff.families.unet import MASK, MASKED
from trtdiff.images import to_array, to_images
from trtdiff.loop import Start
from trtdiff.noise import TorchStream
from trtdiff.sampler import SamplerTable, run_loop
from trtdiff.sampler_book import SamplerBook
from trtdiff.tokens import Tokenizer
from trtdiff.types import Array

SCHEDULER = "default"
VAE = ("vae_decoder", "vae_encoder")
LATE = ("denoiser", *VAE)
"""Components that are not text encoders."""

Wanted = Callable[[int, int], int | None]
"""Says of picture and call which band it is a sample of, if it is to be counted."""


def compile_table(
    manifest: ExportManifest, steps: int, scratch: Path, size: tuple[int, int] | None = None
) -> SamplerTable:
    """Compile the checkpoint's own scheduler, for this number of steps and this size [height, width] alone."""
    try:
        from trtdiff.export import schedulers
    except ImportError as error:
        raise MissingDependency(f"scanning ranges needs {error.name}", hint="pip install 'trtdiff[compile]'") from None
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / "samplers.safetensors"
    try:
        kind, facts = family(manifest.family), manifest.facts
        tokens = facts.image_tokens(*(size or (facts.latent.height, facts.latent.width)))
        call = kind.schedule_call(manifest.checkpoint.pipeline, tokens)
        schedulers.compile_samplers(
            manifest.scheduler, [SCHEDULER], path=path, call=call, choices=kind.schedulers(), steps=[steps]
        )
        return SamplerBook.open(path).table(SCHEDULER, steps)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class Loop:
    """Pictures from prompts, on sessions that are handed in stage by stage."""

    def __init__(
        self,
        export: Path,
        manifest: ExportManifest,
        settings: ScanSettings,
        table: SamplerTable,
        *,
        pictures: Sequence[str],
        recording: Recording,
    ) -> None:
        """`pictures` are their prompts; picture i has seed `settings.seed + i`."""
        self._export, self._manifest, self._settings = export, manifest, settings
        self._table, self._recording = table, recording
        self._family = family(manifest.family)
        self.pictures = tuple(pictures)
        self.texts = tuple(dict.fromkeys([*pictures, *[settings.negative] * (settings.branches - 1)]))
        """Every text once; the negative one last, unless it is a prompt too."""

    def encode_texts(self, sessions: Mapping[str, Opened], wanted: Callable[[int], bool]) -> None:
        """Encode every text; `wanted` says which of them are counted."""
        kind, facts = self._family, self._manifest.facts
        files = self._manifest.tokenizers
        tokenizers = {name: Tokenizer.open(self._export / files[name], facts.tokens[name]) for name in facts.tokens}
        for number, text in enumerate(self.texts):
            name, context = f"text-{number}", f"prompt {text!r}"
            self._once(name, list(sessions.values()), 0 if wanted(number) else None, context,
                       lambda text=text: kind.encode([text], Reading(facts, tokenizers, sessions)))  # type: ignore[misc] # fmt: skip

    def denoise(self, denoiser: Opened, wanted: Wanted, *, few: bool = False) -> None:
        """Run the loop of every picture; keep its last latent, and count the samples that are wanted.

        With `few`, a step whose prediction is known is executed for the prompt's guidance branch alone.
        """
        latent = self._manifest.facts.latent
        size = (self._settings.height, self._settings.width)
        shape = (1, latent.channels, *(side // latent.downscale for side in size))
        for picture in range(len(self.pictures)):
            if self._recording.has(f"latent-{picture}") and not any(
                wanted(picture, call) is not None for call in range(self._table.calls)
            ):
                continue
            branches = list(self._branches(picture))
            stream = TorchStream(self._settings.seed + picture)
            start = Start(stream.randn(shape), None, [stream])

            def predict(sample: Array, timestep: float, call: int, picture: int = picture) -> Array:
                name = f"prediction-{picture}-{call}"
                last = few and self._recording.has(name)

                def execute() -> dict[str, Array]:
                    made = np.zeros_like(sample)
                    for label, weight, condition in branches[-1:] if last else branches:  # noqa: B023 - called at once
                        denoiser.context = self._words(picture, call, timestep, label)
                        feeds = {"sample": sample, "timestep": np.full(1, timestep, np.float32), **condition}
                        made += weight * denoiser.run(feeds)["prediction"]
                    return {"prediction": made}

                return self._once(name, [denoiser], wanted(picture, call), "", execute)["prediction"]

            result = run_loop(self._table, predict, start.noise, draw=start.draw)
            self._recording.put(f"latent-{picture}", {"latent": result})

    def decode(self, decoder: Opened, wanted: Callable[[int], bool]) -> None:
        """Decode every picture; what is kept is the picture as image to image gets it: 8 bits a channel."""
        for picture in range(len(self.pictures)):

            def execute(picture: int = picture) -> dict[str, Array]:
                image = decoder.run({"latent": self._kept(f"latent-{picture}")["latent"]})["image"]
                return {"image": np.asarray(to_images(image)[0])}

            self._once(f"image-{picture}", [decoder], 0 if wanted(picture) else None, self._picture(picture), execute)

    def encode_images(self, encoder: Opened, wanted: Callable[[int], bool]) -> None:
        """Encode the pictures that are wanted."""
        from PIL import Image

        for picture in range(len(self.pictures)):
            if wanted(picture):
                image = Image.fromarray(self._kept(f"image-{picture}")["image"])
                encoder.context = self._picture(picture)
                encoder.run({"image": to_array(image, image.height, image.width)[None]})
                encoder.count()

    def recorded(self, component: str) -> bool:
        """Whether all is on record that later stages need of a component."""
        if component == "vae_encoder":
            return True
        kind = {"denoiser": "latent", "vae_decoder": "image"}.get(component, "text")
        return all(self._recording.has(f"{kind}-{number}") for number in range(len(self._of(component))))

    # --- helpers

    def _of(self, component: str) -> tuple[str, ...]:
        return self.pictures if component in LATE else self.texts

    def _once(
        self,
        name: str,
        sessions: Sequence[Opened],
        band: int | None,
        context: str,
        execute: Callable[[], Mapping[str, Array]],
    ) -> Mapping[str, Array]:
        """Execute where it is to be counted or not yet known; give what is known from the first time."""
        known = self._recording.get(name)
        if band is None and known is not None:
            return known
        for session in sessions:
            session.discard()
            session.context = context
        made = execute()
        if known is None:
            self._recording.put(name, made)
        for session in sessions:
            if band is None:
                session.discard()
            else:
                session.count(band)
        return made if known is None else known

    def _kept(self, name: str) -> dict[str, Array]:
        found = self._recording.get(name)
        assert found is not None, f"{name} was recorded by an earlier stage"  # noqa: S101 - an invariant
        return found

    def _branches(self, picture: int) -> Iterator[tuple[str, np.float32, dict[str, Array]]]:
        """Give the guidance branches of a picture: words, weight and conditions."""
        own = self._kept(f"text-{self.texts.index(self.pictures[picture])}")
        settings, facts = self._settings, self._manifest.facts
        size = (settings.height, settings.width)
        framing = Framing(original=size, crop=(0, 0), target=size)
        wish = Wish(*size, settings.guidance, settings.branches, framing)
        fixed = [
            {name: values[branch][None] for name, values in self._family.conditions(wish, facts).items()}
            for branch in range(settings.branches)
        ]
        if "inpaint-channels" in facts.modes:
            fixed = [{**one, **self._channels(picture)} for one in fixed]
        own = {**own, **fixed[-1]}
        if settings.branches == 1:
            yield "", np.float32(1), own
        else:
            negative = self._kept(f"text-{self.texts.index(settings.negative)}")
            yield ", negative branch", np.float32(1 - settings.guidance), {**negative, **fixed[0]}
            yield "", np.float32(settings.guidance), own

    def _channels(self, picture: int) -> dict[str, Array]:
        """Give what a denoiser that inpaints takes as channels: half a mask, and a latent of a picture's variance."""
        latent = self._manifest.facts.latent
        rows, columns = (side // latent.downscale for side in (self._settings.height, self._settings.width))
        mask = np.zeros((1, 1, rows, columns), np.float32)
        mask[..., : columns // 2] = 1
        behind = TorchStream(self._settings.seed + picture + len(self.pictures)).randn(
            (1, latent.channels, rows, columns)
        )
        return {MASK: mask, MASKED: behind * (1 - mask)}

    def _picture(self, picture: int) -> str:
        return f"prompt {self.pictures[picture]!r}, seed {self._settings.seed + picture}"

    def _words(self, picture: int, call: int, timestep: float, branch: str) -> str:
        step = f"step {call + 1} of {self._table.calls}, timestep {timestep:g}"
        return f"{self._picture(picture)}, {step}{branch}"
