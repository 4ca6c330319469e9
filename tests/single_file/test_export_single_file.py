"""A file in the original layout through export: the graphs compute what its modules compute."""

import json

import numpy as np
import pytest

from trtdiff.checkpoint import Checkpoint
from trtdiff.cli import exit_code
from trtdiff.export.check import relative_l2
from trtdiff.parity.reference import PictureRequest, Reference

pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def exported(single_file, tmp_path_factory):
    """`trtdiff export` of a tiny Stable Diffusion 1: its folder."""
    made, out = single_file("sd1"), tmp_path_factory.mktemp("exports") / "tiny"
    options = ["--tokenizer", made.tokenizer, "--components", "text_encoder,denoiser,vae_decoder", "--no-check"]
    assert exit_code(["export", str(made.path), "-o", str(out), *options]) == 0
    return out


def normal(*shape):
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def test_graphs_compute_what_the_modules_compute(exported, single_file):
    import onnxruntime
    import torch

    modules = single_file("sd1").modules
    states, latent = normal(2, 16, 64), normal(2, 4, 16, 24)
    feeds = {
        "text_encoder": {"input_ids": np.arange(32).reshape(2, 16), "clip_skip": np.zeros(1, np.int64)},
        "denoiser": {"sample": latent, "timestep": np.float32([7, 801]), "encoder_hidden_states": states},
        "vae_decoder": {"latent": latent},
    }
    scale = 0.18215
    with torch.inference_mode():
        given = {name: {key: torch.from_numpy(value) for key, value in feed.items()} for name, feed in feeds.items()}
        expected = {
            "text_encoder": modules["text_encoder"](given["text_encoder"]["input_ids"]).last_hidden_state,
            "denoiser": modules["unet"](**given["denoiser"]).sample,
            "vae_decoder": modules["vae"].decode(given["vae_decoder"]["latent"] / scale).sample,
        }
    for name, feed in feeds.items():
        session = onnxruntime.InferenceSession(str(exported / f"{name}.onnx"), providers=["CPUExecutionProvider"])
        assert relative_l2(session.run(None, feed)[0], expected[name].numpy()) < 1e-5, name


def test_every_component_has_a_file_of_its_own_tensors(exported, single_file):
    sizes = {file.name: file.stat().st_size for file in (exported / "weights").iterdir()}
    assert sizes.keys() == {"text_encoder.safetensors", "unet.safetensors", "vae.safetensors"}
    assert sum(sizes.values()) < 1.02 * single_file("sd1").path.stat().st_size
    manifest = json.loads((exported / "export.json").read_text())
    assert manifest["checkpoint"]["name"] == "sd1"
    assert manifest["scheduler"]["_class_name"] == "PNDMScheduler"


def test_the_reference_is_what_diffusers_loads(single_file):
    import diffusers
    import torch

    made = single_file("sd1")
    opened = Checkpoint.open(str(made.path), tokenizer=made.tokenizer)
    request = PictureRequest(
        prompts=("a red cat",), negative="", seed=3, steps=2, guidance=3.0, height=64, width=64, scheduler="ddim"
    )
    ours = Reference(opened).pictures(request)
    pipeline = diffusers.StableDiffusionPipeline(
        **made.modules, tokenizer=diffusers.StableDiffusionPipeline.from_pretrained(made.tokenizer).tokenizer,
        scheduler=diffusers.DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
            set_alpha_to_one=False, steps_offset=1,
        ),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    theirs = pipeline(
        "a red cat", num_inference_steps=2, guidance_scale=3.0, height=64, width=64, output_type="latent",
        generator=torch.Generator().manual_seed(3),
    ).images  # fmt: skip
    assert relative_l2(ours.latents[-1], theirs.numpy()) < 1e-5


@pytest.mark.parametrize(("kind", "component"), [("sdxl", "text_encoder_2"), ("sd1-inpainting", "denoiser")])
def test_other_kinds_are_exported_and_agree_with_pytorch(kind, component, single_file, tmp_path):
    made = single_file(kind)
    options = ["--tokenizer", made.tokenizer, "--components", component]
    assert exit_code(["export", str(made.path), "-o", str(tmp_path / "x"), *options]) == 0
    manifest = json.loads((tmp_path / "x/export.json").read_text())
    assert max(error for point in manifest["checks"][component] for error in point["relative_l2"].values()) < 1e-5


def test_what_no_family_compiles_is_named_by_its_file(single_file, tmp_path, capsys, monkeypatch):
    from trtdiff import families

    made = single_file("sd1-inpainting")
    monkeypatch.setattr(families, "FAMILIES", {"flux": families.FAMILIES["flux"]})
    assert exit_code(["export", str(made.path), "--tokenizer", made.tokenizer, "-o", str(tmp_path / "x")]) == 1
    assert "its tensors are those of Stable Diffusion 1.x inpainting" in capsys.readouterr().err
