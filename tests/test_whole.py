"""Folders that are whole or absent, also where they are reached through links."""

import errno
import threading
import time
from pathlib import Path

import pytest

from trtdiff.errors import BuildError, StorageError
from trtdiff.whole import locked, replaced_folder


def fill(place, text):
    with locked(place, lambda _text: None), replaced_folder(place) as folder:
        (folder / "file").write_text(text)


def test_a_link_keeps_its_place_and_what_it_points_to_is_replaced(tmp_path):
    real = tmp_path / "large disk/bundle"
    link = tmp_path / "engines"
    link.symlink_to(real)
    for text in ("first", "second", "third"):
        fill(link, text)
        assert link.is_symlink()
        assert (real / "file").read_text() == text
    assert [path.name for path in real.parent.iterdir() if path.name != ".locks"] == ["bundle"]


def test_the_current_folder_can_be_the_place(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    fill(Path(), "x")
    assert (tmp_path / "here/file").read_text() == "x"


@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "No space left on device"), None])
def test_a_failure_to_write_is_told_as_one_and_the_old_folder_stays(tmp_path, problem):
    fill(tmp_path / "place", "old")

    def fail():
        with replaced_folder(tmp_path / "place") as folder:
            if problem is not None:
                raise problem
            (folder / "absent/file").write_text("x")  # a path below the new folder

    with pytest.raises(StorageError, match="cannot write place"):
        fail()
    assert (tmp_path / "place/file").read_text() == "old"


def test_a_failure_to_read_something_else_is_not_a_failure_to_write(tmp_path):
    with pytest.raises(FileNotFoundError), replaced_folder(tmp_path / "place"):
        (tmp_path / "source").read_text()
    assert not (tmp_path / "place").exists()


def test_a_wait_for_the_lock_can_be_ended(tmp_path):
    said, ended, stop = [], [], threading.Event()

    def wait():
        with pytest.raises(BuildError, match="interrupted while waiting"), locked(place, said.append, stop):
            raise AssertionError("somebody else holds it")
        ended.append(True)

    place = tmp_path / "place"
    with locked(place, said.append):
        waiter = threading.Thread(target=wait)
        waiter.start()
        while not said:
            time.sleep(0.01)
        stop.set()
        waiter.join(10)
    assert ended == [True]
    assert said[0].startswith("somebody else is making")


def test_a_wait_for_the_lock_ends_when_it_is_free(tmp_path):
    said, got, stop = [], [], threading.Event()

    def wait():
        with locked(tmp_path / "place", said.append, stop):
            got.append(True)

    with locked(tmp_path / "place", said.append):
        waiter = threading.Thread(target=wait)
        waiter.start()
        while not said:
            time.sleep(0.01)
        assert not got
    waiter.join(10)
    assert got == [True]
