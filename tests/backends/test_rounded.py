"""The backend that shows half precision on a CPU: the whole product runs on it, and is as exact as its recipe says."""

import json

import numpy as np
import pytest

import trtdiff
from trtdiff.cli import exit_code as run


@pytest.fixture(scope="module", params=["fp16", "bf16"])
def made(request, tiny_bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "tiny"
    command = ["build", str(tiny_bundle.parent.parent / "exports/tiny"), "-o", str(folder), "--schedulers", "ddim"]
    sizes = "batch=1:1:2,height=32:64:64,width=32:64:64"
    assert run([*command, "--target", "rounded", "--precision", request.param, "--profile", sizes]) == 0
    return request.param, folder


def test_it_differs_from_float32_by_no_more_than_its_recipe_says(made, tiny_checkpoint, capsys):
    precision, folder = made
    command = ["check", str(folder), "--against", str(tiny_checkpoint), "--steps", "4", "--json"]
    assert run(command) == 0
    report = json.loads(capsys.readouterr().out)
    needed = {row["name"]: row["needed"] for row in report["results"]}
    least = {"fp16": 2**-12, "bf16": 2**-9}[precision]  # half a unit in the last place
    assert needed["denoiser.prediction"] > least / 4  # and is not float32 in disguise
    assert needed["denoiser.latent"] < 1e-6  # the sampler's sums are float32


def test_pictures_are_close_to_those_of_float32(made, tiny_bundle):
    precision, folder = made
    pictures = []
    for bundle in (folder, tiny_bundle):
        with trtdiff.load(bundle, threads=1) as pipeline:
            result = pipeline("a red cat", steps=6, seed=3)
            pictures.append(np.asarray(result.images[0], dtype=float))
    error = np.mean((pictures[0] - pictures[1]) ** 2)
    assert 10 * np.log10(255**2 / error) > 0
    assert 10 * np.log10(255**2 / error) > {"fp16": 45, "bf16": 30}[precision]
