"""What a build needs is known before it begins, and refused where it is not there."""

import json
from types import SimpleNamespace

import pytest

from trtdiff import estimate
from trtdiff.errors import ArtefactError, BuildError, StorageError


@pytest.fixture
def disk(monkeypatch):
    """Any disk has 1000 bytes free."""
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(total=2000, used=1000, free=1000))


def test_folders_of_one_disk_share_its_room(disk, tmp_path):
    estimate.check_disk({tmp_path / "bundle": 600, tmp_path / "store": 400})
    with pytest.raises(StorageError, match=r"about 1\.0 kB, the disk has 1\.0 kB") as caught:
        estimate.check_disk({tmp_path / "bundle": 600, tmp_path / "deep/store": 401})
    assert caught.value.where.endswith("store")


def test_memory_that_is_not_there_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(estimate, "available_memory", lambda: 10**9)
    estimate.check_memory("x", 10**9)
    with pytest.raises(BuildError, match=r"x needs about 2.0 GB of memory, 1.0 GB are available"):
        estimate.check_memory("x", 2 * 10**9)


@pytest.mark.parametrize(
    "header",
    [
        '{"w": {"dtype": "F16"}}',
        '{"w": 3}',
        '{"w": {"data_offsets": [0, 2]}}',
        "[]",
        "{",
        '{"w": {"dtype": [], "data_offsets": [0, 2]}}',
    ],
)
def test_a_weight_file_with_a_lying_header_is_named(header, tmp_path):
    file = tmp_path / "w.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(ArtefactError, match="not a readable weight file") as caught:
        estimate._tensor_sizes(file)
    assert caught.value.where == str(file)


def test_half_precision_is_counted_as_it_will_be_written(tmp_path):
    header = json.dumps({
        "__metadata__": {},
        "a": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
    })  # fmt: skip
    file = tmp_path / "w.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(16))
    assert sorted(estimate._tensor_sizes(file)) == [8, 16]
