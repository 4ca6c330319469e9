"""Pages of mapped files are dropped, and nothing is lost by it."""

import mmap
import sys
import threading
import time
from pathlib import Path

import pytest

from trtdiff.backends.mapped_files import drop_pages, dropping_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SIZE = 4096 * mmap.PAGESIZE


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    return path


def about(size, expected):
    """Whether it is the expected size, give or take what the system's count of a process's pages is late by."""
    return abs(size - expected) < SIZE / 8


def resident(path):
    """Bytes of a file that this process has in memory through mappings."""
    here, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            here = line.endswith(str(path))
        elif here and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_pages_that_were_read_are_dropped_and_read_again(weights):
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        content = mapped[:]
        assert resident(weights) == SIZE
        assert about(drop_pages(weights.parent), SIZE)
        assert resident(weights) == 0
        assert mapped[:] == content == weights.read_bytes()


def test_a_link_stands_for_the_file_that_it_leads_to(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("links")
    (folder / weights.name).symlink_to(weights)
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(mapped[:]) == SIZE
        drop_pages(folder)
        assert resident(weights) == 0


def test_what_may_have_been_written_is_left_alone(weights):
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[:4] = b"mine"
        assert about(drop_pages(weights.parent), 0)
        assert mapped[:4] == b"mine"


def test_files_of_other_folders_are_left_alone(weights, tmp_path_factory):
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(mapped[:]) == SIZE
        assert about(drop_pages(tmp_path_factory.mktemp("other")), 0)
        assert resident(weights) == SIZE


def test_it_happens_while_the_body_runs_and_ends_with_it(weights):
    before = threading.active_count()
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        told = []
        with dropping_pages(weights.parent, told.append):
            assert len(mapped[:]) == SIZE
            assert any((told and about(told[-1], SIZE)) or time.sleep(0.05) for _ in range(200))
        assert threading.active_count() == before
        assert told == sorted(told)
        assert len(mapped[:]) == SIZE
        assert resident(weights) == SIZE


def test_it_ends_when_the_body_fails(weights):
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), dropping_pages(weights.parent, lambda size: None):
        raise ZeroDivisionError
    assert threading.active_count() == before
