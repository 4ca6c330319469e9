"""`trtdiff inspect`: explain any file or folder that trtdiff reads or writes."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtdiff.cli.options import HELP, console, json_option

if TYPE_CHECKING:
    from trtdiff.describe import Description


@click.command(context_settings=HELP)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--sensitivity", is_flag=True, help="Of a calibration cache: what rounding does to every layer.")
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE",
    help="Of a calibration cache: draw magnitudes over the schedule, or the sensitivity, to a .png or .svg.",
)  # fmt: skip
@json_option
def inspect(path: Path, *, sensitivity: bool, plot: Path | None, as_json: bool) -> None:
    """Explain PATH: a checkpoint, export, ONNX graph, bundle, engine, calibration, sampler tables, picture or receipt.

    \b
    trtdiff inspect checkpoints/digits
    trtdiff inspect exports/digits/denoiser.onnx
    trtdiff inspect engines/digits --json
    trtdiff inspect calibration/digits.json --sensitivity --plot sensitivity.png
    """
    found = _describe(path, sensitivity=sensitivity, plot=plot)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2, default=str))
        return
    from rich.table import Table
    from rich.text import Text

    out = console()
    out.print(Text(f"{found.kind}: {found.path}", style="bold"))
    facts = Table.grid(padding=(0, 2))
    for name, value in found.facts.items():
        facts.add_row(name, Text(_words(value)))
    out.print(facts)
    for table in found.tables:
        shown = Table(*table.columns, title=table.title, title_justify="left")
        for row in table.rows:
            shown.add_row(*map(Text, row))
        out.print(shown)


def _describe(path: Path, *, sensitivity: bool, plot: Path | None) -> "Description":
    from trtdiff.describe import describe
    from trtdiff.describe_cache import describe_sensitivity, is_cache, plot_cache
    from trtdiff.errors import UsageError

    if (sensitivity or plot is not None) and path.exists() and not is_cache(path):
        raise UsageError(f"{path} is no calibration cache", where="--sensitivity" if sensitivity else "--plot",
                         hint="name one, such as calibration/NAME.json")  # fmt: skip
    if plot is not None and path.exists():
        plot_cache(path, plot, sensitivity=sensitivity)
    return describe_sensitivity(path) if sensitivity and path.exists() else describe(path)


def _words(value: Any) -> str:
    """Give a fact in words."""
    if value is None or value in ({}, []):
        return "-"
    if isinstance(value, list | tuple):
        return "\n".join(map(str, value))
    return json.dumps(value, indent=2, ensure_ascii=False) if isinstance(value, dict) else str(value)
