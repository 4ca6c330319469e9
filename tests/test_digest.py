import hashlib
import os

import pytest

from trtdiff import digest as digest_module
from trtdiff.digest import code_digest, file_digest


def test_a_file_that_changes_while_it_is_read_is_not_remembered(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"before")

    def change(_count):
        path.write_bytes(b"afterwards")

    file_digest(path, progress=change)
    assert file_digest(path) == hashlib.sha256(b"afterwards").hexdigest()


def test_a_remembered_file_is_not_read_again_unless_asked(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"x")
    read = []
    for fresh, expected in ((False, 1), (False, 1), (True, 2)):
        assert file_digest(path, fresh=fresh, progress=read.append) == hashlib.sha256(b"x").hexdigest()
        assert len(read) == expected


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A package of ours in miniature: `a` imports `b` as it loads, and `late` only when it works."""
    package = tmp_path / "trtdiff"
    (package / "inner").mkdir(parents=True)
    (package / "a.py").write_text(
        "import json\nfrom trtdiff import b\nfrom trtdiff.inner import c\n\ndef work():\n    import trtdiff.late\n"
    )
    for name in ("b", "late", "other", "inner/__init__", "inner/c"):
        (package / f"{name}.py").write_text("x = 1\n")
    monkeypatch.setattr("trtdiff.digest._HOME", tmp_path)
    return package


@pytest.mark.parametrize(
    ("changed", "noticed"),
    [("a", True), ("b", True), ("inner/__init__", True), ("inner/c", True), ("late", False), ("other", False)],
)
def test_a_code_digest_covers_what_a_module_imports_as_it_loads(sources, changed, noticed):
    digest_module._imports.cache_clear()
    before = code_digest(["trtdiff.a"])
    (sources / f"{changed}.py").write_text((sources / f"{changed}.py").read_text() + "y = 2\n")
    digest_module._imports.cache_clear()
    assert (code_digest(["trtdiff.a"]) != before) is noticed


def test_a_code_digest_of_the_real_code_reaches_through_imports():
    digest_module._imports.cache_clear()
    assert "trtdiff.types" in digest_module._imports("trtdiff.backends.base")


def test_a_file_rewritten_with_its_old_time_is_read_again(tmp_path):
    """Reproducible archives and image layers set modification times; the inode is often used again."""
    path = tmp_path / "weights"
    for content in (b"one", b"two"):
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        os.utime(path, (1, 1))
        assert file_digest(path) == hashlib.sha256(content).hexdigest()


def test_a_file_that_is_moved_by_us_is_not_read_again(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"x")
    file_digest(path)
    digest_module.move(path, tmp_path / "moved")
    read = []
    assert file_digest(tmp_path / "moved", progress=read.append) == hashlib.sha256(b"x").hexdigest()
    assert not read
