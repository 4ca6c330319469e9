"""What the README shows is what the command line takes: every command in it parses, every name it lists exists."""

import re
import shlex
from pathlib import Path

import pytest

from trtdiff.cli import COMMANDS, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMAND_LINES = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("trtdiff ")
]


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_every_command_parses(line):
    verb, *arguments = shlex.split(line)[1:]
    command = cli.get_command(None, verb)
    command.make_context(verb, arguments)  # raises for an option or argument that does not exist


def test_every_verb_is_shown():
    assert {shlex.split(line)[1] for line in COMMAND_LINES} == set(COMMANDS)


def test_every_make_target_it_names_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", README, re.MULTILINE)) <= targets


def test_links_point_at_files():
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).is_file(), link


def test_the_python_example_compiles():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    compile(code, "README.md", "exec")


def test_exit_codes_are_those_of_the_errors():
    from trtdiff.errors import ArtefactError, MissingDependency, ParityError, TrtdiffError, UsageError

    said = dict(re.findall(r"(\d) (failure|usage|parity|stale|a library)", README))
    classes = {
        "failure": TrtdiffError, "usage": UsageError, "parity": ParityError, "stale": ArtefactError,
        "a library": MissingDependency,
    }  # fmt: skip
    assert {word: int(code) for code, word in said.items()} == {word: kind.exit_code for word, kind in classes.items()}
