"""What a build will take, before it begins: the worker's memory, and room on the disk."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtdiff.backends import backend
from trtdiff.errors import ArtefactError, BuildError, StorageError
from trtdiff.export.manifest import ExportManifest
from trtdiff.machine import available_memory
from trtdiff.plan import Planned, PlannedEngine, PlannedSamplers

_LIBRARIES = 180 << 20
"""Resident size of the worker once onnx-ir and a runtime are imported (measured: 140 MB)."""
_GRAPH_FACTOR = 12
"""Bytes in memory for a byte of ONNX file without weights."""
_TENSOR_FACTOR = 2.5
"""Of the largest tensor in float32, while it is widened: 2 bytes an element read, 4 computed, 4 written."""


_SAMPLERS_MEMORY = 700 << 20
"""Resident size of the worker that compiles schedulers with torch and diffusers (measured: 560 MB)."""
_SAMPLERS_SECONDS = 8.0
"""For one scheduler, of one core (measured: 61 to 72 s for eight)."""
_START = 3.0
"""Seconds until the worker has its libraries, and has run passes over a small graph."""
_LOWERED_PER_SECOND = 400e6
"""Bytes of weights that are read, converted, hashed and written in a second, on one core."""


@dataclass(frozen=True)
class Needs:
    """What the making of one piece takes: bytes, and seconds on a machine of two cores."""

    memory: int
    disk: int
    seconds: float

    def __str__(self) -> str:
        return f"{size(self.memory)} of memory, {size(self.disk)} of disk, {self.seconds:.0f} s"


def needs_of(planned: Planned, export: Path, manifest: ExportManifest) -> Needs:
    """Estimate what a piece of a bundle takes."""
    if isinstance(planned, PlannedEngine):
        return engine_needs(planned, export)
    if isinstance(planned, PlannedSamplers):
        count = len(planned.names) + len(planned.optional)
        return Needs(_SAMPLERS_MEMORY, 0, _SAMPLERS_SECONDS * count)
    import msgspec

    from trtdiff.calibrate.scan import scan_memory, scan_seconds
    from trtdiff.calibrate.settings import CalibrationSettings, calibration_memory, calibration_seconds

    weights = float32_weights(export, manifest)
    pixels = manifest.facts.latent.height * manifest.facts.latent.width
    disk = max(weights.values(), default=0)
    if planned.calibrates:
        settings = msgspec.convert(planned.spec.settings, CalibrationSettings)
        seconds = calibration_seconds(weights, settings)
        return Needs(calibration_memory(weights, pixels=pixels), disk, seconds)
    return Needs(scan_memory(weights, pixels=pixels), disk, scan_seconds(weights, pixels=pixels))


def float32_weights(export: Path, manifest: ExportManifest) -> dict[str, int]:
    """Give the bytes of every component's weights, once they are float32."""
    return {
        component.name: sum(sum(_tensor_sizes(export / name)) for name in component.weights)
        for component in manifest.components
    }


def engine_needs(planned: PlannedEngine, export: Path) -> Needs:
    """Estimate from the sizes of the graph and of the weight files, whose headers are read."""
    largest, widened = 0, 0
    for name in planned.component.weights:
        sizes = _tensor_sizes(export / name)
        largest = max(largest, *sizes, 0)
        widened += sum(sizes)
    graph = (export / planned.component.graph).stat().st_size
    memory = _LIBRARIES + _GRAPH_FACTOR * graph + int(_TENSOR_FACTOR * largest)
    compiler = backend(planned.spec.backend)
    seconds = _START + widened / _LOWERED_PER_SECOND + compiler.seconds(widened)
    return Needs(memory + compiler.memory(widened), graph + widened, seconds)


def check_memory(what: str, needed: int) -> None:
    """Refuse work that does not fit into the memory that is free now. Raises BuildError with both numbers."""
    available = available_memory()
    if needed > available:
        raise BuildError(f"{what} needs about {size(needed)} of memory, {size(available)} are available",
                         hint="close other programs, or build on a machine with more")  # fmt: skip


def check_disk(writes: Mapping[Path, int], what: str = "the build") -> None:
    """Refuse work whose files do not fit on their disks; `writes` are bytes by folder. Raises StorageError."""
    import shutil

    needed: dict[int, int] = {}
    for folder, count in writes.items():
        there = next((place for place in (folder, *folder.absolute().parents) if place.exists()), Path("/"))
        disk = there.stat().st_dev
        needed[disk] = needed.get(disk, 0) + count
        free = shutil.disk_usage(there).free
        if needed[disk] > free:
            raise StorageError(
                f"{what} writes about {size(needed[disk])}, the disk has {size(free)} free", where=str(folder),
                hint="free some space, or write elsewhere (-o; a build has --store too)"
            )  # fmt: skip


def size(count: int) -> str:
    """Write a number of bytes as people read it: `3.4 GB`."""
    value = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if value >= 100 or unit == "bytes" else f"{value:.1f} {unit}"


def _tensor_sizes(weights: Path) -> Iterable[int]:
    """Bytes of every tensor of a safetensors file, once it is float32."""
    try:
        with weights.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return [_widened(tensor) for name, tensor in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError) as error:
        raise ArtefactError(f"not a readable weight file: {error!r}", where=str(weights), hint="export again") from None


def _widened(tensor: Mapping[str, Any]) -> int:
    """Bytes of one tensor in float32."""
    begin, end = tensor["data_offsets"]
    width = {"F16": 2, "BF16": 2, "F8_E4M3": 4, "F8_E5M2": 4}.get(tensor["dtype"], 1)
    return int(end - begin) * width
