"""`trtdiff build`: an export becomes a bundle."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtdiff.cli.options import CALIBRATION, ENGINES, EXPORTS, HELP, json_option, note, only_folder, parse_size

if TYPE_CHECKING:
    from trtdiff.build import Report, Survey


@click.command(context_settings=HELP)
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The bundle's folder. Default: engines/NAME.")
@click.option(
    "--target", "targets", multiple=True,
    help="What engines are for: tensorrt (this GPU), rtx (portable), rtx:sm86,sm89, cpu, rounded. Several times for "
    "engines of several backends in one bundle. Default: the best this machine runs.",
)  # fmt: skip
@click.option(
    "--precision", help="fp32, fp16, bf16, fp8, fp8-mixed, int8 or int8-weights. Default: the target's first."
)
@click.option("--recipe", "recipe_file", type=click.Path(path_type=Path), help="A precision of your own: a TOML file.")
@click.option(
    "--calibration", type=click.Path(path_type=Path), help="Calibration cache for fp8 and int8. Default: "
    "calibration/NAME.json where it is there; else a few pictures are made first.",
)  # fmt: skip
@click.option(
    "--profile", default="", help="Sizes to build for, as min:opt:max: batch=1:1:4,height=256:512:1024; or a name: "
    "default, native, latency, throughput; or both: native,batch=1:2:8.",
)  # fmt: skip
@click.option("--schedulers", default="", help="Names, with commas. Default: the checkpoint's own and the usual ones.")
@click.option(
    "--keep", multiple=True, metavar="MODULES",
    help="Modules that stay in float32 in half precision: denoiser:mid_block.*; * stands for any part.",
)  # fmt: skip
@click.option(
    "--range-scan/--no-range-scan", default=True, show_default=True,
    help="For fp16: find out what exceeds its range, by making a few pictures, and keep that in float32.",
)  # fmt: skip
@click.option("--optimization-level", type=int, help="How hard TensorRT tries: 0 compiles fastest, 5 runs fastest.")
@click.option("--workspace", metavar="SIZE", help="Device memory that a kernel may use as scratch: 4GB.")
@click.option(
    "--timing-cache", type=click.Path(path_type=Path), help="File of kernel times that TensorRT measured; made, read "
    "and added to.",
)  # fmt: skip
@click.option("--weight-streaming", is_flag=True, help="Engines may keep weights in host memory.")
@click.option("--version-compatible", is_flag=True, help="Later versions of TensorRT may load the engines.")
@click.option("--hardware-compatible", is_flag=True, help="GPUs of other generations may load the engines.")
@click.option(
    "--store", type=click.Path(path_type=Path), help="Where engines are kept by key. Default: beside the bundle."
)
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds that one compilation may take.")
@click.option("--force", is_flag=True, help="Make everything anew.")
@click.option(
    "--verify",
    is_flag=True,
    help="Read every byte of export, bundle and reused engines again, instead of trusting file times.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be made or reused, and what it takes; change nothing.")
@json_option
def build(
    *,
    folder: Path | None,
    out: Path | None,
    targets: tuple[str, ...],
    precision: str | None,
    recipe_file: Path | None,
    calibration: Path | None,
    profile: str,
    schedulers: str,
    keep: tuple[str, ...],
    range_scan: bool,
    optimization_level: int | None,
    workspace: str | None,
    timing_cache: Path | None,
    weight_streaming: bool,
    version_compatible: bool,
    hardware_compatible: bool,
    store: Path | None,
    timeout: float | None,
    force: bool,
    verify: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Compile an export into a bundle: engines, sampler tables, tokenizers, in one folder that runs anywhere.

    FOLDER is what `trtdiff export` made; the only one under exports/ where none is given. What is built already is
    reused; a bundle that is up to date is left alone, one that is not is replaced as a whole, and you are told which
    field differs.

    \b
    trtdiff build
    trtdiff build exports/digits --profile batch=1:4:8 --schedulers ddim,euler
    trtdiff build --precision fp16 --target rtx:sm89 --target cpu
    trtdiff build --dry-run
    """
    from trtdiff.backends.options import BuilderOptions
    from trtdiff.build import build as build_bundle
    from trtdiff.build import survey_bundle
    from trtdiff.errors import UsageError
    from trtdiff.export.manifest import EXPORT_FILE
    from trtdiff.export.read import read_export
    from trtdiff.making import Listener
    from trtdiff.plan import described, make_plan
    from trtdiff.recipes import recipe
    from trtdiff.recipes.own import own_recipe
    from trtdiff.store import Store

    if folder is None:
        folder = only_folder(EXPORTS, EXPORT_FILE, what="export", make="trtdiff export CHECKPOINT")
        note(f"export {folder} (the only one there is)")
    if timeout is not None and math.isnan(timeout):
        raise UsageError("--timeout is no number", where="--timeout", hint="give seconds, such as 600")
    options = BuilderOptions(
        optimization_level=optimization_level,
        workspace=None if workspace is None else parse_size(workspace, where="--workspace"),
        timing_cache=timing_cache,
        weight_streaming=weight_streaming,
        version_compatible=version_compatible,
        hardware_compatible=hardware_compatible,
    )
    export = read_export(folder, fresh=verify)
    if out is None:
        out = ENGINES / export.name
        note(f"bundle {out} (default)")
    if precision is not None and recipe_file is not None:
        raise UsageError("both --precision and --recipe are given", where="--recipe", hint="leave one out")
    chosen = recipe(precision) if precision else own_recipe(recipe_file) if recipe_file else None
    targets = _said_targets(targets, precision if recipe_file is None else str(recipe_file))
    if chosen is not None and chosen.calibrated:
        calibration = _said_calibration(calibration, export.name)
    names = tuple(filter(None, (name.strip() for name in schedulers.split(","))))
    plan = make_plan(
        export, name=out.name, precision=chosen, targets=targets, profile=profile, schedulers=names or None,
        options=options, keep=keep, range_scan=range_scan, calibration=calibration,
    )  # fmt: skip
    for remark in [*([] if profile else [f"profile {plan.profile} (default)"]), *plan.remarks]:
        note(remark)
    kept = Store(out.parent if store is None else store)
    if dry_run:
        survey = survey_bundle(plan, folder, out, kept, force=force, fresh=verify)
        _print(_survey_json(survey, out) if as_json else [*described(plan), *_survey_words(survey, out, force=force)])
        return
    with _progress() as (progress, ended):
        report = build_bundle(
            plan, folder, out, kept, force=force, verify=verify, timeout=timeout,
            tell=Listener(note, progress, ended)
        )  # fmt: skip
    if as_json:
        _print(_report_json(report))
    elif report.survey.up_to_date and not force:
        checked = "every byte of both read again" if verify else "files checked by size, time and sha256"
        same = "export, profile, precision, compiler, schedulers and trtdiff's own code are those it was made from"
        _print([f"{out} is up to date: {same}; {checked}"])
    else:
        _print([*described(plan), *_report_words(report, force=force)])


def _said_targets(targets: tuple[str, ...], precision: str | None) -> tuple[str, ...]:
    """Give the targets, or the default one; say what is a default."""
    from trtdiff.backends import best_target, target_backend
    from trtdiff.recipes import precisions_of

    if not targets:
        targets = (best_target(),)
        note(f"target {targets[0]} (default: the best that this machine can run)")
    if precision is None:
        for target in targets:
            note(f"precision {precisions_of(target_backend(target))[0]} (default for target {target})")
    return targets


def _said_calibration(given: Path | None, export: str) -> Path | None:
    """Give the calibration cache, the usual one where it is there; say which it is, or that one is made first."""
    usual = CALIBRATION / f"{export}.json"
    if given is None and usual.is_file():
        note(f"calibration {usual} (default)")
        return usual
    if given is None:
        note(f"no {usual}: calibrated first, on a few pictures of the family's own prompts; for pictures of yours, "
             "run trtdiff calibrate before")  # fmt: skip
    return given


def _why(survey: "Survey", out: Path, *, force: bool) -> Iterator[str]:
    """Say why there is something to do."""
    from trtdiff.manifest import ABSENT

    if survey.problem:
        yield f"{out}: {survey.problem}"
    same: dict[tuple[str, str, str], list[str]] = {}
    for path, old, new in survey.changes:
        if isinstance(old, dict) or isinstance(new, dict):  # all engines of a backend, or all of an engine
            yield f"stale: {path}: {'new' if old == ABSENT else 'no longer built' if new == ABSENT else 'changed'}"
            continue
        piece, field = _piece_and_field(path, survey)
        same.setdefault((field or piece, _shown(old), _shown(new)), []).append(piece)
    for (field, before, now), pieces in same.items():
        yield f"stale: {field}: {before} → {now} ({', '.join(pieces)})"
    if force:
        yield "--force: everything is made anew"


def _piece_and_field(path: str, survey: "Survey") -> tuple[str, str]:
    """Split `onnxruntime.denoiser.profile.height` into the piece and what of it differs."""
    first, _, rest = path.partition(".")
    if first not in {piece.backend for piece in survey.pieces}:
        return first, rest
    component, _, field = rest.partition(".")
    return component or first, field


def _survey_words(survey: "Survey", out: Path, *, force: bool) -> Iterator[str]:
    yield from _why(survey, out, force=force)
    if survey.up_to_date and not force:
        yield f"{out} is up to date"
    for piece in survey.pieces:
        takes = f", about {piece.expected}" if piece.expected else ""
        yield f"{piece.title:30} {piece.key[:12]}  {piece.state}{takes}"
    if expected := [piece.expected for piece in survey.pieces if piece.expected]:
        from trtdiff.estimate import size

        most, whole = max(needs.memory for needs in expected), sum(needs.seconds for needs in expected)
        yield f"in all about {whole:.0f} s, less where pieces fit side by side; {size(most)} for the largest of them"


def _report_words(report: "Report", *, force: bool) -> Iterator[str]:
    from trtdiff.estimate import size

    yield from _why(report.survey, report.bundle, force=force)
    for piece in report.pieces:
        took = f", {piece.seconds:.1f} s, peak memory {size(piece.peak_memory)}" if piece.state == "made" else ""
        yield f"{piece.title:30} {piece.key[:12]}  {piece.state}{took}"
    room = sum(path.stat().st_size for path in report.bundle.rglob("*") if path.is_file())
    yield f"{report.bundle}: {size(room)}, {report.seconds:.1f} s"


def _shown(value: Any) -> str:
    """Write a value of a spec: digests by their first digits."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{text[:12]}…" if len(text) == 64 and set(text) <= set("0123456789abcdef") else text


def _survey_json(survey: "Survey", out: Path) -> dict[str, Any]:
    import msgspec

    return {
        "bundle": str(out),
        "up_to_date": survey.up_to_date,
        "problem": survey.problem,
        "changes": [{"field": path, "old": old, "new": new} for path, old, new in survey.changes],
        "pieces": msgspec.to_builtins(survey.pieces),
    }


def _report_json(report: "Report") -> dict[str, Any]:
    import msgspec

    found = _survey_json(report.survey, report.bundle)
    return {**found, "pieces": msgspec.to_builtins(report.pieces), "seconds": report.seconds}


def _print(result: list[str] | dict[str, Any]) -> None:
    click.echo(json.dumps(result, indent=2, ensure_ascii=False) if isinstance(result, dict) else "\n".join(result))


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str, int, int], None], Callable[[str], None]]]:
    """Show a bar for every piece that is being made, on a terminal; elsewhere nothing."""
    import sys

    if not sys.stderr.isatty():
        yield lambda name, done, total: None, lambda name: None  # noqa: ARG005
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=None)
            if total:
                bars.update(tasks[name], completed=done, total=total)

        def ended(name: str) -> None:
            bars.update(tasks[name], visible=False)

        yield progress, ended
