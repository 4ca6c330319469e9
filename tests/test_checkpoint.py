"""Opening checkpoints in the forms people have them, and refusing the rest with an error that says what to do."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from trtdiff.checkpoint import Checkpoint
from trtdiff.errors import CheckpointError, TrtdiffError, UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.36.0",
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "feature_extractor": ["transformers", "CLIPImageProcessor"],
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
}
UNET = {"conv.weight": np.float32([[1, 2]]), "conv.bias": np.float32([3])}


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_tokenizer(folder):
    """A byte-level CLIP vocabulary, as transformers writes it since it knows no `tokenizer.json` in old checkpoints."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    words = [*letters, *(letter + "</w>" for letter in letters), "ca", "cat</w>", "<|startoftext|>", "<|endoftext|>"]
    write_json(folder / "vocab.json", {word: number for number, word in enumerate(words)})
    (folder / "merges.txt").write_text("#version: 0.2\nc a\nca t</w>\n")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tiny"
    write_json(path / "model_index.json", INDEX)
    write_json(path / "scheduler" / "scheduler_config.json", {"_class_name": "DDIMScheduler", "steps_offset": 1})
    write_json(path / "text_encoder" / "config.json", {"hidden_size": 8})
    write_json(path / "tokenizer" / "tokenizer_config.json", {"model_max_length": 77, "pad_token": "<|endoftext|>"})
    write_json(path / "tokenizer" / "special_tokens_map.json", {"pad_token": "!", "unk_token": "<|endoftext|>"})
    write_json(path / "unet" / "config.json", {"in_channels": 4})
    save_file({"embed.weight": np.float16([1, 2])}, path / "text_encoder" / "model.safetensors")
    save_file(UNET, path / "unet" / "diffusion_pytorch_model.safetensors")
    return path


def refusal(source, **options):
    """What opening and reading everything in it raises."""
    with pytest.raises(TrtdiffError) as caught:  # noqa: PT012 - whichever of the readings finds it
        Checkpoint.open(str(source), **options).origin()
        for component in ("text_encoder", "unet"):
            Checkpoint.open(str(source), **options).tensors(component)
    return caught.value


# --- what a good one gives


def test_gives_configs_tensors_and_origin(folder):
    checkpoint = Checkpoint.open(str(folder))
    assert (checkpoint.name, checkpoint.revision, checkpoint.pipeline) == ("tiny", None, "StableDiffusionPipeline")
    assert checkpoint.configs.keys() == {"model_index", "scheduler", "text_encoder", "tokenizer", "unet"}
    assert checkpoint.configs["scheduler"]["steps_offset"] == 1
    assert checkpoint.configs["tokenizer"] == {"model_max_length": 77, "pad_token": "!", "unk_token": "<|endoftext|>"}
    tensors = checkpoint.tensors("unet")
    assert {name: (ref.dtype, ref.shape) for name, ref in tensors.items()} == {
        "conv.weight": ("float32", (1, 2)),
        "conv.bias": ("float32", (1,)),
    }
    assert checkpoint.notes == ("text_encoder: default weights, 1 file", "unet: default weights, 1 file")


def test_opening_and_indexing_need_neither_torch_nor_diffusers(folder):
    program = (
        "import sys; from trtdiff.checkpoint import Checkpoint; c = Checkpoint.open(sys.argv[1]); c.tensors('unet');"
        "c.origin(); print({'torch', 'diffusers', 'transformers', 'onnx', 'huggingface_hub'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_digest_covers_configs_weights_and_vocabulary_and_nothing_else(folder, tmp_path):
    write_tokenizer(folder / "tokenizer")
    origin = Checkpoint.open(str(folder)).origin()
    shutil.copytree(folder, tmp_path / "elsewhere" / "tiny")
    (tmp_path / "elsewhere" / "tiny" / "README.md").write_text("about")
    assert Checkpoint.open(str(tmp_path / "elsewhere" / "tiny")).origin() == origin
    changes = {
        "unet/config.json": b'{"in_channels": 5}',
        "scheduler/scheduler_config.json": b'{"_class_name": "DDIMScheduler", "steps_offset": 0}',
        "tokenizer/merges.txt": b"#version: 0.2\nc a\n",
        "unet/diffusion_pytorch_model.safetensors": None,
    }
    seen = {origin.digest}
    for name, content in changes.items():
        changed = tmp_path / name.replace("/", "_") / "tiny"
        shutil.copytree(folder, changed)
        if content is None:
            save_file({**UNET, "conv.bias": np.float32([4])}, changed / name)
        else:
            (changed / name).write_bytes(content)
        seen.add(Checkpoint.open(str(changed)).origin().digest)
    assert len(seen) == 5


def test_a_tokenizer_is_given_as_stored_or_made_from_its_parts(folder):
    from tokenizers import Tokenizer
    from transformers import CLIPTokenizerFast

    write_tokenizer(folder / "tokenizer")
    made = Checkpoint.open(str(folder)).tokenizer_json("tokenizer")
    tokenizer = Tokenizer.from_buffer(made)
    assert tokenizer.encode("Cat").tokens == ["<|startoftext|>", "cat</w>", "<|endoftext|>"]
    theirs = CLIPTokenizerFast.from_pretrained(folder / "tokenizer")
    assert theirs.pad_token == Checkpoint.open(str(folder)).configs["tokenizer"]["pad_token"]
    assert theirs("A cat, cats & cäts!")["input_ids"] == tokenizer.encode("A cat, cats & cäts!").ids
    (folder / "tokenizer" / "tokenizer.json").write_bytes(made)
    assert Checkpoint.open(str(folder)).tokenizer_json("tokenizer") == made


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b'{"model": 3}', "not a readable tokenizer"),
        ("tokenizer.json", b"\xff", "not a readable tokenizer"),
        ("vocab.json", b"[]", "neither tokenizer.json nor merges.txt"),
        ("unrelated", b"", "neither tokenizer.json nor vocab.json and merges.txt"),
    ],
)
def test_a_damaged_tokenizer_is_refused(folder, name, content, message):
    (folder / "tokenizer" / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(str(folder)).tokenizer_json("tokenizer")


def test_damaged_vocabulary_and_merges_are_refused(folder):
    write_tokenizer(folder / "tokenizer")
    (folder / "tokenizer" / "vocab.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be made into a tokenizer"):
        Checkpoint.open(str(folder)).tokenizer_json("tokenizer")


# --- which files


def files(folder, *names):
    for path in folder.glob("unet/diffusion*"):
        path.unlink()
    for name in names:
        save_file({name.replace(".", "_"): np.float32([1])}, folder / "unet" / name)


@pytest.mark.parametrize(
    ("there", "variant", "chosen", "note"),
    [
        (["", "fp16"], None, "", "default weights, 1 file (not used: fp16)"),
        (["fp16"], None, "fp16", "fp16 variant, 1 file"),
        (["bf16", "non_ema", "fp16"], None, "fp16", "fp16 variant, 1 file (not used: bf16, non_ema)"),
        (["bf16", "aaa"], None, "bf16", "bf16 variant, 1 file (not used: aaa)"),
        (["", "fp16", "bf16"], "bf16", "bf16", "bf16 variant, 1 file (not used: default, fp16)"),
    ],
)
def test_the_choice_among_variants_is_deterministic_and_reported(folder, there, variant, chosen, note):
    def file(word):
        return f"diffusion_pytorch_model{'.' * bool(word)}{word}.safetensors"

    files(folder, *map(file, there))
    checkpoint = Checkpoint.open(str(folder), variant=variant)
    assert {ref.file.name for ref in checkpoint.tensors("unet").values()} == {file(chosen)}
    assert f"unet: {note}" in checkpoint.notes
    assert checkpoint.notes[0] == "text_encoder: default weights, 1 file"


def test_a_variant_that_nothing_has_is_refused_with_those_there_are(folder):
    error = refusal(folder, variant="fp16")
    assert isinstance(error, UsageError)
    assert "no component has the variant 'fp16'" in error.message
    assert "no variants" in error.hint
    files(folder, "diffusion_pytorch_model.bf16.safetensors")
    assert "there is bf16" in refusal(folder, variant="fp16").hint


def sharded(folder, weight_map=None, index="diffusion_pytorch_model.safetensors.index.json"):
    names = [f"diffusion_pytorch_model-{number}-of-00002.safetensors" for number in ("00001", "00002")]
    files(folder)
    for name, (tensor, array) in zip(names, UNET.items(), strict=True):
        save_file({tensor: array}, folder / "unet" / name)
    write_json(folder / "unet" / index, {"weight_map": weight_map or dict(zip(UNET, names, strict=True))})
    return names


@pytest.mark.parametrize(
    "index",
    [
        "diffusion_pytorch_model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors.index.fp16.json",
        "diffusion_pytorch_model.safetensors.fp16.index.json",
        "diffusion_pytorch_model.fp16.safetensors.index.json",
    ],
)
def test_shards_are_read_through_their_index(folder, index):
    names = sharded(folder, index=index)
    checkpoint = Checkpoint.open(str(folder))
    assert {name: ref.file.name for name, ref in checkpoint.tensors("unet").items()} == dict(
        zip(UNET, names, strict=True)
    )
    assert checkpoint.notes[1] == f"unet: {'fp16 variant' if 'fp16' in index else 'default weights'}, 2 files"


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "absent.safetensors"}, "1 of 1 weight files are missing: absent.safetensors"),
        ({"a": "../unet/diffusion_pytorch_model-00001-of-00002.safetensors"}, "not a weight file beside it"),
        ({"a": "/etc/x.safetensors"}, "not a weight file beside it"),
        ({"a": "config.json"}, "not a weight file beside it"),
        ({"a": "..\\x.safetensors"}, "not a weight file beside it"),
        ({"a": "x\0.safetensors"}, "not a weight file beside it"),
        ({"a": 3}, "no weight_map"),
        ([], "no weight_map"),
        ({"conv.bias": "diffusion_pytorch_model-00001-of-00002.safetensors"}, "holds conv.bias, it does not"),
    ],
)
def test_an_index_that_lies_is_refused(folder, weight_map, message):
    sharded(folder)
    write_json(folder / "unet" / "diffusion_pytorch_model.safetensors.index.json", {"weight_map": weight_map})
    error = refusal(folder)
    assert isinstance(error, CheckpointError)
    assert message in str(error)


def test_an_index_that_is_not_json_is_refused(folder):
    sharded(folder)
    (folder / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text("{")
    assert "not valid JSON" in str(refusal(folder))


@pytest.mark.parametrize("legacy", [False, True])
def test_pickles_are_read_where_there_is_nothing_else(folder, legacy):
    import torch

    files(folder)
    state = {name: torch.from_numpy(array) for name, array in UNET.items()}
    path = folder / "unet" / "diffusion_pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    checkpoint = Checkpoint.open(str(folder))
    assert checkpoint.notes[1] == "unet: default weights, 1 file, pickled"
    for name, ref in checkpoint.tensors("unet").items():
        assert (
            np.fromfile(ref.file, ref.dtype, UNET[name].size, offset=ref.offset).tolist() == UNET[name].ravel().tolist()
        )
    files(folder, "diffusion_pytorch_model.safetensors")
    torch.save(state, path)
    assert Checkpoint.open(str(folder)).tensors("unet").keys() == {"diffusion_pytorch_model_safetensors"}


def test_sharded_pickles_are_read_through_their_index(folder):
    import torch

    files(folder)
    for number, (name, array) in enumerate(UNET.items()):
        torch.save({name: torch.from_numpy(array)}, folder / "unet" / f"part{number}.bin")
    weight_map = {name: f"part{number}.bin" for number, name in enumerate(UNET)}
    write_json(folder / "unet" / "diffusion_pytorch_model.bin.index.json", {"weight_map": weight_map})
    assert Checkpoint.open(str(folder)).tensors("unet").keys() == UNET.keys()


class Attack:
    """Unpickled without care, this makes a folder."""

    def __init__(self, made):
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_that_runs_code_is_refused_and_runs_nothing(folder, tmp_path, legacy):
    import torch

    files(folder)
    path = folder / "unet" / "diffusion_pytorch_model.bin"
    torch.save({"conv.bias": Attack(tmp_path / "made")}, path, _use_new_zipfile_serialization=not legacy)
    error = refusal(folder)
    assert isinstance(error, CheckpointError)
    assert "wants to run posix.mkdir: refused, nothing was run" in error.message
    assert error.where == str(path)
    assert "safetensors" in error.hint
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "list"])
def test_a_damaged_pickle_is_refused(folder, damage):
    import torch

    files(folder)
    path = folder / "unet" / "diffusion_pytorch_model.bin"
    torch.save([torch.zeros(3)] if damage == "list" else {"a": torch.zeros(300)}, path)
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 200)
    elif damage == "text":
        path.write_text("<html>not found</html>")
    elif damage == "empty":
        path.write_bytes(b"")
    error = refusal(folder)
    assert isinstance(error, CheckpointError)
    assert "diffusion_pytorch_model.bin" in error.message


# --- what is no checkpoint


def test_a_path_that_is_not_there_is_refused_with_near_names(folder):
    error = refusal(folder.parent / "tinny")
    assert isinstance(error, UsageError)
    assert error.exit_code == 2
    assert "no such folder" in error.message
    assert error.hint == "did you mean tiny?"
    assert "is not there either" in refusal(folder.parent / "gone" / "tiny").hint
    assert "revision is given apart" in refusal("owner/name@main").hint


def test_one_file_or_one_component_is_not_a_checkpoint(folder, tmp_path):
    error = refusal(folder / "unet" / "diffusion_pytorch_model.safetensors")
    assert isinstance(error, CheckpointError)
    assert "is one component of a checkpoint" in error.message
    assert str(folder) in error.hint
    error = refusal(folder / "unet")
    assert isinstance(error, CheckpointError)
    assert "the folder above it" in error.hint
    assert "did you mean tiny in it?" in refusal(tmp_path).hint
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / "v1-5.ckpt").touch()
    assert refusal(tmp_path / "single").hint.endswith("v1-5.ckpt")


def test_a_revision_belongs_to_a_hub_id(folder):
    assert "revision belongs to a hub id" in refusal(folder, revision="main").message


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model_index.json", b"{", "model_index.json is damaged"),
        ("model_index.json", b"[]", "model_index.json is not a JSON object"),
        ("model_index.json", b"{}", "names no pipeline class"),
        ("model_index.json", b'{"_class_name": 3}', "names no pipeline class"),
        ("model_index.json", b'{"_class_name": "X"}', "names no components"),
        ("model_index.json", b'{"_class_name": "X", "../etc": ["diffusers", "Y"]}', "describes '../etc'"),
        ("model_index.json", b'{"_class_name": "X", "unet": ["diffusers", 3]}', "describes 'unet'"),
        ("model_index.json", b'{"_class_name": "X", "vae": ["diffusers", "Y"]}', "component folder vae is missing"),
        ("model_index.json", b"[" * 100_000, "model_index.json is damaged"),
        ("unet/config.json", None, "cannot read config.json"),
        ("unet/config.json", b'{"a": NaN}', "NaN is not JSON"),
        ("unet/config.json", b"\xff\xfe\x00", "config.json is damaged"),
        ("scheduler/scheduler_config.json", None, "cannot read scheduler_config.json"),
        ("tokenizer/tokenizer_config.json", None, "cannot read tokenizer_config.json"),
        ("unet/diffusion_pytorch_model.safetensors", None, "unet has no weights"),
        ("unet/diffusion_pytorch_model.safetensors", b"\0" * 9, "not a JSON object"),
    ],
)
def test_a_damaged_or_missing_file_is_named(folder, file, content, message):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    error = refusal(folder)
    assert isinstance(error, CheckpointError)
    assert message in str(error)
    assert str(folder) in error.where
    assert error.hint


def test_a_component_that_the_pipeline_lacks_is_named_when_asked_for(folder):
    with pytest.raises(CheckpointError, match="the checkpoint has no vae"):
        _ = Checkpoint.open(str(folder)).configs["vae"]


# --- the hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """huggingface_hub itself with a cache of our own and no network."""
    import huggingface_hub.constants

    def unreachable(*_, **__):
        raise ConnectionError("Name or service not known\nand much more")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    return huggingface_hub


def cached(folder, cache, commit=COMMIT):
    """A checkpoint as the hub's cache holds it: every file a link to a blob in another folder."""
    model = cache / "models--owner--name"
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        blob, link = model / "blobs" / str(number), model / "snapshots" / commit / path.relative_to(folder)
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    return model / "snapshots" / commit


def test_a_snapshot_in_the_cache_is_opened_by_id_and_by_folder(folder, tmp_path, hub):
    snapshot = cached(folder, tmp_path / "hub")
    by_folder = Checkpoint.open(str(snapshot))
    for checkpoint in (Checkpoint.open("owner/name"), Checkpoint.open("owner/name", revision=COMMIT), by_folder):
        assert (checkpoint.name, checkpoint.revision) == ("owner/name", COMMIT)
        assert checkpoint.path == snapshot
        assert checkpoint.tensors("unet").keys() == UNET.keys()
        told = [note for note in checkpoint.notes if "this is what the hub's cache holds" in note]
        assert len(told) == (checkpoint is not by_folder)
    assert checkpoint.origin().digest == Checkpoint.open(str(folder)).origin().digest


def test_a_hub_id_that_cannot_be_had_fails_with_one_clear_line(hub):
    error = refusal("owner/name")
    assert isinstance(error, CheckpointError)
    assert "the hub cannot be reached and its cache does not have it" in error.message
    assert error.where == "Name or service not known"


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("RepositoryNotFoundError", UsageError, "neither a folder here nor a model on the hub"),
        ("RevisionNotFoundError", UsageError, "owner/name has no revision 'v9'"),
        ("GatedRepoError", CheckpointError, "accepted its terms"),
    ],
)
def test_what_the_hub_refuses_is_told_apart(hub, monkeypatch, name, kind, message):
    kind_of_theirs = getattr(hub.errors, name)

    def refuse(*_, **__):
        raise kind_of_theirs.__new__(kind_of_theirs)

    monkeypatch.setattr(hub.HfApi, "model_info", refuse)
    error = refusal("owner/name", revision="v9")
    assert isinstance(error, kind)
    assert message in error.message


def test_only_the_files_that_are_read_are_fetched(folder, tmp_path, hub, monkeypatch):
    names = sharded(folder)
    for extra in ("v1-5.ckpt", "unet/diffusion_pytorch_model.fp16.safetensors", "unet/diffusion_pytorch_model.bin"):
        (folder / extra).write_bytes(b"unused")
    (folder / "safety_checker").mkdir()
    (folder / "safety_checker" / "model.safetensors").write_bytes(b"unused")
    listing = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    info = SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=name) for name in listing])
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / COMMIT

    def download(source, *, revision, allow_patterns):
        assert (source, revision) == ("owner/name", COMMIT)
        for name in hub.utils.filter_repo_objects(listing, allow_patterns=allow_patterns):
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / name, snapshot / name)
        return str(snapshot)

    monkeypatch.setattr(hub.HfApi, "model_info", lambda *_, **__: info)
    monkeypatch.setattr(hub, "snapshot_download", download)
    checkpoint = Checkpoint.open("owner/name", revision="main")
    assert (checkpoint.name, checkpoint.revision) == ("owner/name", COMMIT)
    assert checkpoint.tensors("unet").keys() == UNET.keys()
    weights = {path.name for path in snapshot.rglob("*") if path.suffix != ".json"}
    assert weights - {path.name for path in snapshot.rglob("*") if path.is_dir()} == {*names, "model.safetensors"}
    assert not (snapshot / "safety_checker").exists()


def test_a_pipe_in_place_of_weights_is_not_waited_for(folder):
    weights = folder / "unet/diffusion_pytorch_model.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    assert "unet has no weights" in refusal(folder).message


def test_force_reads_the_bytes_again(folder):
    checkpoint = Checkpoint.open(str(folder))
    read = []
    checkpoint.origin(progress=read.append)
    first = sum(read)
    checkpoint.origin(progress=read.append)
    assert sum(read) == first
    checkpoint.origin(progress=read.append, fresh=True)
    assert sum(read) == 2 * first
