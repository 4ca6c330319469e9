"""A bundle: self-contained, relocatable, checked; every way it can be damaged names the file."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from trtdiff.bundle import BUNDLE_SCHEMA, Bundle
from trtdiff.errors import ArtefactError, UsageError

SAMPLERS = b"tables"


@pytest.fixture(scope="module")
def built(tmp_path_factory, export_maker):
    """A bundle of the toy export, built without worker processes and with bytes instead of sampler tables."""
    from trtdiff import worker
    from trtdiff.build import build
    from trtdiff.export.read import read_export
    from trtdiff.lowering import build_engine
    from trtdiff.plan import make_plan
    from trtdiff.store import Store

    def run(task, arguments, **_):
        if task.endswith("build_engine"):
            value = build_engine(**arguments, progress=lambda done, total: None)
            return worker.Outcome(value, 0.1, 1)
        Path(arguments["out"], "samplers.safetensors").write_bytes(SAMPLERS)
        return worker.Outcome({"realised": {"samplers": arguments["names"]}}, 0.1, 1)

    folder = tmp_path_factory.mktemp("bundle")
    export = export_maker(folder / "exports/toy")
    plan = make_plan(
        read_export(export),
        name="toy",
        precision="fp32",
        targets=["cpu"],
        schedulers=("ddim",),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "run", run)
        return build(plan, export, folder / "engines/toy", Store(folder / "engines")).bundle


@pytest.fixture
def bundle(built, tmp_path):
    """A copy, far from export and store, that a test may damage."""
    shutil.copytree(built, tmp_path / "elsewhere/toy")
    return tmp_path / "elsewhere/toy"


def test_everything_a_runtime_needs_is_in_it(bundle):
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    assert (manifest.name, manifest.family, manifest.precision) == ("toy", "stable-diffusion", {"onnxruntime": "fp32"})
    assert manifest.facts.latent.downscale == 8
    assert str(manifest.profile) == "batch=1:1:4,height=32:64:128,width=32:64:128,branches=1:2:2,tokens=9,context=9"
    assert manifest.samplers == ("default", "ddim")
    assert opened.components("onnxruntime") == ("text_encoder", "denoiser", "vae_decoder", "vae_encoder")
    assert json.loads(opened.tokenizer("tokenizer").read_text()) == {"version": "1.0"}
    assert opened.samplers.read_bytes() == SAMPLERS
    assert (opened.engine("onnxruntime", "denoiser") / "model.onnx").is_file()


def test_no_file_of_it_mentions_the_machine_that_made_it(bundle, built):
    words = [str(built.parents[1]).encode(), os.uname().nodename.encode()]
    for path in bundle.rglob("*"):
        if path.is_file():
            assert not any(word in path.read_bytes() for word in words), path


def test_it_works_wherever_it_is_moved(bundle, tmp_path, monkeypatch):
    from trtdiff.backends import backend

    moved = tmp_path / "a place with spaces é"
    bundle.rename(moved)
    monkeypatch.chdir(tmp_path)
    opened = Bundle.open(Path(moved.name))
    opened.verify(fresh=True)
    with backend("onnxruntime").load(opened.engine("onnxruntime", "vae_decoder"), threads=1) as session:
        feeds = {"window": np.ones((1, 1, 4, 4, 4), np.float32), "coefficients": np.ones((1, 1), np.float32)}
        feeds |= {"mask": np.ones((1, 1, 4, 4), np.float32), "known": np.zeros((2, 1, 4, 4, 4), np.float32)}
        feeds |= {"known_coefficients": np.zeros((2, 1), np.float32)}
        assert session.run(feeds)["image"].shape == (1, 3, 32, 32)


def engine_folder(bundle, component="denoiser"):
    return next(bundle.glob("engines/*")).parent / Bundle.open(bundle).manifest.engines["onnxruntime"][component]


def test_opening_looks_at_sizes_and_presence(bundle):
    entry = engine_folder(bundle)
    (entry / "engine/model.onnx").unlink()
    with pytest.raises(ArtefactError, match=r"engine/model.onnx cannot be read: No such file") as caught:
        Bundle.open(bundle)
    assert str(entry) in caught.value.where
    assert "build again" in caught.value.hint


@pytest.mark.parametrize("name", ["samplers.safetensors", "tokenizers/tokenizer.json"])
def test_a_missing_file_is_named(bundle, name):
    (bundle / name).unlink()
    with pytest.raises(ArtefactError, match=f"{name} cannot be read"):
        Bundle.open(bundle)


@pytest.mark.parametrize("name", ["samplers.safetensors", "tokenizers/tokenizer.json"])
def test_changed_bytes_are_found_where_they_are_used(bundle, name):
    path = bundle / name
    path.write_bytes(path.read_bytes()[::-1])
    opened = Bundle.open(bundle)
    with pytest.raises(ArtefactError, match=f"{name} is damaged"):
        opened.samplers if name.startswith("samplers") else opened.tokenizer("tokenizer")
    with pytest.raises(ArtefactError, match=f"{name} is damaged"):
        opened.verify()


def test_a_changed_engine_is_found_where_it_is_used(bundle):
    model = engine_folder(bundle) / "engine/model.onnx"
    model.write_bytes(model.read_bytes()[::-1])
    opened = Bundle.open(bundle)
    opened.engine("onnxruntime", "vae_decoder")
    with pytest.raises(ArtefactError, match=r"engine/model.onnx is damaged"):
        opened.engine("onnxruntime", "denoiser")


def edited(bundle, **fields):
    path = bundle / "bundle.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_bundle_of_a_newer_schema_says_so(bundle):
    edited(bundle, schema=BUNDLE_SCHEMA + 1)
    with pytest.raises(ArtefactError, match=f"bundle.json has schema {BUNDLE_SCHEMA + 1}") as caught:
        Bundle.open(bundle)
    assert "upgrade trtdiff" in caught.value.hint
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"precision": 7}, r"\$\.precision"),
        ({"files": {"../../secret": {"size": 1, "sha256": "0"}}}, "outside of its folder"),
        ({"engines": {"onnxruntime": {"denoiser": "0" * 32}}}, "the bundle lists no engines/0"),
    ],
)
def test_a_bundle_that_was_edited(bundle, fields, says):
    edited(bundle, **fields)
    with pytest.raises(ArtefactError, match=says):
        Bundle.open(bundle)


def test_a_truncated_manifest(bundle):
    os.truncate(bundle / "bundle.json", 100)
    with pytest.raises(ArtefactError, match=r"bundle.json is damaged"):
        Bundle.open(bundle)


def test_a_folder_that_is_no_bundle(tmp_path):
    with pytest.raises(ArtefactError, match="is not a bundle") as caught:
        Bundle.open(tmp_path)
    assert "trtdiff build" in caught.value.hint


def test_what_it_does_not_have_is_named_with_what_it_has(bundle):
    opened = Bundle.open(bundle)
    with pytest.raises(UsageError, match="no engines for tensorrt") as caught:
        opened.engine("tensorrt", "denoiser")
    assert "onnxruntime" in caught.value.hint
    with pytest.raises(ArtefactError, match="no controlnet"):
        opened.engine("onnxruntime", "controlnet")
    with pytest.raises(ArtefactError, match="no tokenizer 'tokenizer_2'"):
        opened.tokenizer("tokenizer_2")
    assert opened.components("tensorrt") == ()


def test_reading_a_bundle_imports_no_compiler(bundle):
    import subprocess
    import sys

    program = f"""
import sys
from pathlib import Path
from trtdiff.bundle import Bundle
Bundle.open(Path({str(bundle)!r})).verify()
assert not {{"torch", "diffusers", "transformers", "onnx", "onnx_ir", "onnxruntime"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
