"""A file of prompts, a prompt a line, as editors of every system write it; what cannot be meant names its line."""

import pytest

from trtdiff.calibrate.prompt_file import read_prompts
from trtdiff.errors import UsageError


@pytest.mark.parametrize(
    ("raw", "blank"),
    [
        (b"a cat\nzwei B\xc3\xa4ume\n", ()),
        (b"\xef\xbb\xbfa cat\r\nzwei B\xc3\xa4ume", ()),
        (b"\n a cat \n\n\nzwei B\xc3\xa4ume\n \n", (1, 3, 4, 6)),
        (b"a cat\rzwei B\xc3\xa4ume\r", ()),
    ],
    ids=["unix", "windows", "blank lines", "old mac"],
)
def test_prompts_are_the_lines(tmp_path, raw, blank):
    (tmp_path / "prompts.txt").write_bytes(raw)
    assert read_prompts(tmp_path / "prompts.txt") == (("a cat", "zwei Bäume"), blank)


@pytest.mark.parametrize(
    ("raw", "match", "line"),
    [
        (b"", "no prompt", None),
        (b"\n \n\t\n", "no prompt", None),
        (b"a cat\n" + b"x" * 10_000 + b"\n", "a line of 10000 characters", 2),
        (b"a cat\n\na d\xf6g\n", "not UTF-8", 3),
        (b"\x89PNG\x1a\x00\x00", "not UTF-8", 1),
        (b"a cat\na \x00 dog\n", "control characters", 2),
    ],
)
def test_what_is_no_prompt_names_its_line(tmp_path, raw, match, line):
    path = tmp_path / "prompts.txt"
    path.write_bytes(raw)
    with pytest.raises(UsageError, match=match) as caught:
        read_prompts(path)
    assert caught.value.where == (f"{path}:{line}" if line else f"--prompts {path}")


def test_no_file_is_said(tmp_path):
    with pytest.raises(UsageError, match="cannot read the prompts: No such file"):
        read_prompts(tmp_path / "none")
    with pytest.raises(UsageError, match="Is a directory"):
        read_prompts(tmp_path)
