"""Folders that are whole or absent, also where they are reached through links."""

import errno
from pathlib import Path

import pytest

from trtdiff.errors import StorageError
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
