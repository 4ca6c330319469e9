"""A receipt: what was asked, on what it ran, how long it took and what came out, enough to repeat and to compare.

The rule is that of a controlled experiment: whatever could change the pictures or the time stands in it.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from trtdiff.export.manifest import CheckpointOrigin
from trtdiff.machine import Machine
from trtdiff.records import read_record, write_record

RECEIPT_SCHEMA = 1


@dataclass(frozen=True)
class SchedulerUse:
    """The sampler table that was run."""

    name: str
    class_name: str
    """diffusers' class."""
    digest: str
    """sha256 of the scheduler's class, config and schedule call."""
    steps: int
    start: int | None
    """Steps skipped in image-to-image."""
    calls: int
    """Executions of the denoiser."""
    residual: float
    """How far the table is from diffusers' own scheduler."""


@dataclass(frozen=True)
class EngineUse:
    """One engine that was run."""

    key: str
    load_seconds: float
    """Cold: from its files to ready."""


@dataclass(frozen=True)
class StageTime:
    """How long a stage took, in seconds, over all its executions."""

    count: int
    total: float
    median: float
    p95: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Summarise; `seconds` is not empty. The 95th percentile is the nearest rank: a time that was measured."""
        ranked = sorted(seconds)
        nearest = -(-len(ranked) * 95 // 100) - 1
        return cls(len(ranked), sum(ranked), statistics.median(ranked), ranked[nearest])


@dataclass(frozen=True)
class PictureFacts:
    """One picture that came out."""

    prompt: str
    negative: str | None
    """None where guidance is off: a negative prompt changes nothing then."""
    seed: int
    source: str | None
    """sha256 of the pixels it started from."""
    sha256: str
    """Of its size and RGB bytes, before any file format."""
    mask: str | None = None
    """sha256 of the mask's pixels."""


@dataclass(frozen=True)
class Receipt:
    """One run."""

    schema: int
    trtdiff: str
    created: str
    """Time in UTC, ISO 8601."""
    bundle: str
    bundle_digest: str
    """sha256 of bundle.json, which names the digest of everything else."""
    family: str
    checkpoint: CheckpointOrigin
    precision: str
    backend: str
    backend_version: str
    device: str
    engines: Mapping[str, EngineUse]
    loop: str
    """`device`, or `host` where the host computed the sampler."""
    scheduler: SchedulerUse
    guidance: float
    strength: float | None
    height: int
    width: int
    batches: tuple[int, ...]
    """Pictures computed at once, batch by batch."""
    pictures: tuple[PictureFacts, ...]
    stages: Mapping[str, StageTime]
    """`text_encoder` a prompt, `vae_encoder` a source, `step` a denoiser call, `vae_decoder` a batch."""
    seconds: float
    """From the request to the last picture; loading not included."""
    first_run: bool
    """Whether the pipeline had run nothing before: its times then include warming up."""
    threads: int | None
    """Asked for; None: the backend's own choice."""
    peak_memory: int
    """Largest resident size of the whole process so far, in bytes."""
    machine: Machine
    warnings: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else was asked for: guidance rescale, clip skip, sizes of SDXL, the guidance of branches."""
    files: tuple[str, ...] = ()
    """Names of the pictures' files beside this one, picture by picture."""
    dtype: str = "stored"
    """Type in which the export stored weights: the checkpoint's own (`stored`), or the one that was asked for."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a receipt. Raises ArtefactError."""
        return read_record(path, cls, schema=RECEIPT_SCHEMA)

    def write(self, path: Path) -> None:
        """Write it whole or not at all. Raises StorageError."""
        write_record(path, self)
