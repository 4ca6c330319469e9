"""What a build would make: every piece with everything that determines it. Nothing here is slow or writes anything.

One path serves all: `--dry-run` prints the plan, an unchanged rebuild ends when the plan equals what the bundle was
made from, and a build carries it out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import trtdiff
from trtdiff.asked import check_components, check_profile, islands_of, options_of, recipes_of
from trtdiff.backends import Backend, target_backend
from trtdiff.backends.options import NO_OPTIONS, BuilderOptions
from trtdiff.calibrate.fitting import read_fitting_cache, uncovered
from trtdiff.digest import code_digest
from trtdiff.errors import MissingDependency, UsageError
from trtdiff.export.manifest import ExportedComponent, ExportManifest
from trtdiff.families import family
from trtdiff.families.base import ModelFacts
from trtdiff.lowering import HALVES, PROLOGUES
from trtdiff.machine import installed
from trtdiff.manifest import EngineSpec, RangesSpec, SamplersSpec, as_json, key_of
from trtdiff.profiles import resolve
from trtdiff.recipes import SCANNED, PrecisionRecipe
from trtdiff.types import DimRange, Point, ShapeProfile, Tolerance

WINDOW = DimRange(1, 3, 48)
"""Slots of the latent log that the sampler prologue takes: samplers look back 16 entries of 3 at most."""
_PROLOGUE_DIMS = {"denoiser": ("window", "branches"), "vae_decoder": ("window",)}
_LOWERING_LIBRARIES = ("onnx", "onnx-ir", "ml_dtypes", "numpy")
_SAMPLERS_LIBRARIES = ("diffusers", "torch", "numpy", "scipy")


@dataclass(frozen=True)
class PlannedEngine:
    """One component to compile for one backend."""

    component: ExportedComponent
    passes: tuple[str, ...]
    spec: EngineSpec
    options: BuilderOptions = NO_OPTIONS
    """With those that stand in no key."""
    waits: bool = False
    """Whether it needs what the plan measures first."""

    @property
    def place(self) -> tuple[str, ...]:
        """Where it stands among the pieces of a bundle: backend, component."""
        return (self.spec.backend, self.component.name)

    @property
    def key(self) -> str:
        """Key of its engine in the store."""
        return key_of(self.spec)


@dataclass(frozen=True)
class PlannedSamplers:
    """The schedulers to compile: `names` must succeed, `optional` ones may be refused."""

    names: tuple[str, ...]
    optional: tuple[str, ...]
    spec: SamplersSpec
    place: tuple[str, ...] = ("samplers",)

    @property
    def key(self) -> str:
        """Key of the tables in the store."""
        return key_of(self.spec)


@dataclass(frozen=True)
class PlannedRanges:
    """What is measured first: a scan of how large values get, which decides what stays in float32, or a calibration.

    A calibration, whose scales are for 8 bits, tells the ranges too.
    """

    spec: RangesSpec
    place: tuple[str, ...] = ("ranges",)

    @property
    def calibrates(self) -> bool:
        """Whether it is a calibration."""
        return self.place == ("calibration",)

    @property
    def key(self) -> str:
        """Key of the ranges, or of the calibration, in the store."""
        return key_of(self.spec)


Planned: TypeAlias = PlannedEngine | PlannedSamplers | PlannedRanges


@dataclass(frozen=True)
class PlannedTarget:
    """All engines for one backend."""

    target: str
    """As it was asked for: `rtx:sm89`."""
    backend: str
    precision: str
    summary: str
    """Of its recipe."""
    tolerance: Tolerance | None
    """Of a recipe that trtdiff does not know by its name."""
    engines: tuple[PlannedEngine, ...]


@dataclass(frozen=True)
class BuildPlan:
    """A whole bundle."""

    export: ExportManifest
    name: str
    profile: ShapeProfile
    targets: tuple[PlannedTarget, ...]
    samplers: PlannedSamplers
    ranges: PlannedRanges | None = None
    cache: Path | None = None
    """The calibration cache that was given."""
    recipe: PrecisionRecipe | None = None
    """The recipe of somebody's own, where one was asked for."""
    remarks: tuple[str, ...] = field(default=(), compare=False)
    """What differs from what was asked for, in words."""

    @property
    def engines(self) -> tuple[PlannedEngine, ...]:
        """Every engine, target by target."""
        return tuple(engine for target in self.targets for engine in target.engines)

    def made_from(self) -> dict[str, Any]:
        """Give everything that determines the bundle, by place, as JSON-like values."""
        export = self.export
        own = {
            "trtdiff": trtdiff.__version__,
            "name": self.name,
            "family": export.family,
            "checkpoint": export.checkpoint,
            "facts": export.facts,
            "dtype": export.dtype,
            "precision": {target.backend: target.precision for target in self.targets},
            "tolerances": {target.backend: target.tolerance for target in self.targets if target.tolerance},
            "profile": {name: str(span) for name, span in self.profile.dims.items()},
            "tokenizers": export.tokenizer_sha256,
            "components": [component.name for component in export.components],
        }
        engines = {target.backend: {e.component.name: e.spec for e in target.engines} for target in self.targets}
        whole: dict[str, Any] = as_json({"bundle": own, **engines, "samplers": self.samplers.spec})
        return whole


def make_plan(
    export: ExportManifest,
    *,
    name: str,
    precision: str | PrecisionRecipe | None,
    targets: Sequence[str],
    schedulers: tuple[str, ...] | None,
    profile: str = "",
    options: BuilderOptions = NO_OPTIONS,
    keep: Sequence[str] = (),
    range_scan: bool = True,
    calibration: Path | None = None,
) -> BuildPlan:
    """Plan a bundle.

    `precision` None: each target's own; `profile` as `profiles.resolve` reads it. `keep` lists modules that stay in
    float32, as `COMPONENT:PATTERN`; a pattern alone means the denoiser. `calibration`: a cache for a precision of 8
    bits; without one, it is calibrated first. UsageError: an unknown precision, target, dimension, scheduler or
    component, or one that cannot be had together. ArtefactError: a cache of something else. MissingDependency.
    """
    sizes = resolve(profile, family(export.family).profile(export.facts))
    check_profile(sizes, export.facts)
    ranges = {**sizes.dims, "window": WINDOW}
    recipes, remarks = recipes_of(precision, targets)
    taken, more = options_of(options, recipes)
    for chosen in recipes.values():
        check_components(chosen, [part.name for part in export.components])
    calibrated = next((chosen for chosen in recipes.values() if chosen.calibrated), None)
    digest, scan = "", None
    scans = range_scan and any(chosen.computes_in in SCANNED for chosen in recipes.values())
    if calibrated is not None and calibration is not None:
        cache = read_fitting_cache(calibration, export, calibrated)
        digest = cache.digest
        more += uncovered(cache, calibrated)
        scan = _ranges(export) if scans and cache.imported else None
    elif calibrated is not None:
        scan = _calibration(export, calibrated)
        digest = scan.key
    elif calibration is not None:
        raise UsageError("nothing that is built needs a calibration", where="--calibration",
                         hint="leave it out, or ask for --precision fp8 or int8")  # fmt: skip
    elif scans:
        scan = _ranges(export)
    planned = []
    for target, chosen in recipes.items():
        backend = target_backend(target)
        measured = scan.key if scan and not scan.calibrates and chosen.computes_in in SCANNED else ""
        mask = "yes" if "inpaint" in export.facts.modes else "no"
        shared = _Shared(target, backend, chosen, ranges, taken[target], measured,
                         digest if chosen.calibrated else "", scan is not None, mask)  # fmt: skip
        half = chosen.computes_in in HALVES
        unmeasured = chosen.computes_in == "float16" and not (measured or shared.calibration)
        islands = islands_of(export, keep, unmeasured=unmeasured)
        engines = tuple(_engine(part, shared, islands[part.name] if half else {}) for part in export.components)
        tolerance = chosen.tolerance if chosen.file else None
        planned.append(PlannedTarget(target, backend.name, chosen.name, chosen.summary, tolerance, engines))
    if keep and not any(chosen.computes_in in HALVES for chosen in recipes.values()):
        raise UsageError("everything stays in float32 anyway", where="--keep", hint="leave --keep out, or ask for fp16")
    return BuildPlan(
        export=export,
        name=name,
        profile=sizes,
        targets=tuple(planned),
        samplers=_samplers(export, schedulers, sizes),
        ranges=scan,
        cache=calibration,
        recipe=precision if isinstance(precision, PrecisionRecipe) and precision.file else None,
        remarks=(*remarks, *more),
    )


# --- pieces ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shared:
    """What the engines of one target have in common."""

    target: str
    backend: Backend
    recipe: PrecisionRecipe
    ranges: Mapping[str, DimRange]
    options: BuilderOptions
    measured: str
    """Key of the range scan."""
    calibration: str
    """Key of the calibration, or digest of the cache."""
    waits: bool
    """Whether something is measured first."""
    mask: str
    """Whether the sampler takes a mask."""


def _engine(component: ExportedComponent, shared: _Shared, islands: Mapping[str, str]) -> PlannedEngine:
    backend, chosen = shared.backend, shared.recipe
    toolchain = backend.toolchain()
    prologue = PROLOGUES.get(component.name)
    passes = (
        *chosen.passes,
        *backend.passes,
        *([f"{prologue} form={backend.sums} mask={shared.mask}"] if prologue else []),
    )
    symbols = dict.fromkeys(symbol for spec in component.inputs for symbol in spec.symbols)
    dims = [*symbols, *_PROLOGUE_DIMS.get(component.name, ())]
    if unknown := [dim for dim in dims if dim not in shared.ranges]:
        raise UsageError(f"{component.name} has dimensions without a range: {', '.join(unknown)}", where="export.json",
                         hint="export again with this version")  # fmt: skip
    code = [*(place.partition(":")[0] for place in passes), type(backend).__module__, "trtdiff.lowering"]
    if chosen.computes_in in HALVES:
        code.append("trtdiff.passes.mark_islands")
    if chosen.quantizes(component.name):
        code.append("trtdiff.passes.quantize")
    if shared.calibration:
        code.append("trtdiff.calibrate.cache")
    spec = EngineSpec(
        component=component.name,
        graph=component.graph_sha256,
        weights=component.weights,
        profile={dim: str(shared.ranges[dim]) for dim in dims},
        recipe=as_json(chosen.content(component.name)),
        islands=islands,
        ranges=shared.measured,
        calibration=shared.calibration,
        passes=passes,
        options=shared.options.content(),
        backend=toolchain.backend,
        backend_version=toolchain.version,
        device=toolchain.device,
        device_details=toolchain.details,
        trtdiff=trtdiff.__version__,
        trtdiff_code=code_digest(code),
        libraries=installed(_LOWERING_LIBRARIES),
    )
    waits = shared.waits and bool(shared.measured or shared.calibration)
    return PlannedEngine(component, passes, spec, shared.options, waits)


def _ranges(export: ExportManifest) -> PlannedRanges:
    from trtdiff.calibrate.scan import DEFAULTS, ranges_spec

    try:
        return PlannedRanges(ranges_spec(export, DEFAULTS))
    except MissingDependency as error:
        raise MissingDependency(
            f"fp16 is preceded by a range scan, on ONNX Runtime: {error.message}", where="--range-scan",
            hint=f"{error.hint}; or leave the scan out with --no-range-scan, and see to overflows yourself"
        ) from None  # fmt: skip


def _calibration(export: ExportManifest, chosen: PrecisionRecipe) -> PlannedRanges:
    """Plan the calibration that a recipe needs."""
    from trtdiff.calibrate.settings import IN_A_BUILD, calibration_spec

    how = chosen.quantization
    assert how is not None, "a calibrated recipe"  # noqa: S101 - `calibrated` says so
    given = {**IN_A_BUILD, "method": how.method, "formats": tuple(sorted(chosen.formats))}
    return PlannedRanges(calibration_spec(export, given), ("calibration",))


def _samplers(export: ExportManifest, schedulers: tuple[str, ...] | None, profile: ShapeProfile) -> PlannedSamplers:
    from trtdiff.export.schedulers import DEFAULT

    kind, facts = family(export.family), export.facts
    asked = schedulers or kind.usual_schedulers()
    known = [DEFAULT, *kind.schedulers()]
    if unknown := [name for name in asked if name not in known]:
        raise UsageError(
            f"no scheduler is called {', '.join(unknown)}", where="--schedulers", hint=f"known: {', '.join(known)}"
        )
    asked = tuple(dict.fromkeys([DEFAULT, *asked]))
    names, optional = (asked, ()) if schedulers else ((DEFAULT,), tuple(name for name in asked if name != DEFAULT))
    native = facts.image_tokens(facts.latent.height, facts.latent.width)
    by_size = "image_tokens" in kind.schedule_call(export.checkpoint.pipeline, native).identity
    libraries = installed(_SAMPLERS_LIBRARIES)
    if absent := [name for name in ("diffusers", "torch") if name not in libraries]:
        raise MissingDependency(
            f"compiling schedulers needs {' and '.join(absent)}", hint="pip install 'trtdiff[compile]'"
        )
    spec = SamplersSpec(
        schedulers=asked,
        required=names,
        config=export.scheduler,
        pipeline=export.checkpoint.pipeline,
        family=export.family,
        image_tokens=native if by_size else 0,
        sizes=_tokens_of_sizes(facts, profile) if by_size else (),
        libraries=libraries,
        trtdiff=trtdiff.__version__,
        trtdiff_code=code_digest(
            ["trtdiff.export.schedulers", "trtdiff.sampler_book", "trtdiff.lowering", type(kind).__module__]
        ),
    )
    return PlannedSamplers(names, optional, spec)


def _tokens_of_sizes(facts: ModelFacts, profile: ShapeProfile) -> tuple[int, ...]:
    """Give the numbers of image tokens of the smallest, usual and largest picture."""
    points: tuple[Point, ...] = ("min", "opt", "max")
    sizes = [profile.sizes(point) for point in points]
    return tuple(dict.fromkeys(facts.image_tokens(one["height"], one["width"]) for one in sizes))


def described(plan: BuildPlan) -> Iterator[str]:
    """Say in words what was chosen."""
    for target in plan.targets:
        spec = target.engines[0].spec
        words = f"{spec.backend} {spec.backend_version}, device {spec.device}"
        if spec.options:
            words += ", " + ", ".join(f"{name} {value}" for name, value in spec.options.items())
        yield f"target    {target.target}: {words}"
        yield f"precision {target.precision}: {target.summary}"
    if plan.ranges is not None and plan.ranges.calibrates:
        yield f"calibrated on {calibrated_on(plan.ranges.spec)}"
    elif plan.cache is not None:
        yield f"calibration {plan.cache}"
    yield f"profile   {plan.profile}"
    yield f"samplers  {', '.join((*plan.samplers.names, *plan.samplers.optional))}"


def calibrated_on(spec: RangesSpec) -> str:
    """Say in words what a calibration runs."""
    import msgspec

    from trtdiff.calibrate.settings import CalibrationSettings

    return str(msgspec.convert(dict(spec.settings), CalibrationSettings))
