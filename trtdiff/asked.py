"""What was asked for, of which target: recipes, options and float32 islands, or an error that says what can be had."""

from collections.abc import Mapping, Sequence

from trtdiff.backends import TARGETS, Backend, target_backend
from trtdiff.backends.options import BuilderOptions, flag
from trtdiff.errors import UsageError
from trtdiff.export.manifest import ExportManifest
from trtdiff.families import family
from trtdiff.families.base import ModelFacts
from trtdiff.recipes import RECIPES, PrecisionRecipe, builds, precisions_of, recipe
from trtdiff.types import ShapeProfile

MOST = 65_536
"""Of any dimension: images at once, pixels of a side, tokens."""
EXACT = "fp32"
"""Precision of a target that lacks the one which another target of the bundle is built in."""


def recipes_of(
    asked: str | PrecisionRecipe | None, targets: Sequence[str]
) -> tuple[dict[str, PrecisionRecipe], list[str]]:
    """Give every target its recipe, and say where that is not the one that was asked for."""
    backends = {target: target_backend(target) for target in dict.fromkeys(targets)}
    if not backends:
        raise UsageError("no target to build for", where="--target", hint=f"known: {', '.join(TARGETS)}")
    _check_once(backends)
    if asked is None:
        usual = {target: recipe(precisions_of(backend)[0]) for target, backend in backends.items()}
        _check_possible(usual, backends)
        return usual, []
    chosen = recipe(asked) if isinstance(asked, str) else asked
    lacking = [target for target, backend in backends.items() if not builds(backend, chosen)]
    for target in lacking:
        known = precisions_of(backends[target])
        if len(lacking) == len(backends) or EXACT not in known:
            able = ", ".join(other for other in TARGETS if builds(target_backend(other), chosen)) or "no target"
            raise UsageError(
                f"target {target} is not built in {chosen.name}", where="--precision",
                hint=f"for this target: {', '.join(known)}; {chosen.name} is built for: {able}"
            )  # fmt: skip
    recipes = {target: RECIPES[EXACT] if target in lacking else chosen for target in backends}
    _check_possible(recipes, backends)
    return recipes, [f"target {target} has no {chosen.name}; its engines are {EXACT}" for target in lacking]


def _check_possible(recipes: Mapping[str, PrecisionRecipe], backends: Mapping[str, Backend]) -> None:
    """Refuse what no engine of a target can be."""
    for target, backend in backends.items():
        chosen = recipes[target]
        word = "bf16" if chosen.computes_in == "bfloat16" else chosen.name
        if why := backend.impossible(word, chosen.formats):
            raise UsageError(f"{target} cannot be built in {chosen.name}: {why}", where="--target",
                             hint="leave that GPU out, or ask for another --precision")  # fmt: skip


def _check_once(backends: Mapping[str, Backend]) -> None:
    """Refuse two targets of one backend: a bundle has one engine of a component for each."""
    seen: dict[str, str] = {}
    for target, backend in backends.items():
        if backend.name in seen:
            both = f"{seen[backend.name]} and {target}"
            raise UsageError(
                f"a bundle holds one set of engines for {backend.name}; {both} are two", where="--target",
                hint="name all GPUs in one target, as in rtx:sm86,sm89, or build two bundles"
            )  # fmt: skip
        seen[backend.name] = target


def options_of(
    asked: BuilderOptions, targets: Mapping[str, PrecisionRecipe]
) -> tuple[dict[str, BuilderOptions], list[str]]:
    """Give every target the options that it takes; what none takes is an error, what some refuse is said."""
    refusals = {
        option: {target: target_backend(target).refusal(option) for target in targets} for option in asked.asked()
    }
    remarks = []
    for option, reasons in refusals.items():
        why = [f"{target}: {reason}" for target, reason in reasons.items() if reason]
        if len(why) == len(reasons):
            raise UsageError(f"{flag(option)} cannot be had: {'; '.join(why)}", where=flag(option), hint="leave it out")
        remarks += [f"{flag(option)} does not hold for {text}" for text in why]
    taken = {
        target: asked.only({option for option, reasons in refusals.items() if not reasons[target]})
        for target in targets
    }
    return taken, remarks


def islands_of(export: ExportManifest, keep: Sequence[str], *, unmeasured: bool) -> dict[str, dict[str, str]]:
    """Give the module patterns that stay in float32, with reasons, by component: the family's, then the user's.

    `unmeasured`: no range scan will show which values the type cannot hold.
    """
    specs = family(export.family).components(export.configs)
    found = {spec.name: {**spec.keep_high, **(spec.keep_unmeasured if unmeasured else {})} for spec in specs}
    for item in keep:
        component, colon, pattern = item.rpartition(":")
        component = component if colon else "denoiser"
        if component not in found or not pattern:
            raise UsageError(
                f"{item!r} names no modules" if not pattern else f"there is no component {component!r}", where="--keep",
                hint=f"write COMPONENT:PATTERN, as in denoiser:mid_block.*; components: {', '.join(found)}"
            )  # fmt: skip
        found[component][pattern] = "asked for with --keep"
    return found


def check_components(chosen: PrecisionRecipe, names: Sequence[str]) -> None:
    """Refuse a recipe of 8 bits that quantizes nothing of this checkpoint."""
    if chosen.quantization is not None and not any(map(chosen.quantizes, names)):
        raise UsageError(f"{chosen.name} quantizes none of this checkpoint's components",
                         where=f"{chosen.file or chosen.name}: quantization.components",
                         hint=f"it has {', '.join(names)}")  # fmt: skip


def check_profile(profile: ShapeProfile, facts: ModelFacts) -> None:
    """Refuse sizes that the networks cannot halve as often as they do, and any that no request could ever have."""
    for name, span in profile.dims.items():
        for size in (span.min, span.opt, span.max):
            if why := _impossible(name, size, facts):
                raise UsageError(f"{name} {size} {why[0]}", where=f"--profile {name}={span}", hint=why[1])


def _impossible(name: str, size: int, facts: ModelFacts) -> tuple[str, str] | None:
    """Say why nothing has this size, and what to do."""
    multiple, row, length = facts.sizes_multiple_of, facts.lengths.get("tokens", 1), facts.lengths.get(name, size)
    side, rows = name in {"height", "width"}, name == "context" and facts.weighted
    most = 1 if facts.guided_by == "embedded" else 2
    rules = (
        (size > MOST, "is beyond any use", f"ask for {MOST} at most"),
        (side and size % multiple, f"is not a multiple of {multiple}",
         f"nearest: {max(round(size / multiple), 1) * multiple}"),
        (side and 0 < facts.largest < size, f"is beyond this model's positions, which end at {facts.largest}",
         f"ask for {facts.largest} at most"),
        (name == "branches" and size > most, "is more than guidance takes", f"ask for {most} at most"),
        (rows and size % row, f"is no whole number of rows of {row} tokens", f"nearest: {-(-size // row) * row}"),
        (not rows and size != length, f"is not {length}, which is what this model's rows have", "leave it out"),
    )  # fmt: skip
    return next(((why, hint) for wrong, why, hint in rules if wrong), None)
