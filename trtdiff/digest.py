"""One way to name content: canonical JSON and files to sha256.

sha256 of a file is paid once: it is remembered by (device, inode, size, mtime and ctime in ns). Whoever rewrites a file
may set its modification time to what it was, but not the time at which the system saw it change. Remembered digests
live in the user's cache folder; `fresh=True` reads the bytes again.
"""

import ast
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

KEY_SCHEMA_VERSION = 1
_CHUNK = 1 << 22
_ROOT = __name__.partition(".")[0]
_HOME = Path(__file__).parent.parent


def canonical(value: Any) -> bytes:
    """JSON with sorted keys, no spaces, no NaN: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    """Hexadecimal sha256 of a JSON-like value."""
    return hashlib.sha256(canonical(value)).hexdigest()


def file_digest(path: Path, *, fresh: bool = False, progress: Callable[[int], None] | None = None) -> str:
    """Hexadecimal sha256 of a file; remembered by identity, size and time unless `fresh`."""
    identity = _identity(path)
    if not fresh and (known := _remembered(identity)):
        return known
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
            if progress is not None:
                progress(len(chunk))
    found = hasher.hexdigest()
    if _identity(path) == identity:  # a file that changed while it was read is not remembered
        _store(identity, found)
    return found


def remember(path: Path, known: str) -> None:
    """Record a digest computed while the file was written, so that it is never read for it again."""
    _store(_identity(path), known)


def code_digest(modules: Iterable[str]) -> str:
    """Hexadecimal sha256 of the source of these modules and of every module of theirs that they import as they load.

    It stands in the key of what the code makes: what other code made is another artefact. Modules are names below
    `trtdiff`; imports inside of functions and for type checkers are left out.
    """
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += _imports(module)
    hasher = hashlib.sha256()
    for module in sorted(found):
        hasher.update(module.encode() + b"\0" + _source(module).read_bytes() + b"\0")
    return hasher.hexdigest()


@cache
def _imports(module: str) -> tuple[str, ...]:
    """Give the modules of trtdiff that a module imports when it is imported itself."""
    body = ast.parse(_source(module).read_bytes()).body
    named = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            named += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(name for name in named if name.startswith(f"{_ROOT}.") and _is_module(name))


def _is_module(name: str) -> bool:
    return _source(name).is_file()


def _source(module: str) -> Path:
    """Give the file of a module or package of ours."""
    place = _HOME.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def move(source: Path, target: Path) -> None:
    """Rename a file and keep what is remembered of it: to the system, a new name is a change."""
    known = _remembered(_identity(source))
    source.rename(target)
    if known:
        remember(target, known)


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def _store(identity: str, known: str) -> None:
    try:
        with closing(_memo()) as memo, memo:
            memo.execute("INSERT OR REPLACE INTO digests VALUES (?, ?)", (identity, known))
    except (sqlite3.Error, OSError):
        return  # a memo that cannot be written costs time, not correctness


def _remembered(identity: str) -> str | None:
    try:
        with closing(_memo()) as memo:
            row = memo.execute("SELECT sha256 FROM digests WHERE identity = ?", (identity,)).fetchone()
    except (sqlite3.Error, OSError):
        return None
    return row[0] if row else None


def cache_folder() -> Path:
    """Give the folder of what can be made again: `$TRTDIFF_CACHE`, else the user's cache."""
    return Path(os.environ.get("TRTDIFF_CACHE") or user_cache_path("trtdiff"))


def _memo() -> sqlite3.Connection:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    memo = sqlite3.connect(folder / "digests.sqlite", timeout=5)
    memo.execute("CREATE TABLE IF NOT EXISTS digests (identity TEXT PRIMARY KEY, sha256 TEXT NOT NULL)")
    return memo
