"""`trtdiff export`: a checkpoint becomes a folder of ONNX graphs that refer to its weights."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtdiff.cli.options import EXPORTS, HELP, console, json_option, note, single_file_options

if TYPE_CHECKING:
    from trtdiff.export.export import Export, Reporter

DTYPES = ("stored", "float32", "float16", "bfloat16")


@click.command(context_settings=HELP)
@click.argument("checkpoint")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder to make.  [default: exports/NAME]")
@click.option("--revision", help="Commit, tag or branch of a hub checkpoint.")
@click.option("--variant", help="Weights variant to prefer, such as fp16.")
@single_file_options
@click.option("--dtype", type=click.Choice(DTYPES), default="stored", show_default=True,
              help="Type in which weights are stored. Graphs compute in float32 whatever it is.")  # fmt: skip
@click.option("--components", help="Only these, with commas between: denoiser,vae_decoder.")
@click.option("--check/--no-check", default=True, show_default=True,
              help="Compare every graph with PyTorch at two shapes; takes weights in float32.")  # fmt: skip
@click.option("--force", is_flag=True, help="Export anew even if nothing has changed.")
@json_option
def export(
    checkpoint: str,
    output: Path | None,
    revision: str | None,
    variant: str | None,
    tokenizer: str | None,
    prediction: str | None,
    dtype: str,
    components: str | None,
    check: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Trace CHECKPOINT, a diffusers folder, one file or a hub id, into ONNX graphs, without loading its weights.

    Weights are copied beside the graphs, which refer to them. Every image size that diffusers accepts runs; an
    unchanged checkpoint is not exported again.

    \b
    trtdiff export checkpoints/digits
    trtdiff export stable-diffusion-v1-5/stable-diffusion-v1-5 --variant fp16 -o exports/sd15
    trtdiff export dreams.safetensors --tokenizer downloads/sd15/tokenizer
    """
    from trtdiff.checkpoint import Checkpoint
    from trtdiff.export.export import export_checkpoint

    opened = Checkpoint.open(checkpoint, revision=revision, variant=variant, tokenizer=tokenizer, prediction=prediction)
    out = output or EXPORTS / opened.name.rsplit("/", 1)[-1]
    if output is None:
        note(f"output folder: {out}")
    if dtype == "stored":
        note("weights: as they are stored")
    for text in opened.notes:
        note(text)
    chosen = None if components is None else [name.strip() for name in components.split(",") if name.strip()]
    with _progress() as reporter:
        made = export_checkpoint(
            opened, out, dtype=dtype, components=chosen, check=check, force=force, reporter=reporter
        )
    if as_json:
        click.echo(json.dumps(_document(made), indent=2))
    elif made.up_to_date:
        click.echo(f"{out} is up to date (--force exports it again)")
    else:
        if made.reason != "there is none":
            note(f"exported again: {made.reason or '--force'}")
        if known := [name for name, report in made.reports.items() if not report.traced]:
            note(f"traced before, for the same configs: {', '.join(known)}")
        _print_table(made)


def _document(made: "Export") -> dict[str, Any]:
    from dataclasses import asdict

    return {"folder": str(made.folder), "up_to_date": made.up_to_date, "manifest": asdict(made.manifest)}


def _print_table(made: "Export") -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("component")
    for title in ("nodes", "onnx MB", "weights MB", "seconds", "error to PyTorch"):
        table.add_column(title, justify="right")
    for name, report in made.reports.items():
        errors = [error for point in report.checks for error in point.relative_l2.values()]
        table.add_row(
            name,
            f"{report.nodes}",
            f"{report.graph_bytes / 1e6:.2f}",
            f"{report.weight_bytes / 1e6:.1f}",
            f"{report.seconds:.1f}",
            f"{max(errors):.1e}" if errors else "not checked",
        )
    out = console()
    out.print(table)
    out.print(f"[bold]{made.folder}[/bold]", highlight=False, soft_wrap=True)


@contextmanager
def _progress() -> "Iterator[Reporter]":
    """Show the current stage on a terminal, with a bar and the time left where its bytes are known."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        yield _Notes()
        return
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=terminal, transient=True) as progress:
        yield _Stages(progress)


class _Notes:
    """Where nobody watches: no stages, only what is worth a line in a log."""

    def stage(self, text: str, total: int | None = None) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass

    def note(self, text: str) -> None:
        note(text)


class _Stages(_Notes):
    """One line, rewritten as stages go by."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._task = progress.add_task("opening", total=None)

    def stage(self, text: str, total: int | None = None) -> None:
        self._progress.reset(self._task, description=text, total=total)

    def advance(self, nbytes: int) -> None:
        self._progress.advance(self._task, nbytes)
