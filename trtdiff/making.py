"""The making of a bundle's pieces: each from the bundle in place, from the store, or in a worker, side by side."""

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from trtdiff import worker
from trtdiff.calibrate.ranges import RANGES_FILE
from trtdiff.calibrate.settings import CALIBRATION_FILE
from trtdiff.errors import ArtefactError
from trtdiff.estimate import Needs, needs_of
from trtdiff.export.read import check_export, read_export
from trtdiff.machine import available_memory, usable_cores
from trtdiff.manifest import Made
from trtdiff.plan import BuildPlan, Planned, PlannedEngine, PlannedRanges, PlannedSamplers
from trtdiff.side_by_side import Job, run_side_by_side
from trtdiff.store import Entry, Store
from trtdiff.types import TensorSpec

State: TypeAlias = Literal["fresh", "in store", "to make", "made", "reused"]


@dataclass(frozen=True)
class Piece:
    """One engine, the sampler tables, or the ranges that engines depend on."""

    name: str
    backend: str
    """Empty for what serves every backend."""
    key: str
    state: State
    seconds: float = 0.0
    peak_memory: int = 0
    expected: Needs | None = None
    """What making it will take, where it is to be made."""

    @property
    def title(self) -> str:
        """Its name, and for whom it is."""
        return f"{self.name} ({self.backend})" if self.backend else self.name


@dataclass(frozen=True)
class Listener:
    """Whom a build tells what it does. Called from several threads."""

    note: Callable[[str], None] = lambda text: None  # noqa: ARG005
    progress: Callable[[str, int, int], None] = lambda name, done, total: None  # noqa: ARG005
    """A piece's name, how much of it is done, and how much there is; 0, 0 when it is begun."""
    ended: Callable[[str], None] = lambda name: None  # noqa: ARG005
    """A piece is made, or could not be."""


SILENT = Listener()


@dataclass(frozen=True)
class Done:
    """A piece, and where it stands."""

    entry: Entry
    piece: Piece


class Making:
    """All pieces of one bundle, on their way."""

    def __init__(
        self,
        plan: BuildPlan,
        export: Path,
        store: Store,
        *,
        force: bool,
        verify: bool,
        timeout: float | None,
        tell: Listener,
    ) -> None:
        self._plan, self._export, self._store = plan, export, store
        self._force, self._verify = force, verify
        self._timeout, self._tell = timeout, tell

    def all(
        self, expected: Mapping[str, Needs | None], fresh: Collection[str], bundled: Store
    ) -> dict[tuple[str, ...], Done]:
        """Get every piece that a survey found, by place. `expected` says by key what is to be made and what it takes.

        Engines whose key is in `fresh` come from `bundled`, the bundle in place.
        """
        plan = self._plan
        wanted: list[Planned] = [*plan.engines, plan.samplers]
        if plan.ranges is not None and plan.ranges.key in expected:
            wanted.insert(0, plan.ranges)
        jobs = []
        for planned in wanted:
            needs = expected.get(planned.key) or needs_of(planned, self._export, plan.export)  # it may be damaged
            source = bundled if planned.key in fresh and isinstance(planned, PlannedEngine) else self._store
            after = isinstance(planned, PlannedEngine) and planned.waits and plan.ranges is not None
            run = partial(self._one, planned, source, force=self._force)
            name = "/".join(planned.place)
            jobs.append(
                Job(
                    name,
                    run,
                    needs.memory,
                    needs.seconds,
                    after="/".join(plan.ranges.place) if after and plan.ranges else "",
                )
            )
        done = run_side_by_side(jobs, memory=available_memory(), at_once=usable_cores(), failed=self._failed)
        return {planned.place: done["/".join(planned.place)] for planned in wanted}

    def _failed(self, error: Exception, running: Collection[str]) -> None:
        """Say it at once, since what runs besides may take an hour; the first error is raised at the end."""
        if running:
            self._tell.note(f"error: {error}\n  waiting for {', '.join(running)} to end, which is kept")

    def _one(self, planned: Planned, source: Store, stop: threading.Event, *, force: bool = False) -> Done:
        """Get a piece from a store, or make it in a worker."""
        backend = planned.spec.backend if isinstance(planned, PlannedEngine) else ""
        name = Piece(planned.place[-1], backend, planned.key, "made").title
        made = False

        def make(folder: Path) -> Made:
            nonlocal made
            made = True
            self._tell.progress(name, 0, 0)
            try:
                return self._make(planned, name, folder, stop)
            finally:
                self._tell.ended(name)

        def discarding(text: str) -> None:
            self._tell.note(f"warning: the stored {name} is damaged and is made again: {text}")

        fresh = self._verify and source is self._store  # what lies in the bundle was read by the survey
        entry = source.put(
            planned.spec, make, force=force, fresh=fresh, waiting=self._tell.note, discarding=discarding, stop=stop
        )
        for remark in entry.manifest.realised.get("remarks", ()) if made else ():
            self._tell.note(f"warning: {name}: {remark}")
        took = (entry.manifest.seconds, entry.manifest.peak_memory) if made else (0.0, 0)
        return Done(entry, Piece(planned.place[-1], backend, planned.key, "made" if made else "reused", *took))

    def _make(self, planned: Planned, name: str, folder: Path, stop: threading.Event) -> Made:
        task, arguments = self._task(planned, folder, stop)
        outcome = worker.run(
            task, arguments, what=name, timeout=self._timeout, progress=partial(self._tell.progress, name), stop=stop
        )
        if isinstance(planned, PlannedEngine):
            part = planned.component
            check_export(self._export, {part.graph: part.graph_sha256, **part.weights})
        elif isinstance(planned, PlannedRanges) and read_export(self._export) != self._plan.export:
            raise ArtefactError("the export was replaced while it was measured", where=str(self._export),
                                hint="build again")  # fmt: skip
        inputs, outputs = (
            tuple(TensorSpec(spec["name"], spec["dtype"], tuple(spec["dims"])) for spec in outcome.value.get(side, ()))
            for side in ("inputs", "outputs")
        )
        return Made(inputs, outputs, outcome.value["realised"], outcome.seconds, outcome.peak_memory)

    def _task(self, planned: Planned, folder: Path, stop: threading.Event) -> tuple[str, Mapping[str, Any]]:
        """Give the worker's task and its arguments."""
        out = str(folder.absolute())
        if isinstance(planned, PlannedSamplers):
            return "trtdiff.lowering:compile_samplers", {
                "config": dict(planned.spec.config),
                "names": list(planned.names),
                "optional": list(planned.optional),
                "family": planned.spec.family,
                "pipeline": planned.spec.pipeline,
                "image_tokens": planned.spec.image_tokens,
                "sizes": list(planned.spec.sizes),
                "out": out,
            }
        if not isinstance(planned, PlannedEngine):
            settings = planned.spec.settings
            calibrates = "trtdiff.calibrate.calibration:calibrate_export"
            return calibrates if planned.calibrates else "trtdiff.calibrate.scan:scan_ranges", {
                "export": str(self._export.absolute()),
                "settings": dict(settings),
                "out": out,
            }
        spec = planned.spec
        return "trtdiff.lowering:build_engine", {
            "graph": str((self._export / planned.component.graph).absolute()),
            "passes": list(planned.passes),
            "islands": dict(spec.islands),
            "ranges": self._measured(stop, RANGES_FILE) if spec.ranges else "",
            "quantization": spec.recipe.get("quantization"),
            "calibration": self._calibration(stop) if spec.calibration else "",
            "calibration_digest": spec.calibration if self._plan.cache else "",
            "backend": spec.backend,
            "device": spec.device,
            "computes_in": spec.recipe["computes_in"],
            "profile": dict(spec.profile),
            "options": planned.options.json(),
            "out": out,
        }

    def _calibration(self, stop: threading.Event) -> str:
        """Give the calibration cache: the one that was given, or the one that was made."""
        cache = self._plan.cache
        return self._measured(stop, CALIBRATION_FILE) if cache is None else str(cache.absolute())

    def _measured(self, stop: threading.Event, name: str) -> str:
        """Give a file of what was measured: it was made before, unless an engine was found to be damaged just now."""
        scan = self._plan.ranges
        assert scan is not None, "an engine that names one"  # noqa: S101 - an invariant, not a check of input
        return str((self._one(scan, self._store, stop).entry.path / name).absolute())
