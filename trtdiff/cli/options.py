"""What several verbs share: options, folders by default, and where words go.

Results go to standard output, so that they can be piped; progress and remarks go to standard error, and progress only
to a terminal.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trtdiff.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

F = TypeVar("F", bound=Callable[..., Any])

EXPORTS = Path("exports")
ENGINES = Path("engines")
CALIBRATION = Path("calibration")

PIPED_WIDTH = 160

HELP = {"help_option_names": ["-h", "--help"]}
"""Context settings of every command, so that `-h` works wherever one is called from."""


def json_option(command: F) -> F:
    """`--json`: one JSON document on standard output instead of words."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document for programs.")(command)


def single_file_options(command: F) -> F:
    """`--tokenizer` and `--prediction`: what a checkpoint in one file does not say itself."""
    tokenizer = click.option(
        "--tokenizer", metavar="FOLDER", help="Of a checkpoint in one file: a folder with its tokenizer."
    )
    prediction = click.option(
        "--prediction", type=click.Choice(("epsilon", "v_prediction")),
        help="Of a checkpoint in one file: what its network predicts.",
    )  # fmt: skip
    return tokenizer(prediction(command))


def note(text: str) -> None:
    """Say something beside the result, on standard error: defaults that were chosen, what is up to date, warnings."""
    click.echo(text, err=True)


def console(*, stderr: bool = False) -> "Console":
    """Give a console for tables: as wide as the terminal, or wide enough to cut no word where nobody's terminal is."""
    import os

    from rich.console import Console

    made = Console(highlight=False, stderr=stderr)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPED_WIDTH
    return made


def only_folder(parent: Path, marker: str, *, what: str, make: str) -> Path:
    """Give the only folder under `parent` that holds the file `marker`. Several or none is an error that says so."""
    found = sorted(path.parent for path in parent.glob(f"[!.]*/{marker}"))  # hidden ones are half-made
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"there is no {what} under {parent}/", hint=f"make one with: {make}")
    listed = ", ".join(str(path) for path in found)
    raise UsageError(f"there are {len(found)} {what}s: {listed}", hint="name the one you mean")


def parse_size(text: str, *, where: str) -> int:
    """Read `4GB`, `512 MiB` or a number of bytes. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if match is None:
        raise UsageError(f"{text!r} is not a size", where=where, hint="write 4GB, 512MiB, or a number of bytes")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))
