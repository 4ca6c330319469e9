"""`trtdiff check`: prove that a bundle computes what PyTorch computes."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtdiff.cli.options import ENGINES, HELP, console, json_option, note, only_folder, single_file_options

WIDE = 130
"""Columns from which the place of the largest difference is shown too."""

if TYPE_CHECKING:
    from trtdiff.parity.check import Planned, Report
    from trtdiff.parity.compare import ParityResult
    from trtdiff.parity.reference import PictureRequest


@click.command(context_settings=HELP)
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option(
    "--against", "checkpoint", required=True, metavar="CHECKPOINT", help="The checkpoint: folder, file or hub id."
)
@click.option("--revision", help="Commit, tag or branch of a hub checkpoint.")
@click.option("--variant", help="Weight file variant of the checkpoint, such as fp16.")
@single_file_options
@click.option(
    "--shapes", default="min,opt,max", show_default=True, help="Points of the profile to compare components at."
)
@click.option("--prompt", "prompts", multiple=True, help="Prompt of a picture; several are compared in one batch.")
@click.option("--negative", default="", help="Negative prompt.")
@click.option("--steps", default=20, show_default=True, help="Steps of the pictures.")
@click.option("--guidance", type=float, help="Guidance scale; the family's own when left out.")
@click.option("--seed", default=0, show_default=True, help="Seed of the first picture.")
@click.option("--scheduler", help="One of the bundle's schedulers; the checkpoint's own when left out.")
@click.option("--backend", help="Engines to check, where the bundle has several.")
@json_option
def check(
    bundle: Path | None,
    checkpoint: str,
    revision: str | None,
    variant: str | None,
    tokenizer: str | None,
    prediction: str | None,
    shapes: str,
    prompts: tuple[str, ...],
    negative: str,
    steps: int,
    guidance: float | None,
    seed: int,
    scheduler: str | None,
    backend: str | None,
    *,
    as_json: bool,
) -> int:
    """Prove that BUNDLE computes what PyTorch computes: by component, by step and by picture.

    Every component is compared at the smallest, the tuned and the largest shape of the profile, with the same random
    inputs; then pictures are made by the bundle and by the diffusers pipeline itself from the same seeds, and compared
    after every step and at the end. Exit code 3 where anything is outside the precision's tolerance.

    \b
    trtdiff check engines/digits --against checkpoints/digits
    trtdiff check engines/digits --against checkpoints/digits --shapes opt --scheduler euler --json
    """
    from trtdiff.bundle import BUNDLE_FILE
    from trtdiff.checkpoint import Checkpoint
    from trtdiff.parity.check import Check, parse_points
    from trtdiff.recipes import recipe

    points = parse_points(shapes)
    folder = bundle or only_folder(ENGINES, BUNDLE_FILE, what="bundle", make="trtdiff build")
    opened = Checkpoint.open(checkpoint, revision=revision, variant=variant, tokenizer=tokenizer, prediction=prediction)
    for text in opened.notes:
        note(text)
    with Check(folder, opened, backend=backend) as work:
        request = work.request(
            prompts=prompts, negative=negative, steps=steps, guidance=guidance, seed=seed, scheduler=scheduler
        )
        planned = work.plan(points)
        if not as_json:
            _print_plan(planned, request, work.picture_flops(request))
        work.refuse_beyond_memory(planned, request)
        own = work.manifest.tolerances.get(work.engines.toolchain.backend)
        tolerance = own or recipe(work.engines.precision).tolerance
        report = work.run(
            planned, request, tolerance, done=_ticker(len(planned)) if not as_json else lambda _result: None
        )
    if as_json:
        click.echo(json.dumps(report.json(), indent=2))
    else:
        _print_report(report)
    return 0 if report.passed else 3


def _ticker(components: int) -> Any:
    """Count comparisons on a terminal's last line."""
    if not sys.stderr.isatty():
        return lambda _result: None
    seen: set[str] = set()

    def tick(result: "ParityResult") -> None:
        seen.add(f"{result.name.partition('.')[0]} {result.at}")
        click.echo(
            f"\r\x1b[K{min(len(seen), components)} of {components} components, {result.name}", nl=False, err=True
        )

    return tick


def _print_plan(planned: Sequence["Planned"], request: "PictureRequest", pictures: int) -> None:
    from rich.table import Table

    from trtdiff.estimate import size
    from trtdiff.parity.plan import flops_per_second

    rate = flops_per_second()
    table = Table("shape", "component", "sizes", "memory", "time, about", title="plan, largest shape first")
    for item in planned:
        table.add_row(
            item.point, item.case.spec.name, item.case.at, size(item.peak_bytes), f"{item.flops / rate:.2g} s"
        )
    table.add_section()
    table.add_row("opt", "pictures", str(request), "", f"{pictures / rate:.2g} s")
    console(stderr=True).print(table)
    whole = (pictures + sum(item.flops for item in planned)) / rate
    note(f"about {whole:.2g} s of arithmetic, and what it takes to load PyTorch and the checkpoint")


def _print_report(report: "Report") -> None:
    from rich.table import Column, Table

    if sys.stderr.isatty():
        click.echo("\r\x1b[K", nl=False, err=True)
    out = console()
    wide = out.width >= WIDE
    numbers = [Column(title, no_wrap=True) for title in ("difference", "tolerance", "verdict")]
    table = Table(Column("compared", no_wrap=wide), "at", *numbers, *(["worst place"] if wide else []))
    before = ""
    for result in report.results:
        if before and result.name.partition(".")[0] != before:
            table.add_section()
        before = result.name.partition(".")[0]
        unit = " levels" if result.metric == "levels" else ""
        shown = "-" if math.isinf(result.needed) else f"{result.needed:.2g}{unit}"
        verdict = "[green]ok[/green]" if result.passed else "[red]FAILED[/red]"
        row = [result.name, result.at, shown, f"{result.tolerance:g}{unit}", verdict]
        table.add_row(*row, *([result.problem or result.worst] if wide else []))
        if result.problem and not wide:
            table.add_row("", result.problem)
    out.print(table)
    out.print(("[green]" if report.passed else "[red]") + report.verdict)
    if not report.passed:
        _print_noisiest(report)


def _print_noisiest(report: "Report") -> None:
    """Name the layers to take out of 8 bits first, and how; a line each, so that no name is cut."""
    for component, rows in report.noisiest.items():
        click.echo(f"{component}: layers that 8 bits cost most (signal to noise, share of the multiply-adds)")
        for module, decibels, share in rows:
            click.echo(f"  {decibels:5.1f} dB  {share:7.2%}  {module}")
        modules = ", ".join(f'"{module}"' for module, _, _ in rows[:3])
        note(f"to keep some of them in the base type, name them in a recipe (build --recipe): keep = [{modules}]")
