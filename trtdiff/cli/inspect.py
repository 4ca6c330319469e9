"""`trtdiff inspect`: explain any file or folder that trtdiff reads or writes."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from trtdiff.cli.options import HELP, console, json_option


@click.command(context_settings=HELP)
@click.argument("path", type=click.Path(path_type=Path))
@json_option
def inspect(path: Path, *, as_json: bool) -> None:
    """Explain PATH: a checkpoint, export, ONNX graph, bundle, store entry, sampler tables, picture or receipt.

    \b
    trtdiff inspect checkpoints/digits
    trtdiff inspect exports/digits/denoiser.onnx
    trtdiff inspect engines/digits --json
    """
    from trtdiff.describe import describe

    found = describe(path)
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


def _words(value: Any) -> str:
    """Give a fact in words."""
    if value is None or value in ({}, []):
        return "-"
    if isinstance(value, list | tuple):
        return "\n".join(map(str, value))
    return json.dumps(value, indent=2, ensure_ascii=False) if isinstance(value, dict) else str(value)
