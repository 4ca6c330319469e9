"""The range scan: run the checkpoint's own denoising loop in float32, and write down how large everything gets.

Text encoders, then the denoiser, then the VAE are open, one after the other; every execution is of one row (one image,
one guidance branch), so that activations take as little memory as they can. The sampler and guidance are computed on
the host: the graphs are the exported ones, whose values have the names that later passes know.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trtdiff.calibrate.observed import Observed
from trtdiff.calibrate.ranges import RANGES_FILE, RANGES_SCHEMA, Ranges, ValueRange
from trtdiff.calibrate.settings import DEFAULTS, ScanSettings, ranges_spec, scan_memory, scan_seconds, scan_settings
from trtdiff.errors import ArtefactError, MissingDependency
from trtdiff.export.manifest import EXPORT_FILE, EXPORT_SCHEMA, ExportManifest
from trtdiff.families import family
from trtdiff.images import to_array, to_images
from trtdiff.loop import Start
from trtdiff.noise import TorchStream
from trtdiff.records import read_record, write_record
from trtdiff.sampler import SamplerTable, run_loop
from trtdiff.sampler_book import SamplerBook
from trtdiff.tokens import Tokenizer
from trtdiff.types import Array

__all__ = ["DEFAULTS", "ranges_spec", "scan_memory", "scan_ranges", "scan_seconds", "scan_settings"]

Progress = Callable[[int, int], None]
Conditions = list[dict[str, Array]]
"""A prompt's conditions by name, each [1, …]; the prompts in order, then the negative one."""
_SCHEDULER = "default"
_AFTER_TEXT = ("denoiser", "vae_decoder", "vae_encoder")


def scan_ranges(*, export: str, out: str, settings: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """Scan an export into `out`/ranges.json; `settings` are those of ScanSettings, `progress` counts executions.

    The same settings give the same bytes on one machine; another number of threads, or another processor, may change
    the last of the four digits that are kept. Raises NonFiniteError where the checkpoint overflows float32 itself.
    """
    scan = _Scan(Path(export), Path(out), msgspec.convert(dict(settings), ScanSettings), progress)
    ranges = scan.run()
    write_record(Path(out, RANGES_FILE), ranges)
    largest = {name: max((value.amax, at) for at, value in of.items()) for name, of in ranges.components.items()}
    return {
        "realised": {
            "calls": dict(ranges.calls),
            "largest": {name: {"value": at, "amax": amax} for name, (amax, at) in largest.items()},
        }
    }


class _Scan:
    """One scan: what it has seen, component by component."""

    def __init__(self, export: Path, out: Path, settings: ScanSettings, progress: Progress) -> None:
        self._export, self._settings = export, settings
        self._scratch = out / "scan"
        self._manifest = read_record(export / EXPORT_FILE, ExportManifest, schema=EXPORT_SCHEMA)
        self._graphs = {component.name: export / component.graph for component in self._manifest.components}
        self._ranges: dict[str, Mapping[str, ValueRange]] = {}
        self._calls: dict[str, int] = {}
        self._progress, self._done, self._total = progress, 0, 0

    def run(self) -> Ranges:
        table = self._table()
        self._total = self._executions(table.calls)
        images = self._decode(self._denoise(table, self._encode_prompts()))
        if "vae_encoder" in self._graphs:
            self._encode_images(images)
        order = {name: self._ranges[name] for name in self._graphs if name in self._ranges}
        return Ranges(RANGES_SCHEMA, order, {name: self._calls[name] for name in order}, str(self._settings))

    # --- the stages

    def _encode_prompts(self) -> Conditions:
        kind, facts = family(self._manifest.family), self._manifest.facts
        files = self._manifest.tokenizers
        tokenizers = {name: Tokenizer.open(self._export / files[name], facts.tokens[name]) for name in facts.tokens}
        texts = [*self._settings.prompts, *[self._settings.negative] * (self._settings.branches - 1)]
        with self._opened(*(name for name in self._graphs if name not in _AFTER_TEXT)) as sessions:
            return [kind.encode([text], facts, tokenizers, sessions) for text in texts]

    def _denoise(self, table: SamplerTable, conditions: Conditions) -> Array:  # [B, C, h, w]
        settings, latent = self._settings, self._manifest.facts.latent
        shape = (1, latent.channels, settings.height // latent.downscale, settings.width // latent.downscale)
        streams = [TorchStream(settings.seed + image) for image in range(len(settings.prompts))]
        start = Start(np.concatenate([stream.randn(shape) for stream in streams]), None, streams)
        with self._opened("denoiser") as sessions:
            denoiser = sessions["denoiser"]

            def predict(sample: Array, timestep: float, call: int) -> Array:  # noqa: ARG001
                made = np.zeros_like(sample)
                for image in range(len(sample)):
                    for weight, condition in self._guidance(conditions, image):
                        feeds = {"sample": sample[image : image + 1], "timestep": np.full(1, timestep, np.float32)}
                        made[image] += weight * denoiser.run({**feeds, **condition})["prediction"][0]
                return made

            return run_loop(table, predict, start.noise, draw=start.draw)

    def _guidance(self, conditions: Conditions, image: int) -> Iterator[tuple[np.float32, dict[str, Array]]]:
        """Give the branches of an image, each with its weight."""
        if self._settings.branches == 1:
            yield np.float32(1), conditions[image]
        else:
            yield np.float32(1 - self._settings.guidance), conditions[-1]
            yield np.float32(self._settings.guidance), conditions[image]

    def _decode(self, latents: Array) -> Array:  # [B, 3, H, W]
        with self._opened("vae_decoder") as sessions:
            return np.concatenate(
                [sessions["vae_decoder"].run({"latent": latent[None]})["image"] for latent in latents]
            )

    def _encode_images(self, images: Array) -> None:
        """Encode the pictures as image to image gets them: 8 bits a channel."""
        with self._opened("vae_encoder") as sessions:
            for image in to_images(images):
                sessions["vae_encoder"].run({"image": to_array(image, image.height, image.width)[None]})

    # --- what stands around them

    @contextmanager
    def _opened(self, *names: str) -> Iterator[dict[str, Observed]]:
        """Open components; on the way out, note what they saw and let go of their memory and files."""
        sessions: dict[str, Observed] = {}
        try:
            for name in names:
                if name not in self._graphs:
                    raise ArtefactError(f"the export has no {name}", where=str(self._export), hint="export again")
                sessions[name] = Observed(name, self._graphs[name], self._scratch / name, after=self._executed)
            yield sessions
            for name, session in sessions.items():
                self._ranges[name], self._calls[name] = session.ranges(), session.calls
        finally:
            for session in sessions.values():
                session.close()
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _executions(self, calls: int) -> int:
        pictures, branches = len(self._settings.prompts), self._settings.branches
        each = {"denoiser": pictures * calls * branches, "vae_decoder": pictures, "vae_encoder": pictures}
        return sum(each.get(name, pictures + branches - 1) for name in self._graphs)

    def _executed(self) -> None:
        self._done += 1
        self._progress(self._done, self._total)

    def _table(self) -> SamplerTable:
        """Compile the checkpoint's own scheduler, for the steps of this scan alone."""
        try:
            from trtdiff.export import schedulers
        except ImportError as error:
            raise MissingDependency(
                f"scanning ranges needs {error.name}", hint="pip install 'trtdiff[compile]'"
            ) from None
        steps = self._settings.steps
        self._scratch.mkdir(parents=True)
        path = self._scratch / "samplers.safetensors"
        schedulers.compile_samplers(self._manifest.scheduler, [_SCHEDULER], path=path, steps=[steps])
        return SamplerBook.open(path).table(_SCHEDULER, steps)
