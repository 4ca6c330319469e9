"""`trtdiff inspect`: everything that trtdiff makes or reads says what it is; what is damaged says so."""

import json
import shutil

import pytest
from PIL import Image, PngImagePlugin

from trtdiff.cli import exit_code as run
from trtdiff.describe import describe
from trtdiff.errors import ArtefactError, UsageError


@pytest.fixture(scope="module")
def made(tiny_bundle, tiny_checkpoint, tmp_path_factory):
    """One of every kind, by the name `inspect` should give it."""
    folder = tmp_path_factory.mktemp("made")
    code = run(["run", str(tiny_bundle), "a cat", "--steps", "2", "--threads", "1", "-o", str(folder / "cat.png")])
    assert code == 0
    exported = tiny_bundle.parent.parent / "exports/tiny"
    engine = next((tiny_bundle / "engines").iterdir())
    return {
        "diffusers checkpoint": tiny_checkpoint,
        "export": exported,
        "ONNX graph": exported / "denoiser.onnx",
        "bundle": tiny_bundle,
        "store entry": engine,
        "weights": tiny_checkpoint / "unet/diffusion_pytorch_model.safetensors",
        "sampler tables": tiny_bundle / "samplers.safetensors",
        "picture": folder / "cat.png",
        "receipt": folder / "cat.json",
    }


KINDS = {
    "diffusers checkpoint": ["StableDiffusionPipeline", "UNet2DConditionModel", "unet"],
    "export": ["DDIMScheduler", "denoiser", "sample: float32"],
    "ONNX graph": ["ai.onnx 23", "Conv", "unet.safetensors", "down_blocks"],
    "bundle": ["fp32", "onnxruntime", "euler_a", "vae_decoder"],
    "store entry": ["onnxruntime", "weights", "libraries"],
    "weights": ["float32", "largest tensors"],
    "sampler tables": ["ddim", "DPMSolverMultistepScheduler"],
    "picture": ["a cat", "64x64"],
    "receipt": ["a cat", "step", "2 steps"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_known_and_explained_in_words_and_json(made, kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["inspect", str(made[kind]), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == kind
    assert run(["inspect", str(made[kind])]) == 0
    said = capsys.readouterr().out
    for word in KINDS[kind]:
        assert word in said, (word, said)


def test_numbers_are_those_of_the_files(made):
    import safetensors

    rows = describe(made["diffusers checkpoint"]).tables[0].rows
    parameters = {row[0]: row[2] for row in rows}
    file = made["diffusers checkpoint"] / "unet/diffusion_pytorch_model.safetensors"
    with safetensors.safe_open(file, "numpy") as weights:
        count = sum(weights.get_tensor(name).size for name in weights.keys())  # noqa: SIM118 - not a mapping
    assert parameters["unet"] == f"{count / 1e6:.1f} M"


def test_a_file_inside_of_a_folder_stands_for_it(made):
    assert describe(made["bundle"] / "bundle.json").kind == "bundle"
    assert describe(made["export"] / "export.json").kind == "export"


@pytest.mark.parametrize("kind", ["ONNX graph", "sampler tables", "picture", "receipt"])
def test_a_damaged_file_is_an_error_that_names_it(made, kind, tmp_path):
    damaged = tmp_path / made[kind].name
    damaged.write_bytes(made[kind].read_bytes()[: made[kind].stat().st_size // 2])
    with pytest.raises(ArtefactError) as caught:
        describe(damaged)
    assert damaged.name in f"{caught.value.message} {caught.value.where}"


def test_damaged_parameters_of_a_picture_are_told(made, tmp_path):
    texts = PngImagePlugin.PngInfo()
    texts.add_itxt("trtdiff", '{"prompt": "a c')
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png", pnginfo=texts)
    with pytest.raises(ArtefactError, match="parameters are damaged"):
        describe(tmp_path / "x.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "y.png")
    assert "not made by trtdiff" in str(describe(tmp_path / "y.png").facts)


def test_a_bundle_without_an_engine_is_told(made, tmp_path):
    copied = shutil.copytree(made["bundle"], tmp_path / "copy")
    shutil.rmtree(next((copied / "engines").iterdir()))
    with pytest.raises(ArtefactError):
        describe(copied)


def test_what_nobody_knows_is_a_usage_error(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    for path, words in ((tmp_path / "x.txt", "nothing that trtdiff knows"), (tmp_path / "no", "there is nothing at")):
        with pytest.raises(UsageError, match=words):
            describe(path)


@pytest.mark.parametrize("text", ['{"a": NaN}', "[[1, 2]]", "[" * 100_000])
def test_parameters_that_are_no_record_are_damaged(tmp_path, text):
    texts = PngImagePlugin.PngInfo()
    texts.add_itxt("trtdiff", text)
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png", pnginfo=texts)
    with pytest.raises(ArtefactError, match="parameters are damaged"):
        describe(tmp_path / "x.png")
