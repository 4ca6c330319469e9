import pytest
from click.testing import CliRunner

from trtdiff import __version__
from trtdiff.cli import COMMANDS, cli
from trtdiff.cli import exit_code as run
from trtdiff.errors import TrtdiffError


def test_version(capsys):
    assert run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_has_help_with_an_example(verb, capsys):
    assert run([verb, "-h"]) == 0
    said = capsys.readouterr().out
    assert f"\n  trtdiff {verb}" in said  # on a line of its own
    assert "\\b" not in said


def test_help_lists_every_verb_and_imports_none():
    import subprocess
    import sys

    said = "[verb for verb in c.COMMANDS if f'trtdiff.cli.{verb}' in sys.modules]"
    code = f"import sys, trtdiff.cli as c; c.exit_code(['--help']); print({said})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(verb in done.stdout for verb in COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_misspelt_verb_names_the_nearest(capsys):
    assert run(["exprot", "x"]) == 2
    assert "did you mean 'export'" in capsys.readouterr().err


def test_exit_codes_stand_in_the_tree_that_the_docstring_draws():
    import re

    from trtdiff import errors

    drawn = dict(re.findall(r"(\w+) {2,}(\d)  ", errors.__doc__))
    classes = {
        kind.__name__: kind for kind in [TrtdiffError, *_below(TrtdiffError)] if kind.__module__ == errors.__name__
    }
    assert {name: str(kind.exit_code) for name, kind in classes.items()} == drawn


def _below(kind):
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)


def test_an_error_is_printed_as_what_where_and_what_to_do(monkeypatch, capsys):
    def fail(*_args, **_kwargs):
        raise TrtdiffError("it broke", where="this file", hint="do that")

    monkeypatch.setattr(cli, "main", fail)
    assert run(["doctor"]) == 1
    assert capsys.readouterr().err == "error: it broke\n  where: this file\n  to do: do that\n"


def test_a_fault_of_ours_is_one_readable_error_with_its_place(monkeypatch, capsys):
    from trtdiff.cli import doctor

    def fail():
        return {}["no such key"]

    monkeypatch.setattr(doctor, "diagnose", fail)
    assert run(["doctor"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: KeyError: 'no such key'\n  where: ")
    assert "doctor.py:" in said
    assert "please report it" in said
    assert "Traceback" not in said
    monkeypatch.setenv("TRTDIFF_TRACEBACK", "1")
    assert run(["doctor"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_exits_130_with_a_word(monkeypatch, capsys):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupt)
    assert run(["doctor"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_errors_survive_pickling():
    import pickle

    error = TrtdiffError("a", where="b", hint="c")
    again = pickle.loads(pickle.dumps(error))
    assert (again.message, again.where, again.hint) == ("a", "b", "c")


def test_short_and_long_help_are_the_same():
    runner = CliRunner()
    assert runner.invoke(cli, ["-h"]).output == runner.invoke(cli, ["--help"]).output
