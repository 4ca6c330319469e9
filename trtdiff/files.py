"""Files of an artefact: their facts (size and sha256), checking them, copying them without their bytes passing here."""

import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trtdiff.digest import file_digest, remember
from trtdiff.errors import ArtefactError

_CHUNK = 1 << 30
_NO_RANGE_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY}


@dataclass(frozen=True)
class FileFacts:
    """Size in bytes and sha256 of one file."""

    size: int
    sha256: str


def facts_of(folder: Path, *, without: str = "") -> dict[str, FileFacts]:
    """Read the facts of every file below `folder`, by its path relative to it, in order."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name != without:
            found[name] = facts_of_file(path)
    return found


def facts_of_file(path: Path) -> FileFacts:
    """Read the facts of one file."""
    return FileFacts(path.stat().st_size, file_digest(path))


def check_files(
    folder: Path, files: Mapping[str, FileFacts], *, hint: str, fresh: bool = False, sizes: bool = False
) -> None:
    """Raise ArtefactError for the first file that is missing or is not what `files` says.

    Digests come from the memo of `trtdiff.digest`: a file that was rewritten since is read again, one that was not is
    trusted. `fresh` reads every byte. `sizes` looks at sizes alone.
    """
    for name, facts in files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ArtefactError(f"{name} lies outside of its folder", where=str(folder), hint=hint)
        path = folder / name
        try:
            size = path.stat().st_size
            sha256 = facts.sha256 if sizes or size != facts.size else file_digest(path, fresh=fresh)
        except OSError as error:
            raise ArtefactError(f"{name} cannot be read: {error.strerror}", where=str(path), hint=hint) from None
        if size != facts.size:
            raise ArtefactError(f"{name} has {size} bytes, {facts.size} were written", where=str(path), hint=hint)
        if sha256 != facts.sha256:
            raise ArtefactError(f"{name} is damaged: its sha256 is {sha256[:12]}…, {facts.sha256[:12]}… was written",
                                where=str(path), hint=hint)  # fmt: skip


def copy_file(source: Path, target: Path, *, sha256: str | None = None) -> None:
    """Copy bytes inside the kernel: a reflink (no bytes, no disk) where the file system has them. Synced.

    `sha256`, where it is known, is remembered for the copy, so that the copy is not read to learn it.
    """
    with source.open("rb") as reader, target.open("xb") as writer:
        left = os.fstat(reader.fileno()).st_size
        try:
            while left:
                copied = os.copy_file_range(reader.fileno(), writer.fileno(), min(left, _CHUNK))
                if not copied:
                    break
                left -= copied
        except OSError as error:
            if error.errno not in _NO_RANGE_COPY:
                raise
        except AttributeError:
            pass  # not Linux
        if left:
            reader.seek(os.lseek(writer.fileno(), 0, os.SEEK_CUR))
            shutil.copyfileobj(reader, writer, 1 << 22)
        writer.flush()
        os.fsync(writer.fileno())
    if sha256 is not None:
        remember(target, sha256)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make every file below a folder, and their names, survive a power cut."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
