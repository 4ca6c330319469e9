"""Headers of safetensors files: what the format's own writer makes is read, what it forbids is refused."""

import json
import math
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save, save_file

from trtdiff.errors import CheckpointError
from trtdiff.export.safetensors_index import HEADER_LIMIT, read_index


def packed(header, data=b"", *, length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_a_git_lfs_pointer_is_called_what_it_is(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n")
    with pytest.raises(CheckpointError, match="is a Git LFS pointer") as caught:
        read_index(path)
    assert "git lfs pull" in caught.value.hint


def test_reads_where_the_formats_own_writer_put_every_tensor(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "matrix": rng.standard_normal((3, 4)).astype(np.float32),
        "half": rng.standard_normal(5).astype(np.float16),
        "ids": np.arange(7)[None],
        "flag": np.array([True, False]),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 3), np.float32),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    refs = read_index(path)
    assert refs.keys() == tensors.keys()
    for name, ref in refs.items():
        stored = np.fromfile(path, ref.dtype, math.prod(ref.shape), offset=ref.offset)
        np.testing.assert_array_equal(stored.reshape(ref.shape), tensors[name])
        assert (ref.dtype, ref.nbytes, ref.file) == (tensors[name].dtype.name, tensors[name].nbytes, path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds 0 bytes"),
        (b"\x02\0\0", "holds 3 bytes"),
        (packed(b"{}", length=HEADER_LIMIT + 1), "announces a header of 100000001 bytes, more than the format allows"),
        (packed(b"{}", length=3), "announces a header of 3 bytes and holds 2"),
        (packed(b"[]"), "not a JSON object"),
        (packed(b""), "not a JSON object"),
        (packed(b"{]"), "not valid JSON"),
        (packed(b'{"\xff": 1}'), "not valid JSON"),
        (packed(b'{"a":' * 100_000), "nested too deeply"),
        (packed(b'{"a": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
        (packed(b'{"a": {"dtype":"F32","dtype":"F32"}}'), "a name stands there twice"),
        (packed({"a": 3}), "without exactly dtype, shape and data_offsets"),
        (packed({"a": {**entry(), "more": 1}}, bytes(8)), "without exactly"),
        (packed({"\x1b[2J": entry()}, bytes(8)), "names a tensor '\\x1b[2J'"),
        (packed({"a": entry(dtype="F31")}, bytes(8)), "gives tensor a the type 'F31'"),
        (packed({"a": entry(dtype=["F32"])}, bytes(8)), "gives tensor a the type"),
        (packed({"a": entry(shape=(-2,))}, bytes(8)), "the shape [-2]"),
        (packed({"a": entry(shape=(2.0,))}, bytes(8)), "the shape [2.0]"),
        (packed({"a": entry(shape=(True, 2))}, bytes(8)), "the shape [True, 2]"),
        (packed({"a": entry(offsets=(-8, 0))}, bytes(8)), "puts tensor a at [-8, 0]"),
        (packed({"a": entry(offsets=(0, 8, 16))}, bytes(8)), "puts tensor a at"),
        (packed({"a": entry(offsets=(8, 0))}, bytes(8)), "-8 bytes, it needs 8"),
        (packed({"a": entry(shape=(3,))}, bytes(8)), "8 bytes, it needs 12"),
        (packed({"a": entry(shape=(1 << 62, 4))}, bytes(8)), "8 bytes, it needs 73786976294838206464"),
        (packed({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "overlap"),
        (packed({"a": entry(), "b": entry()}, bytes(8)), "overlap"),
        (packed({"a": entry(offsets=(4, 12))}, bytes(12)), "leave a gap"),
        (packed({"a": entry()}, bytes(7)), "is cut short"),
        (packed({"a": entry()}, bytes(9)), "bytes that belong to no tensor"),
        (packed({"__metadata__": {"a": 1}}), "__metadata__"),
        (packed({"__metadata__": []}), "__metadata__"),
    ],
)
def test_refuses_what_the_format_forbids_and_says_what(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_index(path)
    assert message in str(caught.value)
    assert str(path) in caught.value.where
    assert caught.value.hint


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link", "absent"])
def test_refuses_what_is_no_file(tmp_path, kind):
    path = tmp_path / "model.safetensors"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_index(path)


WHOLE = save({"first": np.ones((2, 3), np.float32), "second": np.arange(4, dtype=np.int64)}, {"format": "pt"})
HEADER = int.from_bytes(WHOLE[:8], "little") + 8


def check_against_the_formats_own_reader(path):
    """A header is an index inside the file, or a CheckpointError; ours accepts nothing that theirs refuses."""
    try:
        refs = read_index(path)
    except CheckpointError:
        return
    size = path.stat().st_size
    assert all(ref.offset + ref.nbytes <= size for ref in refs.values())
    with safe_open(path, "np") as theirs:
        assert set(theirs.keys()) == set(refs)


@given(position=st.integers(0, HEADER - 1), value=st.integers(0, 255))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changed_byte_of_a_header_is_read_or_refused(tmp_path, position, value):
    damaged = bytearray(WHOLE)
    damaged[position] = value
    path = tmp_path / "model.safetensors"
    path.write_bytes(damaged)
    check_against_the_formats_own_reader(path)


@given(cut=st.integers(0, len(WHOLE) - 1))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_truncation_is_refused(tmp_path, cut):
    path = tmp_path / "model.safetensors"
    path.write_bytes(WHOLE[:cut])
    with pytest.raises(CheckpointError):
        read_index(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
numbers = st.lists(st.integers(-2, 20) | json_values, max_size=3)
entries = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "I8", "BOOL", "?"]), "shape": numbers, "data_offsets": numbers}
)


@given(header=st.dictionaries(st.text(max_size=4), entries | json_values, max_size=3), data=st.binary(max_size=16))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_header_is_read_or_refused(tmp_path, header, data):
    path = tmp_path / "model.safetensors"
    path.write_bytes(packed(header, data))
    check_against_the_formats_own_reader(path)


def test_a_header_of_a_large_model_is_read_without_its_data(tmp_path):
    """Seven gigabytes that the disk does not hold: a sparse file."""
    header, position = {}, 0
    for layer in range(1700):
        header[f"blocks.{layer}.weight"] = entry("F16", (1024, 2048), (position, position + (1 << 22)))
        position += 1 << 22
    path = tmp_path / "model.safetensors"
    path.write_bytes(packed(header))
    os.truncate(path, path.stat().st_size + position)
    refs = read_index(path)
    assert len(refs) == 1700
    assert path.stat().st_size > 7e9
