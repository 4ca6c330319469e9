"""The command line: one file a verb; a new verb is one file and one line in `COMMANDS`."""

import errno
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from trtdiff import __version__
from trtdiff.cli.options import HELP
from trtdiff.errors import TrtdiffError

COMMANDS: dict[str, tuple[str, str]] = {
    "export": ("trtdiff.cli.export:export", "Trace a checkpoint into ONNX graphs, without loading its weights."),
    "calibrate": ("trtdiff.cli.calibrate:calibrate", "Measure how large values get, for precisions of 8 bits."),
    "build": ("trtdiff.cli.build:build", "Compile an export into a bundle of engines."),
    "run": ("trtdiff.cli.run:run", "Make pictures with a bundle."),
    "check": ("trtdiff.cli.check:check", "Prove that a bundle computes what PyTorch computes."),
    "inspect": ("trtdiff.cli.inspect:inspect", "Explain a graph, export, engine, bundle, picture or receipt."),
    "doctor": ("trtdiff.cli.doctor:doctor", "Say what this machine can export, build and run."),
}
"""Verb → where its command stands, and its line in `trtdiff --help` (so that help imports no verb)."""


TRACEBACK = "TRTDIFF_TRACEBACK"
"""Environment variable: set, an unexpected error prints the stack of calls."""


class LazyGroup(click.Group):
    """Imports a verb only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Verbs in the order of work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """Import one verb."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """List the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the nearest verb where one is misspelt."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, 1)
            ctx.fail(f"no command is called {args[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)


@click.command(cls=LazyGroup, context_settings=HELP)
@click.version_option(__version__, prog_name="trtdiff")
def cli() -> None:
    """Compile diffusion checkpoints into engines, run them without PyTorch, prove that the pictures are the same.

    \b
    trtdiff export checkpoints/digits
    trtdiff build
    trtdiff run engines/digits "a handwritten seven, red ink on a yellow page" -o seven.png
    trtdiff check engines/digits --against checkpoints/digits
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; an error of ours is printed as what, where and what to do, and becomes its exit code."""
    sys.exit(exit_code(sys.argv[1:] if arguments is None else arguments))


def exit_code(arguments: list[str]) -> int:
    """Give the exit code of one command line."""
    try:
        return _run(arguments)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        if error.filename is None and error.errno in {errno.ENOSPC, errno.EIO, errno.EBADF}:
            click.echo(f"error: cannot write to standard output: {error.strerror}", err=True)
            return 1
        return _unexpected(error)
    except Exception as error:  # noqa: BLE001 - the last net: nobody who types a command should read a stack of calls
        return _unexpected(error)


def _run(arguments: list[str]) -> int:
    try:
        result: Any = cli.main(arguments, prog_name="trtdiff", standalone_mode=False)
    except TrtdiffError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except click.exceptions.Exit as request:
        return request.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted; nothing was left half-written", err=True)
        return 130
    return result if isinstance(result, int) else 0


def _unexpected(error: Exception) -> int:
    """Report an error that is a fault of ours: what, where in our code, and how to see more."""
    import traceback

    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
        return 1
    home = Path(__file__).parents[1]
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(home)]
    where = f"{ours[-1].filename}:{ours[-1].lineno}, in {ours[-1].name}" if ours else ""
    hint = f"this is a fault of trtdiff: please report it with what {TRACEBACK}=1 prints before the same command"
    click.echo(f"error: {TrtdiffError(f'{type(error).__name__}: {error}', where=where, hint=hint)}", err=True)
    return 1
