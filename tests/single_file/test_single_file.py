"""Files in the original layout open as what they were written from, tensor by tensor, without being read."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from trtdiff.checkpoint import Checkpoint
from trtdiff.errors import CheckpointError, ExportError, UsageError
from trtdiff.export.safetensors_index import TensorRef
from trtdiff.export.weights import find_needed, place_weights
from trtdiff.single_file.converted import View
from trtdiff.single_file.reference import load_pipeline

pytest.importorskip("diffusers")
KINDS = ("sd1", "sd1-inpainting", "sd2", "sd2-inpainting", "sdxl", "sdxl-inpainting", "sdxl-refiner")
PIPELINES = {
    "sd1": "StableDiffusionPipeline", "sd1-inpainting": "StableDiffusionInpaintPipeline",
    "sd2": "StableDiffusionPipeline", "sd2-inpainting": "StableDiffusionInpaintPipeline",
    "sdxl": "StableDiffusionXLPipeline", "sdxl-inpainting": "StableDiffusionXLInpaintPipeline",
    "sdxl-refiner": "StableDiffusionXLImg2ImgPipeline",
}  # fmt: skip


def open_file(made, **options):
    return Checkpoint.open(str(made.path), tokenizer=made.tokenizer, **options)


def needs(module):
    """Names and shapes that a module wants, less what transformers computes itself."""
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def read(ref):
    return np.fromfile(ref.file, ref.dtype, math.prod(ref.shape), offset=ref.offset).reshape(ref.shape)


# --- what a good one gives


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_the_modules_own(single_file, kind, tmp_path):
    made = single_file(kind)
    opened = open_file(made)
    assert opened.pipeline == PIPELINES[kind]
    assert set(opened.weighted) == made.modules.keys()
    for folder, module in made.modules.items():
        placed = place_weights(opened.tensors(folder), needs(module), tmp_path, folder)
        for name, value in module.state_dict().items():
            np.testing.assert_array_equal(read(placed[name]), value.numpy(), err_msg=name)
    sizes = [file.stat().st_size for file in (tmp_path / "weights").iterdir()]
    assert len(sizes) == len(made.modules)
    assert sum(sizes) < 1.1 * made.path.stat().st_size


@pytest.mark.parametrize("kind", KINDS)
def test_modules_built_from_the_configs_are_those_it_was_written_from(single_file, kind):
    import torch
    import transformers
    from diffusers import AutoencoderKL, UNet2DConditionModel

    made = single_file(kind)
    opened = open_file(made)
    for folder, module in made.modules.items():
        config = dict(opened.configs[folder])
        with torch.device("meta"):
            if folder.startswith("text"):
                kinds = config["architectures"][0]
                built = getattr(transformers, kinds)(transformers.CLIPTextConfig(**config))
                assert built.config.hidden_act == module.config.hidden_act
                assert built.config.num_attention_heads == module.config.num_attention_heads
            else:
                built = {"unet": UNet2DConditionModel, "vae": AutoencoderKL}[folder].from_config(config)
                ours, theirs = dict(built.config), dict(module.config)
                unsaid = {"scaling_factor", "sample_size", "transformer_layers_per_block"}
                for field in theirs.keys() - unsaid:
                    if not field.startswith("_"):
                        left, right = ours[field], theirs[field]
                        same = (list(left), list(right)) if isinstance(right, list | tuple) else (left, right)
                        assert same[0] == same[1], field
        assert needs(built) == needs(module)


@pytest.mark.parametrize("kind", ["sd1-inpainting", "sd2", "sdxl", "sdxl-refiner"])
def test_diffusers_itself_loads_the_file_and_gets_the_same(single_file, kind):
    made = single_file(kind)
    pipeline = load_pipeline(open_file(made).parts)
    assert type(pipeline).__name__ == PIPELINES[kind]
    for folder, module in made.modules.items():
        loaded = getattr(pipeline, folder).state_dict()
        assert loaded.keys() == module.state_dict().keys()
        for name, value in module.state_dict().items():
            np.testing.assert_array_equal(loaded[name].numpy(), value.numpy(), err_msg=f"{folder} {name}")


@pytest.mark.parametrize(("kind", "turned"), [("sd1", set()), ("sd2", set()), ("sdxl", {"text_projection.weight"})])
def test_all_but_what_the_notes_name_lies_as_it_is_needed(single_file, kind, turned):
    made = single_file(kind)
    opened = open_file(made)
    strided = {
        name
        for folder, module in made.modules.items()
        for name, ref in find_needed(opened.tensors(folder), needs(module)).items()
        if not ref.aligned
    }
    assert strided == turned
    assert ("1 that is transposed" in " ".join(opened.notes)) == bool(turned)


def test_a_file_that_is_not_all_one_component_is_not_copied_whole(single_file, tmp_path):
    made = single_file("sd1")
    opened = open_file(made)
    need = needs(made.modules["vae"])
    placed = place_weights(opened.tensors("vae"), need, tmp_path, "vae")
    (file,) = {ref.file for ref in placed.values()}
    assert file.stat().st_size < sum(4 * math.prod(shape) for shape in need.values()) + 40_000


def test_converting_reads_no_tensor(single_file, tmp_path):
    """The same header over no data at all: a sparse file gives the same places."""
    made = single_file("sdxl")
    sparse = tmp_path / "sparse.safetensors"
    with made.path.open("rb") as file:
        head = file.read(8)
        head += file.read(int.from_bytes(head, "little"))
    with sparse.open("wb") as file:
        file.write(head)
        file.truncate(made.path.stat().st_size)
    there = Checkpoint.open(str(made.path)).tensors("text_encoder_2")
    empty = Checkpoint.open(str(sparse)).tensors("text_encoder_2")
    assert {name: (ref.offset, ref.shape, ref.strides) for name, ref in empty.items()} == {
        name: (ref.offset, ref.shape, ref.strides) for name, ref in there.items()
    }


def test_opening_needs_neither_torch_nor_diffusers(single_file):
    program = (
        "import sys; from trtdiff.checkpoint import Checkpoint;"
        "c = Checkpoint.open(sys.argv[1], tokenizer=sys.argv[2]);"
        "print(c.configs['unet']['in_channels'], {'torch', 'diffusers', 'transformers'} & sys.modules.keys())"
    )
    made = single_file("sdxl")
    done = subprocess.run(
        [sys.executable, "-c", program, made.path, made.tokenizer], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "4 set()"


def test_origin_is_the_models_and_not_the_names(single_file, tmp_path):
    made = single_file("sd1")
    origin = open_file(made).origin()
    assert (origin.name, origin.pipeline) == ("sd1", "StableDiffusionPipeline")
    renamed = tmp_path / "other.safetensors"
    renamed.write_bytes(made.path.read_bytes())
    assert Checkpoint.open(str(renamed), tokenizer=made.tokenizer).origin().digest == origin.digest
    assert open_file(made, prediction="v_prediction").origin().digest != origin.digest
    renamed.write_bytes(made.path.read_bytes()[:-1] + b"x")
    assert Checkpoint.open(str(renamed), tokenizer=made.tokenizer).origin().digest != origin.digest


# --- pickles


def test_a_ckpt_is_read_where_it_is_only_tensors(single_file, tmp_path):
    import torch

    made = single_file("sd1")
    path = tmp_path / "model.ckpt"
    torch.save({"state_dict": made.stored, "global_step": 7}, path)
    opened = Checkpoint.open(str(path), tokenizer=made.tokenizer)
    module = made.modules["unet"]
    placed = place_weights(opened.tensors("unet"), needs(module), tmp_path, "unet")
    for name, value in module.state_dict().items():
        np.testing.assert_array_equal(read(placed[name]), value.numpy())


class Callback:
    """What training code leaves in a file."""


def test_a_ckpt_with_objects_in_it_is_refused_with_the_way_out(single_file, tmp_path):
    import torch

    torch.save({"state_dict": single_file("sd1").stored, "callbacks": Callback()}, tmp_path / "model.ckpt")
    with pytest.raises(CheckpointError, match="refused, nothing was run") as caught:
        Checkpoint.open(str(tmp_path / "model.ckpt"))
    assert "safetensors" in caught.value.hint


# --- what a file does not say


def with_extra(made, path, extra=(), metadata=None):
    """The same file with empty tensors of these names, and metadata."""
    import torch
    from safetensors.torch import save_file

    stored = {name: value.contiguous() for name, value in made.stored.items()}
    save_file(stored | {name: torch.tensor([]) for name in extra}, path, metadata=metadata)
    return path


@pytest.mark.parametrize(
    ("kind", "extra", "metadata", "asked", "expected"),
    [
        ("sd1", (), None, None, ("PNDMScheduler", "epsilon", 64)),
        ("sd1", (), None, "v_prediction", ("PNDMScheduler", "v_prediction", 64)),
        ("sd1", ("v_pred", "ztsnr"), None, None, ("DDIMScheduler", "v_prediction", 64)),
        ("sd2", (), None, None, ("DDIMScheduler", "v_prediction", 96)),
        ("sd2", (), {"modelspec.prediction_type": "epsilon"}, None, ("PNDMScheduler", "epsilon", 64)),
        ("sd2", (), None, "epsilon", ("PNDMScheduler", "epsilon", 64)),
        ("sd2-inpainting", (), None, None, ("PNDMScheduler", "epsilon", 64)),
        ("sdxl", (), None, None, ("EulerDiscreteScheduler", "epsilon", 128)),
        ("sdxl", ("v_pred", "ztsnr"), None, None, ("EulerDiscreteScheduler", "v_prediction", 128)),
        ("sdxl", (), {"modelspec.predict_key": "v"}, None, ("EulerDiscreteScheduler", "v_prediction", 128)),
    ],
)
def test_prediction_is_as_asked_as_marked_or_assumed(single_file, tmp_path, kind, extra, metadata, asked, expected):
    made = single_file(kind)
    path = with_extra(made, tmp_path / "model.safetensors", extra, metadata)
    opened = Checkpoint.open(str(path), tokenizer=made.tokenizer, prediction=asked)
    scheduler = opened.configs["scheduler"]
    got = (scheduler["_class_name"], scheduler["prediction_type"], opened.configs["unet"]["sample_size"])
    assert got == expected
    assert scheduler.get("rescale_betas_zero_snr", False) == ("ztsnr" in extra)
    said = next(note for note in opened.notes if note.startswith("scheduler"))
    assert ("assumed" in said) == (not extra and not metadata and not asked)
    import diffusers

    made_of_it = getattr(diffusers, scheduler["_class_name"]).from_config(dict(scheduler))
    assert set(made_of_it.config) >= scheduler.keys() - {"_class_name"}


def test_the_tokenizer_is_found_or_asked_for(single_file, tmp_path, monkeypatch, vocabulary):
    import huggingface_hub

    made = single_file("sdxl")

    def unreachable(*_, **__):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(CheckpointError, match="no tokenizer in it") as caught:
        Checkpoint.open(str(made.path)).origin()
    assert "--tokenizer FOLDER" in caught.value.hint
    with pytest.raises(UsageError, match="has no tokenizer"):
        Checkpoint.open(str(made.path), tokenizer=str(tmp_path))
    opened = open_file(made)
    assert opened.tokenizer_json("tokenizer") == opened.tokenizer_json("tokenizer_2")
    assert opened.configs["tokenizer"]["pad_token"] == "<|endoftext|>"
    assert opened.configs["tokenizer_2"]["pad_token"] == "!"
    assert opened.configs["tokenizer"]["model_max_length"] == 16
    assert Checkpoint.open(str(made.path), tokenizer=str(vocabulary.folder / "tokenizer")).origin() == opened.origin()


def test_the_hubs_cache_is_looked_through(single_file, tmp_path, vocabulary):
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = tmp_path / "hub/models--stabilityai--stable-diffusion-2-1"
    place = model / "snapshots" / commit / "tokenizer"
    place.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(commit)
    stored = json.loads((vocabulary.folder / "tokenizer/tokenizer.json").read_text())["model"]
    (place / "vocab.json").write_text(json.dumps(stored["vocab"]))
    (place / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, stored["merges"])) + "\n")
    opened = Checkpoint.open(str(single_file("sd1").path))
    assert "tokenizer: the hub cache's stabilityai/stable-diffusion-2-1" in opened.notes
    from tokenizers import Tokenizer

    made = Tokenizer.from_buffer(opened.tokenizer_json("tokenizer"))
    theirs = Tokenizer.from_file(str(vocabulary.folder / "tokenizer/tokenizer.json"))
    assert made.encode("a red cat").ids == theirs.encode("a red cat").ids


@pytest.mark.parametrize("words", [100, 5000])
@pytest.mark.parametrize("form", ["vocab.json", "tokenizer.json"])
def test_another_models_tokenizer_is_refused(single_file, tmp_path, words, form):
    vocabulary = {f"w{number}": number for number in range(words)}
    added = {"content": "<|startoftext|>", "id": words}
    if form == "vocab.json":
        (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    whole = vocabulary | {added["content"]: words}
    document = whole if form == "vocab.json" else {"model": {"vocab": vocabulary}, "added_tokens": [added]}
    (tmp_path / form).write_text(json.dumps(document))
    opened = Checkpoint.open(str(single_file("sd1").path), tokenizer=str(tmp_path))
    with pytest.raises(CheckpointError, match=f"the tokenizer has {words + 1} words, sd1.safetensors has"):
        opened.origin()


@pytest.mark.parametrize("option", ["tokenizer", "prediction"])
def test_options_of_files_belong_to_files(tiny_checkpoint, option):
    with pytest.raises(UsageError, match=f"says its {option} itself"):
        Checkpoint.open(str(tiny_checkpoint), **{option: "epsilon"})


def test_options_of_folders_belong_to_folders(single_file):
    made = single_file("sd1")
    for option in ("revision", "variant"):
        with pytest.raises(UsageError, match=f"has no {option}"):
            Checkpoint.open(str(made.path), **{option: "fp16"})
    with pytest.raises(UsageError, match="no model predicts 'x0'"):
        open_file(made, prediction="x0")


# --- stand-ins


@pytest.mark.parametrize(
    "take",
    [
        lambda x: x[2:4],
        lambda x: x[:3, :],
        lambda x: x[-2:, 1:],
        lambda x: x.T.contiguous(),
        lambda x: x[1],
        lambda x: x[:, -1],
        lambda x: x.T[2:5].clone().detach(),
        lambda x: x[1:3].T[0],
    ],
)
def test_a_stand_in_points_where_the_tensor_would(tmp_path, take):
    import torch

    from trtdiff.export.convert import write_converted

    stored = torch.arange(30, dtype=torch.float32).reshape(6, 5)
    path = tmp_path / "data"
    path.write_bytes(b"head" + stored.numpy().tobytes())
    ref = take(View(TensorRef(path, "float32", (6, 5), 4, 120))).ref
    expected = take(stored)
    placed = write_converted({"a": ref}, tmp_path / "out.safetensors", dtype="stored")
    np.testing.assert_array_equal(read(placed["a"]), expected.numpy())


def test_what_no_reference_expresses_is_refused(single_file, monkeypatch):
    from diffusers.loaders import single_file_utils

    monkeypatch.setattr(
        single_file_utils, "convert_ldm_vae_checkpoint", lambda views, config: {"a": next(iter(views.values())) * 2}
    )
    with pytest.raises(ExportError, match="converts vae in a way that is not known"):
        open_file(single_file("sd1")).tensors("vae")
