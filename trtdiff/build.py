"""From an export to a bundle: look at what is there, make what is missing, put the bundle in its place.

plan   = make_plan(…)                       what the bundle would be made from (trtdiff/plan.py)
survey = survey_bundle(plan, out, store)    what of that is fresh, in the store, or to be made, and why
report = build(…)                           make it; nothing to do is a matter of milliseconds
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trtdiff
from trtdiff.backends.timing_cache import read_times
from trtdiff.bundle import BUNDLE_FILE, BUNDLE_SCHEMA, ENGINES_FOLDER, SAMPLERS_FILE, Bundle, BundleManifest
from trtdiff.errors import ArtefactError, BuildError, UsageError
from trtdiff.estimate import check_disk, check_memory, engine_needs, needs_of
from trtdiff.export.read import check_export
from trtdiff.files import FileFacts, copy_file, facts_of_file, sync_folder
from trtdiff.lowered import read_graph
from trtdiff.making import SILENT, Listener, Making, Piece, State
from trtdiff.manifest import MANIFEST_FILE, differences
from trtdiff.plan import BuildPlan, Planned, PlannedEngine
from trtdiff.recipes import RECIPES, PrecisionRecipe
from trtdiff.records import write_record
from trtdiff.store import Entry, Store
from trtdiff.types import names
from trtdiff.whole import foreign_files, locked, replaced_folder


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


def survey_bundle(
    plan: BuildPlan, export: Path, out: Path, store: Store, *, force: bool = False, fresh: bool = False
) -> Survey:
    """Compare a plan with the bundle in place and with the store.

    `fresh` re-reads every byte of the bundle; `force` will make everything anew.
    """
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

    def state(planned: Planned) -> State:
        # tables lie in a bundle without a manifest: where something changed, they come from the store or are made
        usable = planned is not plan.samplers or not changes or _in_store(store, planned.key)
        same = _at(found, planned.place) == _at(wanted, planned.place)
        if not force and not problem and usable and same:
            return "fresh"
        return "in store" if _in_store(store, planned.key) and not force else "to make"

    every: list[Planned] = [*plan.engines, plan.samplers]
    states: list[tuple[Planned, State]] = [(planned, state(planned)) for planned in every]
    if plan.ranges is not None and any(
        made == "to make" and isinstance(planned, PlannedEngine) and planned.waits for planned, made in states
    ):
        there = _in_store(store, plan.ranges.key) and not force
        states.insert(0, (plan.ranges, "in store" if there else "to make"))
    _check_inputs([planned for planned, made in states if made == "to make"], export, plan.recipe)
    return Survey(tuple(_piece(*pair, export, plan) for pair in states), changes, problem)


def _check_inputs(pieces: Iterable[Planned], export: Path, own: PrecisionRecipe | None) -> None:
    """Refuse at once what a compiler would refuse after minutes: patterns that name no module, a foreign cache."""
    if own is not None:
        _check_recipe(own, {piece.component.graph for piece in pieces if isinstance(piece, PlannedEngine)}, export)
    patterns: dict[str, dict[str, str]] = {}
    for piece in pieces:
        if isinstance(piece, PlannedEngine):
            patterns.setdefault(piece.component.graph, {}).update(piece.spec.islands)
            if piece.options.timing_cache is not None:
                read_times(piece.options.timing_cache)
    for name, wanted in patterns.items():
        if wanted:
            from trtdiff.passes.mark_islands import matching

            graph = read_graph(export / name).graph
            for pattern, reason in wanted.items():
                try:
                    matching(graph, pattern)
                except BuildError as error:
                    raise UsageError(error.message, where=f"{name}; {reason}", hint=error.hint) from None


def _check_recipe(own: PrecisionRecipe, graphs: Iterable[str], export: Path) -> None:
    """Refuse a pattern of somebody's own recipe that names no module of any component that it quantizes."""
    from trtdiff.passes.mark_islands import matching

    named = [name for name in graphs if own.quantizes(Path(name).stem)]
    if own.quantization is None or not named:
        return
    start = RECIPES[own.based_on].quantization if own.based_on else None
    usual = start.keep if start else {}
    for pattern in own.quantization.keep:
        problems = []
        for name in named:
            try:
                matching(read_graph(export / name).graph, pattern)
            except BuildError as error:
                problems.append(error)
        if len(problems) == len(named) and pattern not in usual:
            raise UsageError(problems[0].message, where=f"{own.file}: quantization.keep; {', '.join(named)}",
                             hint=problems[0].hint)  # fmt: skip


def _piece(planned: Planned, state: State, export: Path, plan: BuildPlan) -> Piece:
    backend = planned.spec.backend if isinstance(planned, PlannedEngine) else ""
    expected = needs_of(planned, export, plan.export) if state == "to make" else None
    return Piece(planned.place[-1], backend, planned.key, state, expected=expected)


def _at(tree: Any, place: tuple[str, ...]) -> Any:
    """Give what stands in a tree of mappings at a place; None where nothing does."""
    for name in place:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def build(
    plan: BuildPlan,
    export: Path,
    out: Path,
    store: Store,
    *,
    force: bool = False,
    verify: bool = False,
    timeout: float | None = None,
    tell: Listener = SILENT,
) -> Report:
    """Make a bundle, or find that it is up to date. Pieces are made side by side as far as memory and cores allow.

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
        survey = survey_bundle(plan, export, out, store, force=force, fresh=verify)
        if survey.up_to_date and not force:
            return Report(out, survey, survey.pieces, time.monotonic() - began)
        _refuse_foreign(out)
        _preflight(plan, survey, export, (out, store.path), tell=tell)
        fresh = {piece.key for piece in survey.pieces if piece.state == "fresh"}
        bundled = Store(out / ENGINES_FOLDER)
        making = Making(plan, export, store, force=force, verify=verify, timeout=timeout, tell=tell)
        made = making.all({piece.key: piece.expected for piece in survey.pieces}, fresh, bundled)
        for name, reason in made[plan.samplers.place].entry.manifest.realised.get("refused", {}).items():
            tell.note(f"warning: scheduler {name} is left out of the bundle: {reason}")
        _assemble(plan, {place: done.entry for place, done in made.items()}, export, out)
    return Report(out, survey, tuple(done.piece for done in made.values()), time.monotonic() - began)


def _refuse_foreign(out: Path) -> None:
    """Refuse to replace a bundle that somebody has put files into."""
    if not (out / BUNDLE_FILE).is_file():
        return
    try:
        manifest = Bundle.open(out).manifest
    except ArtefactError:
        return  # nobody knows what belongs to it
    engines = {f"{ENGINES_FOLDER}/{key}" for keys in manifest.engines.values() for key in keys.values()}
    if others := foreign_files(out, {BUNDLE_FILE, *manifest.files}, engines):
        raise UsageError(f"the bundle {out} has files in it that are not its own: {names(others, 3)}", where="-o",
                         hint="it is replaced as a whole: move them elsewhere")  # fmt: skip


def _preflight(plan: BuildPlan, survey: Survey, export: Path, places: tuple[Path, Path], *, tell: Listener) -> None:
    """Refuse what will not fit, before anything is begun; `places` are the bundle's and the store's."""
    out, store = places
    bundled = sum(engine_needs(planned, export).disk for planned in plan.engines)
    stored = 0
    for piece in survey.pieces:
        if piece.expected is not None:
            tell.note(f"{piece.title}: about {piece.expected}")
            check_memory(piece.title, piece.expected.memory)
            stored += piece.expected.disk
    check_disk({out: bundled, store: stored})


def _in_store(store: Store, key: str) -> bool:
    """Whether an entry stands there; whether it is whole is seen when it is used."""
    return (store.path / key).is_dir()


# --- the bundle ------------------------------------------------------------------------------------------------------


def _assemble(plan: BuildPlan, entries: Mapping[tuple[str, ...], Entry], export: Path, out: Path) -> None:
    """Put copies of all pieces into a new folder and let it take the bundle's place."""
    manifest = plan.export
    manifests: dict[str, FileFacts] = {}
    with replaced_folder(out) as folder:
        for engine in plan.engines:
            place = f"{ENGINES_FOLDER}/{engine.key}"
            entries[engine.place].copy_to(folder / place)
            manifests[f"{place}/{MANIFEST_FILE}"] = facts_of_file(folder / place / MANIFEST_FILE)
        tables = entries[plan.samplers.place]
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
                precision={target.backend: target.precision for target in plan.targets},
                tolerances={target.backend: target.tolerance for target in plan.targets if target.tolerance},
                profile=plan.profile,
                engines={
                    target.backend: {engine.component.name: engine.key for engine in target.engines}
                    for target in plan.targets
                },
                window=0,
                samplers=tuple(tables.manifest.realised["samplers"]),
                tokenizers=tokenizers,
                files=files,
                made_from=plan.made_from(),
            ),
        )
        sync_folder(folder)
