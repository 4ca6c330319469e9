import hashlib

from trtdiff.digest import file_digest


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
