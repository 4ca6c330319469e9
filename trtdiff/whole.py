"""Folders that are whole or absent: made beside their place, synced, and renamed, under a lock.

    with locked(place, waiting), replaced_folder(place) as folder:
        ...  # fill `folder`; on success it is `place`

Locks are the operating system's: a killed process leaves none behind, only a hidden folder, which the next one that
holds the lock removes.
"""

import errno
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from trtdiff.errors import BuildError, StorageError
from trtdiff.files import sync_folder, sync_tree

_LOOK = 0.25
"""Seconds between two looks at `stop`."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO}


@contextmanager
def locked(place: Path, waiting: Callable[[str], None], stop: threading.Event | None = None) -> Iterator[None]:
    """Hold the lock on what stands, or will stand, at `place`; `waiting` is told when somebody else holds it.

    Setting `stop`, from another thread, ends the wait with a BuildError.

    Lock files stay, in a hidden folder: removing one that somebody waits for would let two in.
    """
    place = place.resolve()
    with storing(place.parent):
        folder = place.parent / ".locks"
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / place.name)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting(f"somebody else is making {place}; waiting for it")
            while not lock.is_locked:
                if stop is not None and stop.is_set():
                    raise BuildError(f"interrupted while waiting for {place}") from None
                with suppress(Timeout):
                    lock.acquire(timeout=_LOOK)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def replaced_folder(place: Path) -> Iterator[Path]:
    """Give an empty hidden folder beside `place`; on success it is synced and takes the place, else it is removed.

    What stood there before goes away last. The caller holds a lock on `place`, so that what an earlier, killed process
    left may be removed. A link keeps its place: what it points to is replaced.
    """
    place = place.resolve()
    fresh, old = place.with_name(f".{place.name}.part"), place.with_name(f".{place.name}.old")
    with storing(place):
        if old.exists() and not place.exists():
            old.rename(place)  # killed between the two renames below
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=not leftover.exists())
        fresh.mkdir(parents=True)
    try:
        with filling(fresh, place):
            yield fresh
        with storing(place):
            sync_tree(fresh)
            if place.exists():
                place.rename(old)
            fresh.rename(place)
            sync_folder(place.parent)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        if old.exists() and not place.exists():
            old.rename(place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def foreign_files(folder: Path, own: Collection[str], below: Collection[str] = ()) -> list[str]:
    """Give the files of a folder that are neither its own nor below folders of its own: they would go with it.

    Hidden ones, which people do not put there, do not count.
    """
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and not path.is_dir() and name not in own and not any(name.startswith(f"{up}/") for up in below):
            found.append(name)
    return found


@contextmanager
def filling(folder: Path, place: Path) -> Iterator[None]:
    """Turn an OSError of whoever fills the folder into StorageError, if it is about writing and not about reading."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL and not str(error.filename or "").startswith(str(folder)):
            raise
        with storing(place):
            raise


@contextmanager
def storing(place: Path) -> Iterator[None]:
    """Turn an OSError into StorageError: what could not be written, and what to do."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {place.name}: {error.strerror or error}", where=str(error.filename or place),
                           hint="free some space or choose another folder; nothing was changed")  from None  # fmt: skip
