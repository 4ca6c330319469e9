"""From an export to a bundle: look at what is there, make what is missing, put the bundle in its place.

plan   = make_plan(…)                       what the bundle would be made from (trtdiff/plan.py)
survey = survey_bundle(plan, out, store)    what of that is fresh, in the store, or to be made, and why
report = build(…)                           make it; nothing to do is a matter of milliseconds
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import trtdiff
from trtdiff import worker
from trtdiff.bundle import BUNDLE_FILE, BUNDLE_SCHEMA, ENGINES_FOLDER, SAMPLERS_FILE, Bundle, BundleManifest
from trtdiff.digest import file_digest
from trtdiff.errors import ArtefactError, UsageError
from trtdiff.estimate import check_disk, check_memory, engine_needs, size
from trtdiff.export.manifest import EXPORT_FILE, EXPORT_SCHEMA, ExportManifest
from trtdiff.files import FileFacts, copy_file, facts_of_file, sync_folder
from trtdiff.manifest import MANIFEST_FILE, Made, differences
from trtdiff.plan import BuildPlan, PlannedEngine, PlannedSamplers
from trtdiff.records import read_record, write_record
from trtdiff.store import Entry, Store
from trtdiff.types import TensorSpec
from trtdiff.whole import locked, replaced_folder

Planned: TypeAlias = PlannedEngine | PlannedSamplers
State: TypeAlias = Literal["fresh", "in store", "to make", "made", "reused"]
_SAMPLERS_MEMORY = 700 << 20
"""Resident size of the worker that compiles schedulers with torch and diffusers (measured: 560 MB)."""


@dataclass(frozen=True)
class Piece:
    """One engine, or the sampler tables."""

    name: str
    key: str
    state: State
    seconds: float = 0.0
    peak_memory: int = 0


@dataclass(frozen=True)
class Survey:
    """What a build would find and do."""

    pieces: tuple[Piece, ...]
    changes: tuple[tuple[str, Any, Any], ...]
    """Field, old value, new value, wherever the bundle in place was made from something else."""
    problem: str = ""
    """Why the bundle in place cannot be used at all: there is none, or it is damaged."""

    @property
    def up_to_date(self) -> bool:
        """Nothing is to be done."""
        return not self.changes and not self.problem


@dataclass(frozen=True)
class Report:
    """What a build did."""

    bundle: Path
    survey: Survey
    pieces: tuple[Piece, ...]
    seconds: float


@dataclass(frozen=True)
class Listener:
    """Whom a build tells what it does."""

    note: Callable[[str], None] = lambda text: None  # noqa: ARG005
    stage: Callable[[str], None] = lambda name: None  # noqa: ARG005
    progress: Callable[[int, int], None] = lambda done, total: None  # noqa: ARG005


def read_export(folder: Path, *, fresh: bool = False) -> ExportManifest:
    """Read an export and check its files against it, by every byte where `fresh`. Raises UsageError, ArtefactError."""
    file = folder / EXPORT_FILE
    if not file.is_file():
        raise UsageError(f"{folder} is not an export: it has no {EXPORT_FILE}", where=str(folder),
                         hint="make one with: trtdiff export CHECKPOINT")  # fmt: skip
    export = read_record(file, ExportManifest, schema=EXPORT_SCHEMA)
    wanted = {export.tokenizers[name]: sha256 for name, sha256 in export.tokenizer_sha256.items()}
    for component in export.components:
        wanted |= {component.graph: component.graph_sha256, **component.weights}
    check_export(folder, wanted, fresh=fresh)
    return export


def check_export(folder: Path, files: Mapping[str, str], *, fresh: bool = False) -> None:
    """Raise ArtefactError for the first file of an export that is not what its manifest says, by name → sha256."""
    for name, sha256 in files.items():
        path = folder / name
        try:
            found = file_digest(path, fresh=fresh)
        except OSError as error:
            reason = "has no" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror}):"
            raise ArtefactError(f"the export {reason} {name}", where=str(path), hint="export again") from None
        if found != sha256:
            raise ArtefactError(f"{name} was changed after the export", where=str(path), hint="export again")


def survey_bundle(plan: BuildPlan, out: Path, store: Store, *, fresh: bool = False) -> Survey:
    """Compare a plan with the bundle in place and with the store. `fresh` re-reads every byte of the bundle."""
    wanted = plan.made_from()
    changes: tuple[tuple[str, Any, Any], ...] = ()
    problem, found = "", {}
    try:
        if out.exists():
            bundle = Bundle.open(out)
            found = dict(bundle.manifest.made_from)
            bundle.verify(fresh=fresh)
            changes = tuple(differences(found, wanted))
        else:
            problem = "there is no such bundle yet"
    except ArtefactError as error:
        problem = f"{error.message} ({error.where})"
    pieces = []
    for planned in _every(plan):
        name = _name(planned)
        # tables lie in a bundle without a manifest: where something changed, they come from the store or are made
        usable = planned is not plan.samplers or not changes or _in_store(store, planned.key)
        if not problem and usable and found.get(name) == wanted[name]:
            state: State = "fresh"
        else:
            state = "in store" if _in_store(store, planned.key) else "to make"
        pieces.append(Piece(name, planned.key, state))
    return Survey(tuple(pieces), changes, problem)


def build(
    plan: BuildPlan,
    export: Path,
    out: Path,
    store: Store,
    *,
    force: bool = False,
    verify: bool = False,
    timeout: float | None = None,
    tell: Listener = Listener(),
) -> Report:
    """Make a bundle, or find that it is up to date.

    `force` makes every piece anew; `verify` re-reads every byte of what is there; `timeout` bounds each worker in
    seconds. Raises BuildError, StorageError, ArtefactError, SamplerError.
    """
    began = time.monotonic()
    if out.exists() and not (out / BUNDLE_FILE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there and is not a bundle", where="-o", hint="name another folder, or remove it")
    if store.path.resolve().is_relative_to(out.resolve()):
        raise UsageError(f"the store {store.path} lies in the bundle {out}, which is replaced as a whole",
                         where="--store", hint="keep the store outside of the bundle")  # fmt: skip
    with locked(out, tell.note):
        survey = survey_bundle(plan, out, store, fresh=verify)
        if survey.up_to_date and not force:
            return Report(out, survey, survey.pieces, time.monotonic() - began)
        _preflight(plan, survey, export, (out, store.path), force=force, tell=tell)
        entries, pieces = {}, []
        fresh = {piece.key for piece in survey.pieces if piece.state == "fresh" and not force}
        for planned in _every(plan):
            source = Store(out / ENGINES_FOLDER) if planned.key in fresh and planned is not plan.samplers else store
            again = verify and source is store  # what lies in the bundle was read by the survey
            entry, piece = _make(planned, export, source, force=force, verify=again, timeout=timeout, tell=tell)
            entries[piece.name] = entry
            pieces.append(piece)
        for name, reason in entries["samplers"].manifest.realised.get("refused", {}).items():
            tell.note(f"warning: scheduler {name} is left out of the bundle: {reason}")
        _assemble(plan, entries, export, out)
    return Report(out, survey, tuple(pieces), time.monotonic() - began)


# --- pieces ----------------------------------------------------------------------------------------------------------


def _make(
    planned: Planned,
    export: Path,
    store: Store,
    *,
    force: bool,
    verify: bool,
    timeout: float | None,
    tell: Listener,
) -> tuple[Entry, Piece]:
    """Get a piece from the store, or make it in a worker."""
    name, made = _name(planned), False

    def make(folder: Path) -> Made:
        nonlocal made
        made = True
        tell.stage(name)
        task, arguments = _task(planned, export, folder)
        outcome = worker.run(task, arguments, what=name, timeout=timeout, progress=tell.progress)
        if isinstance(planned, PlannedEngine):
            component = planned.component
            check_export(export, {component.graph: component.graph_sha256, **component.weights})
        inputs, outputs = (
            tuple(TensorSpec(spec["name"], spec["dtype"], tuple(spec["dims"])) for spec in outcome.value.get(side, ()))
            for side in ("inputs", "outputs")
        )
        return Made(inputs, outputs, outcome.value["realised"], outcome.seconds, outcome.peak_memory)

    def discarding(text: str) -> None:
        tell.note(f"warning: the stored {name} is damaged and is made again: {text}")

    entry = store.put(planned.spec, make, force=force, fresh=verify, waiting=tell.note, discarding=discarding)
    if not made:
        return entry, Piece(name, planned.key, "reused")
    return entry, Piece(name, planned.key, "made", entry.manifest.seconds, entry.manifest.peak_memory)


def _task(planned: Planned, export: Path, folder: Path) -> tuple[str, Mapping[str, Any]]:
    out = str(folder.absolute())
    if isinstance(planned, PlannedSamplers):
        names, optional = list(planned.names), list(planned.optional)
        config = dict(planned.spec.config)
        return "trtdiff.lowering:compile_samplers", {"config": config, "names": names, "optional": optional, "out": out}
    spec = planned.spec
    return "trtdiff.lowering:build_engine", {
        "graph": str((export / planned.component.graph).absolute()),
        "passes": list(planned.passes),
        "backend": spec.backend,
        "device": spec.device,
        "computes_in": spec.recipe["computes_in"],
        "profile": dict(spec.profile),
        "options": dict(spec.options),
        "out": out,
    }


def _preflight(
    plan: BuildPlan, survey: Survey, export: Path, places: tuple[Path, Path], *, force: bool, tell: Listener
) -> None:
    """Refuse what will not fit, before anything is begun; `places` are the bundle's and the store's."""
    states = {piece.name: piece.state for piece in survey.pieces}
    out, store = places
    bundled = stored = 0
    for planned in plan.engines:
        needs = engine_needs(planned, export)
        bundled += needs.disk
        if force or states[planned.name] == "to make":
            stored += needs.disk
            tell.note(f"{planned.name}: about {size(needs.memory)} of memory, {size(needs.disk)} of disk")
            check_memory(planned.name, needs.memory)
    if force or states[_name(plan.samplers)] == "to make":
        check_memory("compiling the schedulers", _SAMPLERS_MEMORY)
    check_disk({out: bundled, store: stored})


def _in_store(store: Store, key: str) -> bool:
    """Whether an entry stands there; whether it is whole is seen when it is used."""
    return (store.path / key).is_dir()


def _every(plan: BuildPlan) -> tuple[Planned, ...]:
    return (*plan.engines, plan.samplers)


def _name(planned: Planned) -> str:
    return "samplers" if isinstance(planned, PlannedSamplers) else planned.name


# --- the bundle ------------------------------------------------------------------------------------------------------


def _assemble(plan: BuildPlan, entries: Mapping[str, Entry], export: Path, out: Path) -> None:
    """Put copies of all pieces into a new folder and let it take the bundle's place."""
    manifest = plan.export
    manifests: dict[str, FileFacts] = {}
    with replaced_folder(out) as folder:
        for engine in plan.engines:
            place = f"{ENGINES_FOLDER}/{engine.key}"
            entries[engine.name].copy_to(folder / place)
            manifests[f"{place}/{MANIFEST_FILE}"] = facts_of_file(folder / place / MANIFEST_FILE)
        tables = entries["samplers"]
        facts = tables.manifest.files[SAMPLERS_FILE]
        copy_file(tables.path / SAMPLERS_FILE, folder / SAMPLERS_FILE, sha256=facts.sha256)
        files = {SAMPLERS_FILE: facts, **manifests}
        tokenizers = {}
        for name, source in manifest.tokenizers.items():
            place = f"tokenizers/{name}.json"
            (folder / place).parent.mkdir(exist_ok=True)
            sha256 = manifest.tokenizer_sha256[name]
            check_export(export, {source: sha256})
            copy_file(export / source, folder / place, sha256=sha256)
            files[place] = facts_of_file(folder / place)
            tokenizers[name] = place
        write_record(
            folder / BUNDLE_FILE,
            BundleManifest(
                schema=BUNDLE_SCHEMA,
                trtdiff=trtdiff.__version__,
                name=plan.name,
                family=manifest.family,
                checkpoint=manifest.checkpoint,
                facts=manifest.facts,
                dtype=manifest.dtype,
                precision=plan.precision,
                profile=plan.profile,
                engines={plan.backend: {engine.name: engine.key for engine in plan.engines}},
                window=0,
                samplers=tuple(tables.manifest.realised["samplers"]),
                tokenizers=tokenizers,
                files=files,
                made_from=plan.made_from(),
            ),
        )
        sync_folder(folder)
