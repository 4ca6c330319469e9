import json
import subprocess
import sys

import onnxruntime
import torch

from trtdiff.backends.gpu import Gpu
from trtdiff.cli import exit_code as run
from trtdiff.cli.doctor import diagnose
from trtdiff.errors import MissingDependency


def test_it_reports_the_versions_that_are_imported(capsys):
    assert run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    libraries = {item["name"]: item["found"] for extra in found["libraries"].values() for item in extra}
    assert libraries["torch"] == torch.__version__
    assert libraries["onnxruntime"] == onnxruntime.__version__
    cannot = {verb for verb, answer in found["can"].items() if answer != "yes"}
    assert cannot <= {"run (tensorrt)", "run (tensorrt-rtx)", "build --target tensorrt"}  # those need a GPU


def test_a_missing_library_says_which_extra_to_install(monkeypatch):
    from trtdiff.cli import doctor

    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch" else real(name))
    found = diagnose()
    assert found.can["export"] == "no: torch missing; pip install 'trtdiff[compile]'"
    assert found.can["run (onnxruntime)"] == "yes"


def test_gpus_are_named_with_their_compute_capability(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("trtdiff.cli.doctor.gpus", lambda: (Gpu("NVIDIA L4", 89), Gpu("NVIDIA T4", 75)))
    assert diagnose().gpus == ("NVIDIA L4 (sm89)", "NVIDIA T4 (sm75)")
    assert run(["doctor"]) == 0
    assert "NVIDIA L4 (sm89), NVIDIA T4 (sm75)" in capsys.readouterr().out


def test_no_driver_is_no_gpu(monkeypatch):
    monkeypatch.setattr("trtdiff.cli.doctor.gpus", no_driver)
    assert diagnose().gpus == ()


def no_driver():
    raise MissingDependency("there is no NVIDIA driver here")


def test_both_onnxruntimes_together_are_a_problem(monkeypatch):
    from trtdiff.cli import doctor

    monkeypatch.setattr(doctor, "_version", lambda _name: "1.0")
    assert "overwrite each other" in diagnose().problems[0]


def test_it_imports_none_of_what_it_reports():
    code = (
        "import sys, trtdiff.cli.doctor as d; d.diagnose(); print({'torch', 'onnx', 'onnxruntime'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_extra_to_install_is_printed_with_its_brackets(monkeypatch, capsys):
    from trtdiff.cli import doctor

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch" else "1.0")
    assert run(["doctor"]) == 0
    assert "trtdiff[compile]" in capsys.readouterr().out


def test_fp16_without_what_its_scan_runs_on_says_how_to_go_on(monkeypatch):
    from trtdiff.backends.onnxruntime import OnnxRuntime

    def missing(self):
        raise MissingDependency("onnxruntime is not installed", hint="pip install 'trtdiff[cpu]'")

    monkeypatch.setattr(OnnxRuntime, "toolchain", missing)
    found = diagnose().can
    assert found["build --target rtx"].startswith("yes, with --no-range-scan: onnxruntime is not installed")
    assert found["build --target cpu"].startswith("no: onnxruntime is not installed")
