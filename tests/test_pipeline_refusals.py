"""What a pipeline refuses, and how it names what went wrong inside it."""

import json
import shutil

import numpy as np
import pytest

import trtdiff
from trtdiff.backends.onnxruntime import OnnxRuntime
from trtdiff.errors import ArtefactError, MissingDependency, NonFiniteError, ProfileError, UsageError

PROMPTS = ["a red cat", "the large green ship"]


@pytest.fixture(scope="module")
def pipeline(tiny_bundle):
    with trtdiff.load(tiny_bundle, threads=1) as loaded:
        yield loaded


def spoil(session, step, image, value):
    """Let the denoiser's prediction of one image be `value` at one of 6 ddim steps."""
    bind, calls = session.bind, []

    def spoiled(buffers):
        call = bind(buffers)
        number = len(calls)
        calls.append(call)

        def broken():
            call()
            if number == step:
                buffers["prediction"][image] = value

        return broken

    session.bind = spoiled


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_prediction_that_is_not_finite_is_found_with_its_step_and_picture(tiny_bundle, value):
    with trtdiff.load(tiny_bundle, threads=1) as pipeline:
        spoil(pipeline._engines.session("denoiser"), 2, 1, value)
        with pytest.raises(
            NonFiniteError, match=r"prediction at step 3 of 6 is not finite \(picture 2 of 2 in the batch\)"
        ):
            pipeline(PROMPTS, steps=6)
        pipeline("a cat", steps=6, height=32)  # other buffers, and nothing is left over


def test_a_picture_that_is_not_finite_blames_the_decoder(tiny_bundle):
    with trtdiff.load(tiny_bundle, threads=1) as pipeline:
        session = pipeline._engines.session("vae_decoder")
        run = session.run
        session.run = lambda feeds: {**(out := run(feeds)), "image": out["image"] * np.float32(np.nan)}
        with pytest.raises(NonFiniteError, match="the VAE decoder's picture is not finite"):
            pipeline("a cat", steps=1)


def test_a_prompt_that_cannot_be_encoded_is_named(tiny_bundle):
    with trtdiff.load(tiny_bundle, threads=1) as pipeline:
        session = pipeline._engines.session("text_encoder")
        session.run = lambda feeds: {"encoder_hidden_states": np.full((1, 16, 32), np.inf, np.float32)}
        with pytest.raises(
            NonFiniteError, match=r"encoder_hidden_states of the prompt 'a cat' is not finite"
        ) as caught:
            pipeline("a cat", guidance=1, steps=1)
        assert "text_encoder: in no layer when it is run again" in str(caught.value)  # the engine itself is sound


def test_a_bundle_can_be_moved(pipeline, tiny_bundle, tmp_path):
    shutil.copytree(tiny_bundle, tmp_path / "elsewhere/tiny")
    with trtdiff.load(tmp_path / "elsewhere/tiny", threads=1) as moved:
        assert moved("a cat", steps=2).receipt.pictures == pipeline("a cat", steps=2).receipt.pictures


def test_a_path_that_does_not_exist_is_a_request_that_cannot_be_meant(tmp_path):
    with pytest.raises(UsageError, match="there is no bundle"):
        trtdiff.load(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["", "bundle.json"])
def test_a_path_that_is_no_bundle(tmp_path, name):
    (tmp_path / "bundle.json").write_text("{")
    path = tmp_path / name if name else tmp_path
    with pytest.raises(ArtefactError, match="not a bundle" if name else "damaged"):
        trtdiff.load(path)


def test_a_family_that_is_not_known(changed_bundle):
    bundle = changed_bundle(lambda about: about.update(family="stable-diffusion-9"))
    with pytest.raises(ArtefactError, match=r"no model family is called 'stable-diffusion-9'"):
        trtdiff.load(bundle)


def test_an_engine_file_that_was_changed(changed_bundle):
    bundle = changed_bundle(lambda about: None)
    keys = json.loads((bundle / "bundle.json").read_text())["engines"]["onnxruntime"]
    file = next(path for path in (bundle / "engines" / keys["denoiser"]).rglob("*") if path.suffix == ".safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(ArtefactError, match=r"weights\.safetensors is damaged"):
        trtdiff.load(bundle)


def test_a_backend_that_the_bundle_lacks(changed_bundle):
    bundle = changed_bundle(
        lambda about: about.update(engines={"other": about["engines"]["onnxruntime"]}, precision={"other": "fp32"})
    )
    with pytest.raises(UsageError, match=r"has no engines for onnxruntime(.|\n)*it has them for other"):
        trtdiff.load(bundle, backend="onnxruntime")


def test_a_backend_that_does_not_exist(tiny_bundle):
    with pytest.raises(UsageError, match=r"no backend is called 'abacus'(.|\n)*onnxruntime"):
        trtdiff.load(tiny_bundle, backend="abacus")


def test_a_backend_that_is_not_installed_names_the_extra(tiny_bundle, monkeypatch):
    def missing(self):
        raise MissingDependency("onnxruntime is not installed", hint="pip install 'trtdiff[cpu]'")

    monkeypatch.setattr(OnnxRuntime, "toolchain", missing)
    with pytest.raises(MissingDependency, match=r"trtdiff\[cpu\]") as caught:
        trtdiff.load(tiny_bundle)
    assert caught.value.exit_code == 5


def test_steps_without_a_table_say_which_there_are(pipeline):
    with pytest.raises(UsageError, match=r"no table for 101 steps(.|\n)*compiled: 1 … 2, 6"):
        pipeline("a cat", steps=101)


def test_sizes_outside_the_profile_are_refused_before_anything_runs(pipeline):
    with pytest.raises(ProfileError, match=r"height 128 was asked, the engines take 32 to 96"):
        pipeline("a cat", height=128, progress=lambda *_: pytest.fail("it ran"))


def test_a_bundle_without_a_text_encoder_says_so(changed_bundle):
    def without(about):
        del about["engines"]["onnxruntime"]["text_encoder"]

    with trtdiff.load(changed_bundle(without), threads=1) as pipeline, pytest.raises(ArtefactError, match="text_enc"):
        pipeline("a cat", steps=1)


def test_a_closed_pipeline_says_so(tiny_bundle):
    pipeline = trtdiff.load(tiny_bundle, threads=1)
    pipeline.close()
    pipeline.close()
    with pytest.raises(UsageError, match="closed"):
        pipeline("a cat")


def test_an_engine_manifest_that_was_edited_is_damage(tiny_bundle, tmp_path):
    """Other weights with their own sha256 written beside them: the key does not cover them, bundle.json does."""
    copied = shutil.copytree(tiny_bundle, tmp_path / "copy")
    about = json.loads((copied / "bundle.json").read_text())
    entry = copied / "engines" / about["engines"]["onnxruntime"]["denoiser"]
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["files"] = {}
    (entry / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtefactError, match=r"manifest\.json"):
        trtdiff.load(copied)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda about: about["engines"]["onnxruntime"].update(denoiser="/tmp/elsewhere"), "32 hexadecimal digits"),
        (lambda about: about["engines"]["onnxruntime"].update(denoiser="../../x"), "32 hexadecimal digits"),
        (lambda about: about.update(engines={}), "engines: there are none"),
        (lambda about: about.update(samplers=[]), "samplers: there are none"),
        (lambda about: about.update(window=-1), "window: it is negative"),
        (lambda about: about["facts"]["latent"].update(downscale=0), "a size is not positive"),
        (lambda about: about["facts"].update(sizes_multiple_of=0), "a size is not positive"),
    ],
)
def test_a_manifest_that_cannot_be_meant_is_refused(changed_bundle, edit, says):
    with pytest.raises(ArtefactError, match=says):
        trtdiff.load(changed_bundle(edit))


def test_a_manifest_that_nests_without_end_is_refused(tiny_bundle, tmp_path):
    copied = shutil.copytree(tiny_bundle, tmp_path / "copy")
    (copied / "bundle.json").write_text("[" * 100_000)
    with pytest.raises(ArtefactError, match="is damaged"):
        trtdiff.load(copied)


def test_threads_beyond_reason_are_refused(tiny_bundle):
    with pytest.raises(UsageError, match="100000 threads on"):
        trtdiff.load(tiny_bundle, threads=100_000)
