"""JSON files of ours: written whole or not at all, read with errors that name the file and the field."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trtdiff.errors import ArtefactError, StorageError

T = TypeVar("T")


def read_record(path: Path, kind: type[T], *, schema: int) -> T:
    """Read a JSON record of a dataclass that has a `schema` field.

    Raises ArtefactError for a missing, damaged or newer file, naming the field that is wrong.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ArtefactError(f"cannot read {path.name}: {error.strerror}", where=str(path)) from None
    try:
        loose = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtefactError(f"{path.name} is damaged: {error}", where=str(path), hint="make it again") from None
    found = loose.get("schema") if isinstance(loose, dict) else None
    if isinstance(found, int) and found > schema:
        raise ArtefactError(f"{path.name} has schema {found}, this version reads up to {schema}", where=str(path),
                            hint="upgrade trtdiff, or make it again with this version")  # fmt: skip
    try:
        return msgspec.convert(loose, kind)
    except msgspec.ValidationError as error:
        raise ArtefactError(f"{path.name} is not what this version writes: {error}", where=str(path),
                            hint="make it again")  from None  # fmt: skip


def write_record(path: Path, record: Any) -> None:
    """Write a dataclass or JSON-like value as indented JSON, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary name in the same folder; on success it is synced and renamed to `path`, else removed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise StorageError(f"cannot write {path.name}: {error.strerror}", where=str(path.parent),
                           hint="choose a folder that can be written, or free some space")  from None  # fmt: skip
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path.name}: {error.strerror or error}", where=str(path.parent),
                           hint="free some space or choose another name; what was there stays") from None  # fmt: skip
    finally:
        temporary.unlink(missing_ok=True)
