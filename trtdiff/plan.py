"""What a build would make: every piece with everything that determines it. Nothing here is slow or writes anything.

One path serves all: `--dry-run` prints the plan, an unchanged rebuild ends when the plan equals what the bundle was
made from, and a build carries it out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import trtdiff
from trtdiff.backends import TARGETS, Backend, target_backend
from trtdiff.digest import code_digest
from trtdiff.errors import MissingDependency, UsageError
from trtdiff.export.manifest import ExportedComponent, ExportManifest
from trtdiff.families import family
from trtdiff.lowering import PROLOGUES
from trtdiff.machine import installed
from trtdiff.manifest import EngineSpec, SamplersSpec, as_json, key_of
from trtdiff.recipes import PrecisionRecipe, recipe
from trtdiff.types import DimRange, ShapeProfile

CONTRACT = ShapeProfile({"window": DimRange(1, 3, 48), "branches": DimRange(1, 2, 2)})
"""Dimensions that the sampler prologue adds: slots of the latent log (samplers look back 16 entries of 3 at most), and
guidance branches."""
_PROLOGUE_DIMS = {"denoiser": ("window", "branches"), "vae_decoder": ("window",)}
_LOWERING_LIBRARIES = ("onnx", "onnx-ir", "ml_dtypes", "numpy")
_SAMPLERS_LIBRARIES = ("diffusers", "torch", "numpy", "scipy")


@dataclass(frozen=True)
class PlannedEngine:
    """One component to compile."""

    component: ExportedComponent
    passes: tuple[str, ...]
    spec: EngineSpec

    @property
    def name(self) -> str:
        """Name of the component."""
        return self.component.name

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

    @property
    def key(self) -> str:
        """Key of the tables in the store."""
        return key_of(self.spec)


@dataclass(frozen=True)
class BuildPlan:
    """A whole bundle."""

    export: ExportManifest
    name: str
    precision: str
    backend: str
    profile: ShapeProfile
    engines: tuple[PlannedEngine, ...]
    samplers: PlannedSamplers

    def made_from(self) -> dict[str, Any]:
        """Give everything that determines the bundle, by piece, as JSON-like values."""
        export = self.export
        own = {
            "trtdiff": trtdiff.__version__,
            "name": self.name,
            "family": export.family,
            "checkpoint": export.checkpoint,
            "facts": export.facts,
            "dtype": export.dtype,
            "precision": self.precision,
            "backend": self.backend,
            "profile": {name: str(span) for name, span in self.profile.dims.items()},
            "tokenizers": export.tokenizer_sha256,
            "components": [engine.name for engine in self.engines],
        }
        engines = {engine.name: engine.spec for engine in self.engines}
        whole: dict[str, Any] = as_json({"bundle": own, **engines, "samplers": self.samplers.spec})
        return whole


def make_plan(
    export: ExportManifest,
    *,
    name: str,
    precision: str,
    target: str,
    overrides: ShapeProfile,
    schedulers: tuple[str, ...] | None,
) -> BuildPlan:
    """Plan a bundle. UsageError: an unknown precision, target, dimension or scheduler. MissingDependency."""
    chosen = recipe(precision)
    backend = target_backend(target)
    _check_precision(chosen.name, target, backend)
    profile = family(export.family).profile(export.facts).merged(overrides)
    _check_sizes(profile, export.facts.sizes_multiple_of)
    tokens = max((facts.limit for facts in export.facts.tokens.values()), default=1)
    ranges = {**profile.dims, "tokens": DimRange(tokens, tokens, tokens), **CONTRACT.dims}
    return BuildPlan(
        export=export,
        name=name,
        precision=precision,
        backend=backend.name,
        profile=profile,
        engines=tuple(_engine(component, chosen, target, ranges) for component in export.components),
        samplers=_samplers(export, schedulers),
    )


def _engine(
    component: ExportedComponent, chosen: PrecisionRecipe, target: str, ranges: Mapping[str, DimRange]
) -> PlannedEngine:
    backend = target_backend(target)
    toolchain = backend.toolchain()
    prologue = PROLOGUES.get(component.name)
    passes = (*chosen.passes, *backend.passes, *([f"{prologue} form={backend.sums}"] if prologue else []))
    symbols = dict.fromkeys(symbol for spec in component.inputs for symbol in spec.symbols)
    dims = [*symbols, *_PROLOGUE_DIMS.get(component.name, ())]
    if unknown := [dim for dim in dims if dim not in ranges]:
        raise UsageError(f"{component.name} has dimensions without a range: {', '.join(unknown)}", where="export.json",
                         hint="export again with this version")  # fmt: skip
    spec = EngineSpec(
        component=component.name,
        graph=component.graph_sha256,
        weights=component.weights,
        profile={dim: str(ranges[dim]) for dim in dims},
        recipe=chosen.content(),
        passes=passes,
        options={},
        backend=toolchain.backend,
        backend_version=toolchain.version,
        device=toolchain.device,
        device_details=toolchain.details,
        trtdiff=trtdiff.__version__,
        trtdiff_code=code_digest(
            [*(place.partition(":")[0] for place in passes), type(backend).__module__, "trtdiff.lowering"]
        ),
        libraries=installed(_LOWERING_LIBRARIES),
    )
    return PlannedEngine(component, passes, spec)


def _samplers(export: ExportManifest, schedulers: tuple[str, ...] | None) -> PlannedSamplers:
    from trtdiff.export.schedulers import DEFAULT, SCHEDULERS, USUAL

    asked = schedulers or USUAL
    known = [DEFAULT, *SCHEDULERS]
    if unknown := [name for name in asked if name not in known]:
        raise UsageError(
            f"no scheduler is called {', '.join(unknown)}", where="--schedulers", hint=f"known: {', '.join(known)}"
        )
    asked = tuple(dict.fromkeys([DEFAULT, *asked]))
    names, optional = (asked, ()) if schedulers else ((DEFAULT,), tuple(name for name in asked if name != DEFAULT))
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
        libraries=libraries,
        trtdiff=trtdiff.__version__,
        trtdiff_code=code_digest(["trtdiff.export.schedulers", "trtdiff.sampler_book", "trtdiff.lowering"]),
    )
    return PlannedSamplers(names, optional, spec)


def _check_precision(name: str, target: str, backend: Backend) -> None:
    if name in backend.precisions:
        return
    able = [other for other in TARGETS if name in target_backend(other).precisions]
    hint = f"for this target: {', '.join(backend.precisions)}; {name} is built for: {', '.join(able) or 'no target'}"
    raise UsageError(f"target {target} is not built in {name}", where="--precision", hint=hint)


def _check_sizes(profile: ShapeProfile, multiple: int) -> None:
    for name in ("height", "width"):
        if name in profile.dims:
            span = profile.dims[name]
            for size in (span.min, span.opt, span.max):
                if size % multiple:
                    raise UsageError(f"{name} {size} is not a multiple of {multiple}", where=f"--profile {name}={span}",
                                     hint=f"nearest: {round(size / multiple) * multiple or multiple}")  # fmt: skip


def described(plan: BuildPlan) -> Iterator[str]:
    """Say in words what was chosen."""
    first = plan.engines[0].spec
    yield f"precision {plan.precision}: {recipe(plan.precision).summary}"
    yield f"backend   {first.backend} {first.backend_version}, device {first.device}"
    yield f"profile   {plan.profile}"
    yield f"samplers  {', '.join((*plan.samplers.names, *plan.samplers.optional))}"
