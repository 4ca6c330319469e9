"""A file of prompts: UTF-8, a prompt a line."""

from pathlib import Path

from trtdiff.errors import UsageError

LONGEST = 2000
"""Characters of a line; text encoders read some 77 words of it, or a few hundred."""


def read_prompts(path: Path) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Read a file of prompts; give them, and the numbers of blank lines, which are left out.

    A byte order mark and Windows' line ends are no part of a prompt. Raises UsageError, naming the line, for what is no
    text, for a line that no prompt can be, and for a file without any prompt.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the prompts: {error.strerror}", where=f"--prompts {path}",
                         hint="name a text file with a prompt a line") from None  # fmt: skip
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = raw[: error.start].count(b"\n") + 1
        raise UsageError("the prompts are not UTF-8", where=f"{path}:{number}", hint="save the file as UTF-8") from None
    lines = [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    for number, line in enumerate(lines, start=1):
        if len(line) > LONGEST:
            raise UsageError(f"a line of {len(line)} characters is no prompt", where=f"{path}:{number}",
                             hint=f"a prompt a line, of {LONGEST} characters at most")  # fmt: skip
        if not line.isprintable() and any(ord(letter) < 32 and letter != "\t" for letter in line):
            raise UsageError("a line with control characters is no prompt", where=f"{path}:{number}",
                             hint="name a text file with a prompt a line")  # fmt: skip
    prompts = tuple(line for line in lines if line)
    if not prompts:
        raise UsageError("there is no prompt in the file", where=f"--prompts {path}", hint="write a prompt a line")
    last = len(lines) - (not lines[-1])  # what follows the last line end is no line
    return prompts, tuple(number for number, line in enumerate(lines[:last], start=1) if not line)
