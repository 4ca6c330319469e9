"""`trtdiff build`: an export becomes a bundle."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtdiff.cli.options import ENGINES, EXPORTS, HELP, json_option, note, only_folder

if TYPE_CHECKING:
    from trtdiff.build import Report, Survey


@click.command(context_settings=HELP)
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The bundle's folder. Default: engines/NAME.")
@click.option(
    "--target",
    help="What engines are for: cpu, rtx (portable), rtx:sm89, rounded. Default: the best this machine runs.",
)
@click.option("--precision", help="fp32, fp16 or bf16. Default: the target's first.")
@click.option("--profile", default="", help="Sizes to build for, as min:opt:max: batch=1:1:4,height=256:512:1024.")
@click.option("--schedulers", default="", help="Names, with commas. Default: the checkpoint's own and the usual ones.")
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
@click.option("--dry-run", is_flag=True, help="Say what would be made or reused; change nothing.")
@json_option
def build(
    *,
    folder: Path | None,
    out: Path | None,
    target: str | None,
    precision: str | None,
    profile: str,
    schedulers: str,
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
    trtdiff build --dry-run
    """
    from trtdiff.backends import best_target, target_backend
    from trtdiff.build import build as build_bundle
    from trtdiff.build import read_export, survey_bundle
    from trtdiff.errors import UsageError
    from trtdiff.export.manifest import EXPORT_FILE
    from trtdiff.plan import described, make_plan
    from trtdiff.store import Store
    from trtdiff.types import ShapeProfile

    if folder is None:
        folder = only_folder(EXPORTS, EXPORT_FILE, what="export", make="trtdiff export CHECKPOINT")
        note(f"export {folder} (the only one there is)")
    if timeout is not None and math.isnan(timeout):
        raise UsageError("--timeout is no number", where="--timeout", hint="give seconds, such as 600")
    overrides = ShapeProfile.parse(profile)
    export = read_export(folder, fresh=verify)
    if out is None:
        out = ENGINES / export.name
        note(f"bundle {out} (default)")
    if target is None:
        target = best_target()
        note(f"target {target} (default: the best that this machine can run)")
    if precision is None:
        precision = target_backend(target).precisions[0]
        note(f"precision {precision} (default for this target)")
    names = tuple(filter(None, (name.strip() for name in schedulers.split(","))))
    plan = make_plan(
        export, name=out.name, precision=precision, target=target, overrides=overrides, schedulers=names or None
    )
    if not profile:
        note(f"profile {plan.profile} (default)")
    kept = Store(out.parent if store is None else store)
    if dry_run:
        survey = survey_bundle(plan, out, kept, fresh=verify)
        _print(_survey_json(survey, out) if as_json else [*described(plan), *_survey_words(survey, out, force=force)])
        return
    with _progress() as (stage, progress):
        from trtdiff.build import Listener

        report = build_bundle(
            plan, folder, out, kept, force=force, verify=verify, timeout=timeout, tell=Listener(note, stage, progress)
        )
    if as_json:
        _print(_report_json(report))
    elif report.survey.up_to_date and not force:
        checked = "every byte of both read again" if verify else "files checked by size, time and sha256"
        same = "export, profile, precision, compiler, schedulers and trtdiff's own code are those it was made from"
        _print([f"{out} is up to date: {same}; {checked}"])
    else:
        _print([*described(plan), *_report_words(report, force=force)])


def _why(survey: "Survey", out: Path, *, force: bool) -> Iterator[str]:
    """Say why there is something to do."""
    if survey.problem:
        yield f"{out}: {survey.problem}"
    same: dict[tuple[str, str, str], list[str]] = {}
    for path, old, new in survey.changes:
        piece, _, field = path.partition(".")
        same.setdefault((field or piece, _shown(old), _shown(new)), []).append(piece)
    for (field, before, now), pieces in same.items():
        yield f"stale: {field}: {before} → {now} ({', '.join(pieces)})"
    if force:
        yield "--force: everything is made anew"


def _survey_words(survey: "Survey", out: Path, *, force: bool) -> Iterator[str]:
    yield from _why(survey, out, force=force)
    if survey.up_to_date and not force:
        yield f"{out} is up to date"
    for piece in survey.pieces:
        yield f"{piece.name:14} {piece.key[:12]}  {'to make' if force else piece.state}"


def _report_words(report: "Report", *, force: bool) -> Iterator[str]:
    from trtdiff.estimate import size

    yield from _why(report.survey, report.bundle, force=force)
    for piece in report.pieces:
        took = f", {piece.seconds:.1f} s, peak memory {size(piece.peak_memory)}" if piece.state == "made" else ""
        yield f"{piece.name:14} {piece.key[:12]}  {piece.state}{took}"
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
def _progress() -> Iterator[tuple[Callable[[str], None], Callable[[int, int], None]]]:
    """Show a bar for each piece on a terminal; elsewhere nothing."""
    import sys

    if not sys.stderr.isatty():
        yield lambda name: None, lambda done, total: None  # noqa: ARG005
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:

        def stage(name: str) -> None:
            for task in bars.task_ids:
                bars.update(task, visible=False)
            bars.add_task(name, total=None)

        def progress(done: int, total: int) -> None:
            bars.update(bars.task_ids[-1], completed=done, total=total)

        yield stage, progress
