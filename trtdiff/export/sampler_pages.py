"""Collect the rows of sampler tables and write them as one file, the rows that several tables share stored once.

From an image-to-image start a multistep scheduler warms up anew; once its state is that of the full run, its rows are
the full run's. So a start owns the mix of clean latent and noise that is x_0, and its warm-up, and borrows the rest.
The layout of the file is described where it is read, in `trtdiff.sampler_book`.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtdiff.digest import digest
from trtdiff.errors import StorageError
from trtdiff.export.scheduler_rows import SAME, Run
from trtdiff.sampler_book import FORMAT, SCHEMA, TENSORS, TEXT, SamplerInfo
from trtdiff.types import Array

Values = npt.NDArray[np.float64]


@dataclass
class _Full:
    """Where the text-to-image table of a step count stands."""

    row: int
    time: int
    rows: Values
    timeline: Values  # [5, calls], timesteps, scales, draws, and `known` in two rows


@dataclass
class SamplerPages:
    """The tables of one sampler while they are collected. A full run is added before its starts."""

    name: str
    class_name: str
    identity: Mapping[str, Any]
    window: int
    refused: Mapping[int, str]
    order: int = 1
    no_image: str = ""
    no_mask: str = ""
    no_other_size: str = ""
    residual: float = 0.0
    affinity: float = 0.0
    _first: list[tuple[float, float]] = field(default_factory=list)
    _rows: list[Values] = field(default_factory=list)
    _timeline: list[Values] = field(default_factory=list)
    _index: list[tuple[int, ...]] = field(default_factory=list)
    _full: dict[int, _Full] = field(default_factory=dict)
    _stored: int = 0
    _times: int = 0

    @property
    def stored_rows(self) -> int:
        """Rows in the file so far."""
        return self._stored

    def add(self, steps: int, start: int | None, run: Run) -> None:
        """Add one table from a run, which may have stopped where it fell into step with the full run."""
        rows, residual = run.coefficients(self.window)
        self.residual = max(self.residual, residual)
        self._first.append((run.clean, run.noise))
        self.no_mask = self.no_mask or run.no_mask
        known = np.zeros((2, len(rows)))  # x_0 is none of it: that is what a start owns
        if not self.no_mask:
            known[:, 1:] = np.reshape(run.known[: len(rows) - 1], (-1, 2)).T
        timeline = np.stack([run.timesteps[: len(run.scales)], run.scales, run.draws, *known])
        if start is None:
            full = self._full[steps] = _Full(self._stored, self._times, rows, timeline)
            self._store(rows, timeline)
            self._index.append((steps, TEXT, len(rows), full.time, full.row, len(rows), 0))
            return
        full = self._full[steps]
        calls = len(run.timesteps)
        shared = full.rows[run.first : run.first + len(rows)]
        differ = np.flatnonzero(np.abs(rows - shared).max(1) > SAME * np.maximum(1, np.abs(shared).max(1)))
        own = int(differ[-1]) + 1 if len(differ) else 0
        rest = full.timeline[:, run.first :]
        whole = np.concatenate([timeline, rest[:, timeline.shape[1] :]], axis=1)
        whole[0], whole[3:, 0] = run.timesteps, rest[3:, 0]
        same = np.array_equal(whole, rest)
        time = full.time + run.first if same else self._times
        self._index.append((steps, start, calls, time, self._stored, own, full.row + run.first + own))
        self._store(rows[:own], whole[:, :0] if same else whole)

    def info(self) -> SamplerInfo:
        """Give what the file's metadata says of this sampler."""
        columns = np.flatnonzero(np.any(np.concatenate(self._rows), axis=0)).tolist()
        return SamplerInfo(
            name=self.name,
            class_name=self.class_name,
            config=self.identity,
            digest=digest(self.identity),
            window=self.window,
            columns=tuple(columns),
            residual=self.residual,
            affinity=self.affinity,
            order=self.order,
            no_image=self.no_image,
            no_mask=self.no_mask,
            no_other_size=self.no_other_size,
            refused={str(steps): reason for steps, reason in self.refused.items()},
        )

    def tensors(self) -> dict[str, Array]:
        """Give the seven tensors of this sampler as the file lists them, but unrounded."""
        timesteps, scales, draws, *known = np.concatenate(self._timeline, axis=1)
        arrays = {"timesteps": timesteps, "scales": scales, "draws": draws, "index": np.array(self._index)}
        arrays["known"] = np.zeros((0, 2)) if self.no_mask else np.stack(known, axis=1)
        arrays["first"] = np.array(self._first)
        arrays["rows"] = np.concatenate(self._rows)[:, self.info().columns]
        return {name: arrays[name] for name in TENSORS}

    def _store(self, rows: Values, timeline: Values) -> None:
        self._rows.append(rows)
        self._timeline.append(timeline)
        self._stored += len(rows)
        self._times += timeline.shape[1]


def write_book(path: Path, pages: Sequence[SamplerPages], made_by: Mapping[str, str]) -> None:
    """Write the file, whole or not at all. `made_by` goes to its metadata: versions of the libraries that made it."""
    from safetensors.numpy import save

    samplers = [asdict(page.info()) for page in pages]
    metadata = {"format": FORMAT, "schema": SCHEMA, "samplers": samplers, "made_by": dict(made_by)}
    tensors = {
        f"{page.name}/{name}": np.ascontiguousarray(values, TENSORS[name])
        for page in pages
        for name, values in page.tensors().items()
    }
    content = save(tensors, metadata={"about": json.dumps(metadata, ensure_ascii=False, allow_nan=False)})
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"the sampler file could not be written: {error}", where=str(path)) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
