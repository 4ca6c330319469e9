"""Weights beside a graph: the bytes the checkpoint holds, in files that ONNX may refer to, whatever form they had."""

import json
import math
import os
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from trtdiff import digest
from trtdiff.errors import CheckpointError, StorageError, UsageError
from trtdiff.export import weights
from trtdiff.export.convert import to_bfloat16
from trtdiff.export.pickle_index import read_pickle_index
from trtdiff.export.safetensors_index import ITEMSIZE, TensorRef, read_index
from trtdiff.export.weights import place_weights, placement_bytes

RNG = np.random.default_rng(0)
TENSORS = {
    "conv.weight": RNG.standard_normal((4, 3, 2, 2)).astype(np.float32),
    "norm.bias": RNG.standard_normal(5).astype(np.float32),
    "position_ids": np.arange(7)[None],
}
NEEDED = {"conv.weight": (4, 3, 2, 2), "norm.bias": (5,)}


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    return path


def read(ref):
    """What a reader of external data sees, bfloat16 as bit patterns."""
    kind = "<u2" if ref.dtype == "bfloat16" else ref.dtype
    assert ref.nbytes == math.prod(ref.shape) * ITEMSIZE[ref.dtype]
    return np.fromfile(ref.file, kind, math.prod(ref.shape), offset=ref.offset).reshape(ref.shape)


def floats(ref):
    return (read(ref).astype(np.uint32) << 16).view(np.float32) if ref.dtype == "bfloat16" else read(ref)


# --- by reference


def test_stored_weights_are_copied_whole_and_referred_to_in_place(stored, tmp_path):
    told = []
    placed = place_weights(read_index(stored), NEEDED, tmp_path / "out", "unet", progress=told.append)
    copy = tmp_path / "out" / "weights" / "unet.safetensors"
    assert copy.read_bytes() == stored.read_bytes()
    assert sum(told) == copy.stat().st_size == placement_bytes(read_index(stored), NEEDED, "stored")
    assert placed.keys() == NEEDED.keys()
    for name, ref in placed.items():
        assert ref.file == copy
        np.testing.assert_array_equal(read(ref), TENSORS[name])


def test_a_hub_cache_snapshot_of_links_becomes_plain_files(stored, tmp_path):
    blob, link = tmp_path / "blobs" / "5f3a", tmp_path / "snapshots" / "model.safetensors"
    blob.parent.mkdir()
    link.parent.mkdir()
    stored.rename(blob)
    link.symlink_to(blob)
    placed = place_weights(read_index(link), NEEDED, tmp_path / "out", "unet")
    copy = placed["conv.weight"].file
    assert not copy.is_symlink()
    assert copy.stat().st_nlink == 1
    assert copy.stat().st_ino != blob.stat().st_ino
    assert copy.read_bytes() == blob.read_bytes()


def test_a_weight_file_is_hashed_once_in_its_life(stored, tmp_path, monkeypatch):
    opened = Counter()
    plain = Path.open

    def counting(self, *args, **kwargs):
        opened[self.name] += 1
        return plain(self, *args, **kwargs)

    place_weights(read_index(stored), NEEDED, tmp_path / "one", "unet")
    monkeypatch.setattr(Path, "open", counting)
    placed = place_weights(read_index(stored), NEEDED, tmp_path / "two", "unet")
    opened.clear()
    copy = placed["conv.weight"].file
    remembered = digest.file_digest(copy)
    assert not opened
    assert remembered == digest.file_digest(copy, fresh=True) == digest.file_digest(stored, fresh=True)


@pytest.mark.parametrize("failure", ["absent", "refused", "answers nothing", "partway"])
def test_copies_without_the_kernels_help(stored, tmp_path, monkeypatch, failure):
    whole, calls = os.copy_file_range, []

    def broken(source, target, count, *places):
        calls.append(count)
        if failure == "partway" and len(calls) == 1:
            return whole(source, target, 100, *places)
        if failure == "answers nothing":
            return 0
        raise OSError(18, "Invalid cross-device link")

    if failure == "absent":
        monkeypatch.delattr(os, "copy_file_range")
    else:
        monkeypatch.setattr(os, "copy_file_range", broken)
    placed = place_weights(read_index(stored), NEEDED, tmp_path / "out", "unet")
    assert placed["norm.bias"].file.read_bytes() == stored.read_bytes()


@pytest.mark.parametrize("kernel", [True, False])
def test_holes_are_copied_as_holes(tmp_path, monkeypatch, kernel):
    if not kernel:
        monkeypatch.delattr(os, "copy_file_range")
    shape, size = (1 << 20, 4), 16 << 20
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 64 + 56)
    path = tmp_path / "hollow.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + b"\1\2\3")
        file.seek(8 + len(header) + (8 << 20))
        file.write(b"\4\5")
        file.truncate(8 + len(header) + size)
    told = []
    placed = place_weights(read_index(path), {"a": shape}, tmp_path / "out", "unet", progress=told.append)
    copy = placed["a"].file
    assert copy.read_bytes() == path.read_bytes()
    assert sum(told) <= path.stat().st_size
    assert copy.stat().st_blocks * 512 < 1 << 20


def test_shards_are_copied_and_those_not_needed_are_left(tmp_path):
    refs = {}
    for number, name in enumerate(TENSORS):
        save_file({name: TENSORS[name]}, tmp_path / f"shard{number}.safetensors")
        refs |= read_index(tmp_path / f"shard{number}.safetensors")
    placed = place_weights(refs, NEEDED, tmp_path / "out", "unet")
    files = sorted(file.name for file in (tmp_path / "out" / "weights").iterdir())
    assert files == ["unet-00001-of-00002.safetensors", "unet-00002-of-00002.safetensors"]
    for name, ref in placed.items():
        np.testing.assert_array_equal(read(ref), TENSORS[name])


def test_an_unaligned_file_is_written_anew(tmp_path):
    """A header whose length is odd puts every float at an odd address; early writers made such files."""
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    header += b" " * (1 - len(header) % 2)
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + np.float32([1.5, -2]).tobytes())
    placed = place_weights(read_index(path), {"a": (2,)}, tmp_path / "out", "unet")
    assert read_index(path)["a"].offset % 4
    assert placed["a"].offset % 4 == 0
    assert read(placed["a"]).tolist() == [1.5, -2]


def test_mixed_types_are_kept_as_stored(tmp_path):
    mixed = {"half": np.float16([1, 2]), "single": np.float32([3])}
    save_file(mixed, tmp_path / "model.safetensors")
    placed = place_weights(read_index(tmp_path / "model.safetensors"), {"half": (2,), "single": (1,)}, tmp_path, "unet")
    assert {name: ref.dtype for name, ref in placed.items()} == {"half": "float16", "single": "float32"}


# --- converted


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
def test_converts_between_float_types_as_pytorch_does(tmp_path, source, target):
    import torch
    from safetensors.torch import load_file as torch_load
    from safetensors.torch import save_file as torch_save

    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, 1e-8, 6e-5, 65504.0, 1 + 2**-9, 1 + 3 * 2**-9, torch.inf, -torch.inf, torch.nan])
    values = torch.cat([torch.randn(5000), special]).to(getattr(torch, source))
    if (source, target) == ("bfloat16", "float16"):
        values = values[values != 65536]  # what 65504 is in bfloat16: float16 cannot hold it
    torch_save({"w": values, "ids": torch.arange(3)}, tmp_path / "model.safetensors")
    refs = read_index(tmp_path / "model.safetensors")
    placed = place_weights(refs, {"w": (len(values),), "ids": (3,)}, tmp_path / "out", "unet", dtype=target)
    ours, theirs = torch_load(placed["w"].file), values.float().to(getattr(torch, target))
    assert torch.equal(ours["w"].nan_to_num(7, 8, 9), theirs.nan_to_num(7, 8, 9))
    assert torch.equal(ours["w"].isnan(), theirs.isnan())
    assert placed["ids"].dtype == "int64"
    assert read(placed["ids"]).tolist() == [0, 1, 2]


def test_bfloat16_agrees_with_ml_dtypes_on_every_rounding_pattern():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    singles = bits.view(np.float32)
    singles = singles[~np.isnan(singles)]
    np.testing.assert_array_equal(to_bfloat16(singles), singles.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_a_converted_file_is_one_that_safetensors_reads_and_its_digest_is_known(stored, tmp_path, monkeypatch):
    told = []
    placed = place_weights(read_index(stored), NEEDED, tmp_path, "unet", dtype="float16", progress=told.append)
    path = placed["conv.weight"].file
    theirs = load_file(path)
    assert theirs.keys() == NEEDED.keys()
    for name, ref in placed.items():
        np.testing.assert_array_equal(theirs[name], TENSORS[name].astype(np.float16))
        np.testing.assert_array_equal(read(ref), theirs[name])
        assert ref == read_index(path)[name]
    assert sum(told) == path.stat().st_size == placement_bytes(read_index(stored), NEEDED, "float16")
    assert digest.file_digest(path) == digest.file_digest(path, fresh=True)


def test_a_file_already_of_the_wanted_type_is_copied(stored, tmp_path):
    placed = place_weights(read_index(stored), NEEDED, tmp_path, "unet", dtype="float32")
    assert placed["norm.bias"].file.read_bytes() == stored.read_bytes()


def test_a_number_that_float16_cannot_hold_is_refused_and_nothing_is_left(tmp_path):
    save_file({"fine": np.float32([1]), "big": np.float32([1, -70000, np.inf])}, tmp_path / "model.safetensors")
    refs = read_index(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="float16 cannot hold tensor big: it has 1 numbers up to 70000"):
        place_weights(refs, {"fine": (1,), "big": (3,)}, tmp_path / "out", "unet", dtype="float16")
    assert not list((tmp_path / "out" / "weights").iterdir())
    place_weights(refs, {"fine": (1,), "big": (3,)}, tmp_path / "out", "unet", dtype="bfloat16")


def test_conversion_holds_a_few_chunks_in_memory_and_no_more(tmp_path):
    """64 MB of weights in two tensors, one of them in pieces of the other's size: the peak is far below either."""
    save_file(
        {"a": np.ones((4096, 2048), np.float32), "b": np.ones((4096, 2048), np.float32)}, tmp_path / "m.safetensors"
    )
    refs = read_index(tmp_path / "m.safetensors")
    tracemalloc.start()
    place_weights(refs, {name: ref.shape for name, ref in refs.items()}, tmp_path, "unet", dtype="float16")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32e6


# --- pickles


def test_a_pickle_becomes_one_safetensors_file_with_ties_views_and_transposes(tmp_path):
    import torch

    base = torch.randn(6, 4)
    state = {
        "shared.weight": base,
        "tied.weight": base,
        "transposed": base.t(),
        "view": base[2:4],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "half": torch.randn(3).half(),
        "brain": torch.randn(3).bfloat16(),
        "ids": torch.arange(5),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "unused": torch.randn(1000),
        "note": "not a tensor",
    }
    torch.save(state, tmp_path / "pytorch_model.bin")
    refs = read_pickle_index(tmp_path / "pytorch_model.bin")
    needed = {name: tuple(ref.shape) for name, ref in refs.items() if name != "unused"}
    needed["transposed"] = (4, 1, 6)
    placed = place_weights(refs, needed, tmp_path / "out", "text_encoder")
    for name, ref in placed.items():
        np.testing.assert_array_equal(floats(ref), state[name].detach().float().numpy().reshape(needed[name]))
        assert ref.aligned
    assert placed["tied.weight"] == placed["shared.weight"]
    with safe_open(placed["ids"].file, "np") as file:
        assert set(file.keys()) == needed.keys() - {"tied.weight"}
    assert [file.name for file in (tmp_path / "out" / "weights").iterdir()] == ["text_encoder.safetensors"]


@pytest.mark.parametrize("dtype", ["stored", "float16"])
def test_pytorchs_format_before_1_6_is_read_too(tmp_path, dtype):
    import torch

    state = {"a": torch.randn(3, 5), "b": torch.randn(4, 3).t()}
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    refs = read_pickle_index(tmp_path / "pytorch_model.bin")
    placed = place_weights(refs, {"a": (3, 5), "b": (3, 4)}, tmp_path / "out", "unet", dtype=dtype)
    for name, ref in placed.items():
        expected = state[name].half() if dtype == "float16" else state[name]
        np.testing.assert_array_equal(read(ref), expected.numpy())


@pytest.mark.parametrize("legacy", [False, True])
def test_any_changed_byte_of_a_pickle_is_read_or_refused(tmp_path, legacy):
    import torch

    path, rng = tmp_path / "pytorch_model.bin", np.random.default_rng(3)
    state = {"a": torch.randn(3, 4), "b": torch.randn(4, 3).t()}
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    whole, refused = path.read_bytes(), 0
    for position, value in zip(rng.integers(0, len(whole), 80), rng.integers(0, 256, 80), strict=True):
        damaged = bytearray(whole)
        damaged[position] = value
        path.write_bytes(damaged)
        try:
            read_pickle_index(path)
        except CheckpointError:
            refused += 1
    assert refused > 10


# --- names and shapes


def test_a_missing_tensor_is_named_with_its_file_and_near_names(stored, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        place_weights(read_index(stored), {**NEEDED, "conv.weights": (1,)}, tmp_path, "unet")
    assert "tensor conv.weights is missing" in str(caught.value)
    assert str(stored) in caught.value.where
    assert "conv.weight" in caught.value.hint
    with pytest.raises(CheckpointError, match="2 needed tensors are missing: x, y"):
        place_weights(read_index(stored), {"x": (1,), "y": (1,)}, tmp_path, "unet")


def test_a_tensor_of_another_shape_is_refused_with_both(stored, tmp_path):
    with pytest.raises(CheckpointError, match=r"conv\.weight has shape \[4, 3, 2, 2\], the model needs \[4, 12\]"):
        place_weights(read_index(stored), {"conv.weight": (4, 12)}, tmp_path, "unet")


@pytest.mark.parametrize(
    ("needed", "stored"),
    [
        ("decoder.mid_block.attentions.0.to_q.weight", "decoder.mid_block.attentions.0.query.weight"),
        ("decoder.mid_block.attentions.0.to_k.bias", "decoder.mid_block.attentions.0.key.bias"),
        ("decoder.mid_block.attentions.0.to_v.bias", "decoder.mid_block.attentions.0.value.bias"),
        ("decoder.mid_block.attentions.0.to_out.0.weight", "decoder.mid_block.attentions.0.proj_attn.weight"),
        ("final_layer_norm.bias", "text_model.final_layer_norm.bias"),
        ("text_model.final_layer_norm.bias", "final_layer_norm.bias"),
        ("encoder.embed_tokens.weight", "shared.weight"),
        ("shared.weight", "encoder.embed_tokens.weight"),
    ],
)
def test_old_names_are_found(tmp_path, needed, stored):
    save_file({stored: np.float32([[[[1]], [[2]]]]), "other": np.float32([0])}, tmp_path / "m.safetensors")
    placed = place_weights(read_index(tmp_path / "m.safetensors"), {needed: (1, 2)}, tmp_path, "x")
    assert read(placed[needed]).tolist() == [[1, 2]]


def test_an_exact_name_wins_over_an_old_one(tmp_path):
    save_file({"a.to_q.bias": np.float32([1]), "a.query.bias": np.float32([2])}, tmp_path / "m.safetensors")
    placed = place_weights(read_index(tmp_path / "m.safetensors"), {"a.to_q.bias": (1,)}, tmp_path, "x")
    assert read(placed["a.to_q.bias"]).tolist() == [1]


def test_an_old_vae_gets_the_weights_that_diffusers_would_load(tmp_path):
    """The names that SD 1.x and 2.x VAEs are stored under, as far as diffusers itself still understands them."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=2)
    vae.save_pretrained(tmp_path / "vae")
    path = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    old = (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn"))
    state = {}
    for name, array in load_file(path).items():
        renamed = name
        for new, was in old:
            renamed = renamed.replace(f"attentions.0.{new}.", f"attentions.0.{was}.")
        state[renamed] = array
    save_file(state, path, metadata={"format": "pt"})
    expected = AutoencoderKL.from_pretrained(tmp_path / "vae").state_dict()
    needed = {name: tuple(value.shape) for name, value in expected.items()}
    placed = place_weights(read_index(path), needed, tmp_path, "vae")
    assert sum(name not in state for name in needed) == 16
    for name, value in expected.items():
        np.testing.assert_array_equal(read(placed[name]), value.numpy())


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [("CLIPTextModel", ""), ("CLIPTextModel", "text_model."), ("CLIPTextModelWithProjection", "text_model.")],
)
def test_a_clip_text_encoder_gets_the_weights_that_transformers_would_load(tmp_path, kind, prefix):
    """Stored with and without the inner `text_model`, whichever the installed transformers has."""
    import transformers

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = transformers.CLIPTextConfig(**sizes, **ids, vocab_size=20, projection_dim=4)
    getattr(transformers, kind)(config).save_pretrained(tmp_path / "text_encoder")
    path = tmp_path / "text_encoder" / "model.safetensors"
    state = {"text_model.embeddings.position_ids": np.arange(77)[None]}  # stored by old versions, needed by none
    for name, array in load_file(path).items():
        inner = name.removeprefix("text_model.")
        state[inner if inner == "text_projection.weight" else prefix + inner] = array
    save_file(state, path, metadata={"format": "pt"})
    expected = getattr(transformers, kind).from_pretrained(tmp_path / "text_encoder").state_dict()
    needed = {name: tuple(value.shape) for name, value in expected.items()}
    placed = place_weights(read_index(path), needed, tmp_path, "text_encoder")
    for name, value in expected.items():
        np.testing.assert_array_equal(read(placed[name]), value.numpy())


# --- refusals


def test_a_full_disk_is_refused_before_anything_is_written(stored, tmp_path, monkeypatch):
    usage = weights.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda _: usage)
    for dtype in ("stored", "float16"):
        with pytest.raises(StorageError, match=r"the weights need 0\.0 MB, the disk has 0\.0 MB free"):
            place_weights(read_index(stored), NEEDED, tmp_path / "out", "unet", dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_a_source_that_changes_while_it_is_copied_is_refused_and_nothing_is_left(stored, tmp_path, monkeypatch):
    refs, whole = read_index(stored), os.copy_file_range

    def copy_then_touch(source, target, count, *places):
        os.utime(stored, ns=(1, 1))
        return whole(source, target, count, *places)

    monkeypatch.setattr(os, "copy_file_range", copy_then_touch)
    with pytest.raises(CheckpointError, match="changed while it was copied"):
        place_weights(refs, NEEDED, tmp_path / "out", "unet")
    assert not list((tmp_path / "out" / "weights").iterdir())


def test_a_source_that_shrank_is_refused(stored, tmp_path):
    refs = read_index(stored)
    os.truncate(stored, stored.stat().st_size - 8)
    with pytest.raises(CheckpointError, match="ended inside tensor"):
        place_weights(refs, {name: array.shape for name, array in TENSORS.items()}, tmp_path, "unet", dtype="float16")


def test_an_interrupted_copy_leaves_nothing(stored, tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    for dtype in ("stored", "float16"):
        with pytest.raises(KeyboardInterrupt):
            place_weights(read_index(stored), NEEDED, tmp_path / "out", "unet", dtype=dtype, progress=interrupt)
        assert not list((tmp_path / "out" / "weights").iterdir())


def test_types_that_cannot_be_made_are_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be stored as 'int8'"):
        place_weights({}, {}, tmp_path, "unet", dtype="int8")
    scaled = {"w": TensorRef(tmp_path / "m.safetensors", "float8_e4m3fn", (2,), 0, 2)}
    with pytest.raises(CheckpointError, match="float8_e4m3fn, which cannot become float16"):
        place_weights(scaled, {"w": (2,)}, tmp_path, "unet", dtype="float16")
