"""`trtdiff run`: the files it writes, the words it says, the numbers it ends with."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from trtdiff.cli import exit_code as run
from trtdiff.images import pixel_digest, read_parameters
from trtdiff.receipt import Receipt


@pytest.fixture
def go(tiny_bundle, tmp_path, monkeypatch, capsys):
    """Run in a folder of its own: `go("a cat", "--steps", "2")` gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = run(["run", str(tiny_bundle), "--threads", "1", "--steps", "2", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def files(folder="."):
    return sorted(path.name for path in Path(folder).iterdir())


def test_one_picture_and_its_receipt(go):
    assert go("a cat", "--seed", 7, "--guidance", 4, "-o", "cat.png") == (0, "cat.png\ncat.json\n", "")
    receipt = Receipt.read(Path("cat.json"))
    with Image.open("cat.png") as image:
        assert [pixel_digest(image)] == [facts.sha256 for facts in receipt.pictures]
    parameters = read_parameters("cat.png")
    assert (parameters["prompt"], parameters["seed"], parameters["steps"], parameters["guidance"]) == (
        "a cat",
        7,
        2,
        4.0,
    )
    assert parameters["bundle_digest"] == receipt.bundle_digest


def test_several_pictures_are_numbered(go):
    code, out, _ = go("a cat", "a dog", "--count", 2, "--seed", 3)
    assert (code, out.split()) == (0, ["out-0.png", "out-1.png", "out-2.png", "out-3.png", "out.json"])
    assert files() == sorted(out.split())
    assert [(p["prompt"], p["seed"]) for p in (read_parameters(f"out-{n}.png") for n in range(4))] == [
        ("a cat", 3), ("a cat", 4), ("a dog", 5), ("a dog", 6),
    ]  # fmt: skip


def test_a_contact_sheet_has_a_row_a_prompt(go):
    code, out, _ = go("a cat", "a dog", "a ship", "--count", 2, "--grid", "-o", "sheets/all.png")
    assert code == 0
    assert "sheets/all.png" in out.split()
    with Image.open("sheets/all.png") as sheet, Image.open("sheets/all-3.png") as fourth:
        assert sheet.size == (2 * 128, 3 * 128)  # 64 pixels are enlarged twice
        assert pixel_digest(sheet.crop((128, 128, 256, 256)).resize((64, 64), 0)) == pixel_digest(fourth)
    receipt = json.loads(Path("sheets/all.json").read_text())
    assert receipt["files"] == [f"all-{index}.png" for index in range(6)]
    assert read_parameters("sheets/all.png")["seeds"] == "0, 1, 2, 3, 4, 5"


def test_from_a_picture(go):
    go("a cat", "-o", "first.png")
    code, _, _ = go("a dog", "--image", "first.png", "--strength", 0.5, "-o", "second.png")
    assert code == 0
    receipt = json.loads(Path("second.json").read_text())
    with Image.open("first.png") as first:
        assert receipt["pictures"][0]["source"] == pixel_digest(first)
    assert (receipt["strength"], receipt["scheduler"]["start"]) == (0.5, 1)


def test_json_is_the_receipt_and_nothing_else(go):
    code, out, err = go("a cat", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(Path("out.json").read_text())


def test_the_host_loop_is_recorded(go):
    code, out, _ = go("a cat", "--host-loop", "--json")
    assert (code, json.loads(out)["loop"]) == (0, "host")


def test_negative_seeds_are_pytorch_s(go):
    code, out, _ = go("a cat", "--seed", -1, "--json")
    assert (code, json.loads(out)["pictures"][0]["seed"]) == (0, -1)


def test_a_prompt_of_control_characters_survives_the_png(go):
    prompt = "a\x00cat\x1b[31m\n\t\u2028 猫"
    assert go(prompt)[0] == 0
    assert read_parameters(Path("out.png"))["prompt"] == prompt
    with Image.open("out.png") as image:
        assert image.text["parameters"].startswith(prompt)


def test_a_random_seed_is_printed(go):
    _, out, err = go("a cat", "--seed", "random", "--json")
    assert err == f"seed {json.loads(out)['pictures'][0]['seed']}\n"


def test_words_that_were_cut_are_printed(go):
    code, _, err = go("a cat " + "on the house " * 6)
    assert code == 0
    assert err.startswith("warning: the prompt 'a cat on")
    assert err.endswith("these words were cut: on the house on the house\n")


REFUSED = {
    "no prompt": ([], "no prompt was given"),
    "steps nought": (["a", "--steps", "0"], "steps 0 is less than 1"),
    "steps without a table": (["a", "--steps", "101"], "no table for 101 steps"),
    "scheduler": (["a", "--scheduler", "eular"], "did you mean euler"),
    "seed": (["a", "--seed", "seven"], "seed 'seven' is not a whole number"),
    "threads nought": (["a", "--threads", "0"], "0 threads"),
    "height": (["a", "--height", "60"], "nearest: 56 or 64"),
    "no such image": (["a", "--image", "gone.png"], "there is no picture gone.png"),
    "strength alone": (["a", "--strength", "0.5"], "no image was given"),
    "output that is no PNG": (["a", "-o", "out.jpg"], "does not end in .png"),
    "prompt that is not UTF-8": (["caf\udce9"], "prompt 1 is not UTF-8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(go, case):
    arguments, message = REFUSED[case]
    code, out, err = go(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert files() == []


def test_a_folder_that_cannot_be_written_is_found_before_anything_runs(go, monkeypatch):
    from trtdiff.pipeline import Pipeline

    monkeypatch.setattr(Pipeline, "run", lambda *_, **__: pytest.fail("it ran"))
    Path("file").touch()
    code, _, err = go("a cat", "-o", "file/out.png")
    assert code == 1
    assert "cannot write out.json" in err


def test_an_interruption_keeps_what_was_finished_and_leaves_nothing_half_written(go, monkeypatch):
    from trtdiff.output import Output

    write = Output.write

    def interrupted(self, picture):
        if picture.index == 1:
            raise KeyboardInterrupt
        return write(self, picture)

    monkeypatch.setattr(Output, "write", interrupted)
    code, out, _ = go("a cat", "--count", 3)
    assert (code, out, files()) == (130, "out-0.png\n", ["out-0.png"])


def test_a_path_that_is_no_bundle(tmp_path, capsys):
    assert run(["run", str(tmp_path), "a cat"]) == 4
    assert "is not a bundle" in capsys.readouterr().err


def on_a_terminal(bundle, folder, stdout):
    """What a terminal of 100 columns shows of a run; `stdout` None: both streams go there."""
    main, terminal = os.openpty()
    code = "import sys; from trtdiff.cli import main; main(sys.argv[1:])"
    command = [
        sys.executable,
        "-c",
        code,
        "run",
        str(bundle),
        "a cat",
        "--count",
        "2",
        "--steps",
        "2",
        "--threads",
        "1",
    ]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, cwd=folder, stdout=stdout or terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # Linux ends a terminal that nobody holds with an error
            while piece := os.read(main, 4096):
                shown += piece
    os.close(main)
    assert process.returncode == 0
    return shown.decode()


def test_a_terminal_shows_progress_and_every_path_on_a_line_of_its_own(tiny_bundle, tmp_path):
    shown = on_a_terminal(tiny_bundle, tmp_path, None)
    assert "2/2" in shown
    for path in ("out-0.png", "out-1.png", "out.json"):
        assert f"\x1b[2K{path}\r\n" in shown  # the line was cleared of the bar first
    assert "2 pictures in" in shown


def test_a_pipe_gets_the_paths_alone_even_where_errors_go_to_a_terminal(tiny_bundle, tmp_path):
    with (tmp_path / "list").open("wb") as pipe:
        shown = on_a_terminal(tiny_bundle, tmp_path, pipe)
    assert "2/2" in shown
    assert (tmp_path / "list").read_text() == "out-0.png\nout-1.png\nout.json\n"


def test_a_reader_that_leaves_early_costs_no_picture(tiny_bundle, tmp_path):
    code = "import sys; from trtdiff.cli import exit_code; sys.exit(exit_code(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "run", str(tiny_bundle), "a", "b", "c", "--steps", "1", "--threads", "1"]
    process = subprocess.Popen([*command, "-o", str(tmp_path / "x.png")], stdout=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.wait() == 0
    assert files(tmp_path) == ["x-0.png", "x-1.png", "x-2.png", "x.json"]


def test_a_full_standard_output_is_one_clear_line(tiny_bundle, tmp_path):
    code = "import sys; from trtdiff.cli import exit_code; sys.exit(exit_code(sys.argv[1:]))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code, "doctor"], stdout=full, stderr=subprocess.PIPE, text=True,
                              check=False)  # fmt: skip
    assert "cannot write to standard output" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode != 0


@pytest.mark.parametrize("name", ["a" * 300 + ".png", "taken.png", "both.png"])
def test_names_that_cannot_be_written_are_refused_before_anything_runs(go, name):
    Path("taken.png").mkdir()
    Path("both-1.png").mkdir()
    code, out, err = go("a cat", "--count", 2, "-o", name)
    assert (code, out) == (2, "")
    assert "is a folder" in err or "cannot be a file's name" in err
