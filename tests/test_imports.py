"""The runtime loads none of the libraries that made the bundle."""

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "diffusers", "transformers", "onnx", "onnx_ir", "onnxscript", "huggingface_hub"}


def loaded(code, *arguments):
    """Names of the top-level modules that a fresh process has after `code`."""
    report = "\nimport json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code + report, *arguments], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_not_even_numpy():
    assert not loaded("import trtdiff") & (HEAVY | {"numpy", "PIL", "msgspec", "onnxruntime"})


@pytest.mark.parametrize("help_of", [[], ["run"]])
def test_help_loads_no_numeric_library(help_of):
    arguments = [*help_of, "--help"]
    assert not loaded(f"from trtdiff.cli import exit_code; exit_code({arguments!r})") & (
        HEAVY | {"numpy", "PIL", "onnxruntime"}
    )


def test_a_whole_run_loads_nothing_heavy(tiny_bundle, tmp_path):
    code = """
import sys
import trtdiff
with trtdiff.load(sys.argv[1], threads=1) as pipeline:
    result = pipeline("a cat", steps=2)
    result = pipeline("a cat", steps=2, image=result.images[0])
    result.pictures[0].save(sys.argv[2])
"""
    found = loaded(code, str(tiny_bundle), str(tmp_path / "out.png"))
    assert not found & HEAVY
    assert {"numpy", "PIL", "tokenizers", "onnxruntime"} <= found
    assert (tmp_path / "out.png").is_file()
