"""`trtdiff calibrate` on a toy: what it says, what it keeps, what it refuses."""

import errno
import json
import shutil

import pytest

from trtdiff.calibrate.cache import read_cache
from trtdiff.calibrate.opened import Opened
from trtdiff.cli import exit_code as run

pytest.importorskip("torch")
FEW = ["--samples", "4", "--steps", "4", "--bands", "4"]


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory, toy_maker):
    return toy_maker(tmp_path_factory.mktemp("made") / "toy")


@pytest.fixture(scope="module")
def made(toy_folder, tmp_path_factory):
    """A finished cache, by default settings but for their number."""
    out = tmp_path_factory.mktemp("calibration") / "toy.json"
    assert run(["calibrate", str(toy_folder), "-o", str(out), *FEW]) == 0
    return out


@pytest.fixture
def cache(made, tmp_path):
    return shutil.copy(made, tmp_path / "toy.json")


@pytest.fixture
def here(toy_folder, tmp_path, monkeypatch):
    """A working folder with one export."""
    shutil.copytree(toy_folder, tmp_path / "exports/toy")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_arguments_every_default_is_said(here, capsys):
    assert run(["calibrate", *FEW, "--method", "max", "--no-sensitivity", "--json"]) == 0
    said = capsys.readouterr()
    assert "export exports/toy (the only one there is)" in said.err
    assert "cache calibration/toy.json (default)" in said.err
    assert "prompts 2 of the family stable-diffusion (default" in said.err
    assert "4 samples in 4 bands, 2 prompts, 4 steps, guidance 7.5, seed 0, 64x64, method max; about" in said.err
    about = json.loads(said.out)
    assert about["complete"]
    assert about["digest"] == read_cache(here / "calibration/toy.json").digest
    assert about["components"]["denoiser"] == {"rows": 8, "values": 16, "layers": 7}
    assert sorted(file.name for file in (here / "calibration").iterdir()) == [".locks", "toy.json"]


def test_what_is_there_already_is_left_alone(cache, toy_folder, capsys):
    before = cache.read_bytes()
    assert run(["calibrate", str(toy_folder), "-o", str(cache), *FEW]) == 0
    assert "is up to date" in capsys.readouterr().err
    assert run(["calibrate", str(toy_folder), "-o", str(cache), *FEW, "--seed", "1"]) == 4
    assert "pictures[0].seed is 0 there, 1 here" in capsys.readouterr().err
    assert run(["calibrate", str(toy_folder), "-o", str(cache), *FEW, "--method", "percentile"]) == 2
    said = capsys.readouterr().err
    assert "lacks what is asked for now" in said
    assert "--resume goes on, --force begins anew" in said
    assert cache.read_bytes() == before


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(toy_folder, made, tmp_path, monkeypatch, capsys):
    out, execute, executions = tmp_path / "toy.json", Opened.run, iter(range(100))

    def interrupted(self, feeds):
        if next(executions) == 9:
            raise KeyboardInterrupt
        return execute(self, feeds)

    command = ["calibrate", str(toy_folder), "-o", str(out), *FEW]
    with monkeypatch.context() as patch:
        patch.setattr(Opened, "run", interrupted)
        assert run(command) == 130
    said = capsys.readouterr().err
    assert "interrupted" in said
    assert "(samples by pass: range 3 of 4); add --resume to the same command to go on" in said
    assert not read_cache(out).complete
    assert run(command) == 2
    assert "is not finished" in capsys.readouterr().err
    assert run([*command, "--resume"]) == 0
    assert out.read_bytes() == made.read_bytes()
    assert [file.name for file in tmp_path.iterdir() if "calibrating" in file.name] == []


def test_prompts_come_from_a_file(toy_folder, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfabc\r\n\r\nx y\r\n")
    out = tmp_path / "toy.json"
    command = ["calibrate", str(toy_folder), "-o", str(out), *FEW, "--method", "max", "--no-sensitivity"]
    assert run([*command, "--prompts", str(tmp_path / "prompts.txt"), "--samples", "8"]) == 0
    assert "1 blank lines were left out (line 2)" in capsys.readouterr().err
    assert [picture.prompt for picture in read_cache(out).runs[0].pictures] == ["abc", "x y"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--samples", "0"], "0 samples"),
        (["--samples", "3"], "3 samples for 8 timestep bands"),
        (["--steps", "5"], "with 5 steps, no step falls into the timesteps 250 to 374, 625 to 749, 875 to 999"),
        (["--steps", "0"], "2 prompts, 0 steps"),
        (["--steps", "100000"], "100000 steps, of a model that was trained on"),
        (["--guidance", "nan"], "guidance nan"),
        (["--height", "0"], "height 0 is not a multiple of"),
        (["--width", "63"], "width 63 is not a multiple of"),
        (["--bands", "0"], "0 bands"),
        (["--prompts", "none.txt"], "cannot read the prompts"),
        (["--merge", "a.json", "--export-tensorrt", "b"], "one thing at a time"),
    ],
)
def test_what_cannot_be_meant_is_said(toy_folder, tmp_path, options, words, capsys):
    assert run(["calibrate", str(toy_folder), "-o", str(tmp_path / "toy.json"), *options]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "to do:" in said or "where:" in said
    assert not (tmp_path / "toy.json").exists()


def test_two_caches_merge(cache, toy_folder, tmp_path, capsys):
    other = tmp_path / "other.json"
    assert run(["calibrate", str(toy_folder), "-o", str(other), *FEW, "--seed", "9"]) == 0
    assert run(["calibrate", str(toy_folder), "-o", str(cache), "--merge", str(other)]) == 0
    assert "8 samples of 2 calibrations" in capsys.readouterr().err
    assert len(read_cache(cache).runs) == 2
    assert run(["calibrate", str(toy_folder), "-o", str(cache), "--merge", str(other)]) == 4
    assert "it would count twice" in capsys.readouterr().err


def test_a_merge_that_would_lose_a_pass_changes_nothing(cache, toy_folder, tmp_path, capsys):
    other, before = tmp_path / "other.json", cache.read_bytes()
    assert run(["calibrate", str(toy_folder), "-o", str(other), *FEW, "--seed", "9", "--method", "max"]) == 0
    merge = ["calibrate", str(toy_folder), "-o", str(cache), "--merge", str(other)]
    assert run(merge) == 2
    assert "would lose what was measured" in capsys.readouterr().err
    assert cache.read_bytes() == before
    assert run([*merge, "--force"]) == 0
    assert len(read_cache(cache).runs) == 2


def test_what_is_up_to_date_gives_its_digest(cache, toy_folder, capsys):
    assert run(["calibrate", str(toy_folder), "-o", str(cache), *FEW, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == read_cache(cache).digest


def test_tensorrts_own_format_goes_out_and_in(cache, toy_folder, tmp_path, capsys):
    text, again = tmp_path / "calib.cache", tmp_path / "again.json"
    assert run(["calibrate", str(toy_folder), "-o", str(cache), "--export-tensorrt", str(text)]) == 0
    assert "those of inputs of layers by mse" in capsys.readouterr().err
    assert text.read_text().startswith("TRT-")
    assert run(["calibrate", str(toy_folder), "-o", str(again), "--import-tensorrt", str(text)]) == 0
    values, back = (read_cache(path).components["denoiser"].values for path in (cache, again))
    assert back.keys() == values.keys()
    assert back["prediction"].largest == pytest.approx(values["prediction"].largest, rel=1e-6)
    assert run(["calibrate", str(toy_folder), "-o", str(again), "--import-tensorrt", str(text)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_nothing_that_is_there_is_written_over(cache, toy_folder, tmp_path, capsys):
    text, before = tmp_path / "calib.cache", cache.read_bytes()
    calibrate = ["calibrate", str(toy_folder), "-o", str(cache)]
    assert run([*calibrate, "--export-tensorrt", str(cache), "--force"]) == 2
    assert run([*calibrate, "--export-tensorrt", str(text)]) == 0
    scales = text.read_bytes()
    assert run([*calibrate, "--export-tensorrt", str(text)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert run([*calibrate, "--export-tensorrt", str(text), "--force"]) == 0
    assert run(["calibrate", str(toy_folder), "-o", str(text), "--import-tensorrt", str(text), "--force"]) == 2
    assert (cache.read_bytes(), text.read_bytes()) == (before, scales)
    assert run(["calibrate", str(toy_folder), "-o", str(tmp_path), *FEW]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_an_interrupted_new_beginning_keeps_what_stood_there(cache, toy_folder, monkeypatch, capsys):
    """Beside it where the new one has seen something; in its place where it has not."""
    before, spare, execute = cache.read_bytes(), cache.with_name("toy.before.json"), Opened.run
    command = ["calibrate", str(toy_folder), "-o", str(cache), *FEW, "--seed", "5"]
    for limit, kept in ((0, cache), (9, spare)):
        executions = iter(range(100))

        def interrupted(self, feeds, executions=executions, limit=limit):
            if next(executions) == limit:
                raise KeyboardInterrupt
            return execute(self, feeds)

        with monkeypatch.context() as patch:
            patch.setattr(Opened, "run", interrupted)
            assert run([*command, "--force"]) == 130
        assert kept.read_bytes() == before
    assert f"what stood there before is {spare}" in capsys.readouterr().err
    assert run([*command, "--resume"]) == 0
    assert read_cache(cache).complete
    assert not spare.exists()


def test_a_full_disk_and_a_lost_export_are_said(toy_folder, tmp_path, monkeypatch, capsys):
    command = ["calibrate", "-o", str(tmp_path / "toy.json"), *FEW]

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("trtdiff.calibrate.opened.write_graph", full)
        assert run([*command, str(toy_folder)]) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "to do: free some space" in said
    assert not (tmp_path / "toy.json").exists()

    def lost(*_, **__):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "weights/unet.safetensors")

    monkeypatch.setattr("trtdiff.calibrate.opened.write_graph", lost)
    assert run([*command, str(toy_folder)]) == 4
    assert "a file of the export is gone: weights/unet.safetensors" in capsys.readouterr().err


def test_an_export_that_is_replaced_meanwhile_leaves_no_cache(toy_folder, tmp_path, monkeypatch, capsys):
    copied = shutil.copytree(toy_folder, tmp_path / "export")
    about, execute = copied / "export.json", Opened.run

    def replacing(self, feeds):
        about.write_text(
            about.read_text().replace('"name": "toy"', '"name": "other"').replace('"name":"toy"', '"name":"other"')
        )
        return execute(self, feeds)

    monkeypatch.setattr(Opened, "run", replacing)
    assert run(["calibrate", str(copied), "-o", str(tmp_path / "toy.json"), *FEW]) == 4
    assert "replaced while it was calibrated" in capsys.readouterr().err
    assert not (tmp_path / "toy.json").exists()


def test_inspect_shows_a_cache_and_its_sensitivity(cache, tmp_path, capsys):
    assert run(["inspect", str(cache)]) == 0
    said = capsys.readouterr().out
    for words in ("calibration cache", "coverage", "999 … 750", "denoiser: largest tensors", "schedule",
                  "riskiest inputs of layers", "amax / rms"):  # fmt: skip
        assert words in said
    plot = tmp_path / "plot.svg"
    pytest.importorskip("matplotlib")
    assert run(["inspect", str(cache), "--sensitivity", "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert "worst in float8" in said
    assert "denoiser: blocks.drawn (conv)" in said
    assert plot.read_text().lstrip().startswith("<?xml")
    assert run(["inspect", str(cache), "--plot", str(tmp_path / "plot.doc")]) == 2
    assert run(["inspect", str(plot), "--sensitivity"]) == 2
    assert "is no calibration cache" in capsys.readouterr().err


def test_sensitivity_that_was_not_measured_says_how_to(toy_folder, tmp_path, capsys):
    out = tmp_path / "toy.json"
    assert run(["calibrate", str(toy_folder), "-o", str(out), *FEW, "--method", "max", "--no-sensitivity"]) == 0
    assert run(["inspect", str(out), "--sensitivity"]) == 4
    assert "--resume --sensitivity" in capsys.readouterr().err
