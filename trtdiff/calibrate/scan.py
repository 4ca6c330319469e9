"""The range scan: run the checkpoint's own denoising loop in float32, and write down how large everything gets.

Text encoders, then the denoiser, then the VAE are open, one after the other. It is the first pass of a calibration with
few steps, all of which count, and without bands.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from trtdiff.calibrate.cache import Component
from trtdiff.calibrate.loop import LATE, Loop, compile_table
from trtdiff.calibrate.measurements import Ranges
from trtdiff.calibrate.opened import Opened
from trtdiff.calibrate.ranges import RANGES_FILE, RANGES_SCHEMA, ValueRange
from trtdiff.calibrate.ranges import Ranges as Found
from trtdiff.calibrate.recording import Recording
from trtdiff.calibrate.settings import DEFAULTS, ScanSettings, ranges_spec, scan_memory, scan_seconds, scan_settings
from trtdiff.errors import ArtefactError
from trtdiff.export.manifest import EXPORT_FILE, EXPORT_SCHEMA, ExportManifest
from trtdiff.records import read_record, write_record

__all__ = ["DEFAULTS", "ranges_spec", "scan_memory", "scan_ranges", "scan_seconds", "scan_settings"]

DIGITS = 4
"""Significant digits that are written down: far more than a limit with headroom needs, fewer than another order of sums
changes."""

Progress = Callable[[int, int], None]


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
        self._seen: dict[str, Component] = {}
        self._progress, self._done, self._total = progress, 0, 0

    def run(self) -> Found:
        try:
            self._run()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        order = {name: _ranges(self._seen[name]) for name in self._graphs if name in self._seen}
        return Found(RANGES_SCHEMA, order, {name: self._seen[name].rows for name in order}, str(self._settings))

    def _run(self) -> None:
        settings, text = self._settings, [name for name in self._graphs if name not in LATE]
        table = compile_table(
            self._manifest, settings.steps, self._scratch / "table", (settings.height, settings.width)
        )
        recording = Recording(self._scratch / "recording")
        loop = Loop(self._export, self._manifest, settings, table, pictures=settings.prompts, recording=recording)
        pictures = len(loop.pictures)
        each = {
            "denoiser": pictures * table.calls * settings.branches,
            "vae_decoder": pictures,
            "vae_encoder": pictures,
        }
        self._total = sum(each.get(name, len(loop.texts)) for name in self._graphs)
        with self._opened(*text) as sessions:
            loop.encode_texts(sessions, _every)
        with self._opened("denoiser") as sessions:
            loop.denoise(sessions["denoiser"], lambda picture, call: 0)  # noqa: ARG005
        with self._opened("vae_decoder") as sessions:
            loop.decode(sessions["vae_decoder"], _every)
        if "vae_encoder" in self._graphs:
            with self._opened("vae_encoder") as sessions:
                loop.encode_images(sessions["vae_encoder"], _every)

    @contextmanager
    def _opened(self, *names: str) -> Iterator[dict[str, Opened]]:
        """Open components; on the way out, note what they saw and let go of their memory and files."""
        sessions: dict[str, Opened] = {}
        scratch = self._scratch / "open"
        try:
            for name in names:
                if name not in self._graphs:
                    raise ArtefactError(f"the export has no {name}", where=str(self._export), hint="export again")
                measurement = Ranges(1, layers_too=False)
                sessions[name] = Opened(name, self._graphs[name], scratch / name, measurement, Component(),
                                        after=self._executed)  # fmt: skip
            yield sessions
            self._seen |= {name: session.seen() for name, session in sessions.items()}
        finally:
            for session in sessions.values():
                session.close()
            shutil.rmtree(scratch, ignore_errors=True)

    def _executed(self, component: str) -> None:  # noqa: ARG002
        self._done += 1
        self._progress(self._done, self._total)


def _every(number: int) -> bool:  # noqa: ARG001
    return True


def _ranges(seen: Component) -> dict[str, ValueRange]:
    """Give the range of every observed value, in the order of the graph."""
    return {name: ValueRange(_rounded(one.largest), _rounded(one.rms)) for name, one in seen.values.items()}


def _rounded(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")
