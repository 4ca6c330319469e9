"""The store: artefacts by the key of what determines them, each in a folder `<key>/` with its manifest.

An entry is whole or absent: it is made in a hidden folder beside its place, synced, and renamed. A lock per key lets
one process build while others of the same key wait, then reuse. Locks are the operating system's: a killed process
leaves none behind, only a hidden folder, which the next one that holds the lock removes.

Reading checks the manifest, and every file's size and sha256. A digest is read from the bytes once, then remembered by
device, inode, size and times (`trtdiff.digest`): a file that was written to since is read again and found out, whereas
damage that changes no time (a failing disk) is found by `fresh=True` alone.

Entries are copied into bundles, not linked: a bundle must survive that its store is deleted, and damage to one must not
be damage to both. On file systems with reflinks (btrfs, XFS, bcachefs) a copy takes no room. Hard links would take none
anywhere, and ONNX Runtime 1.32 opens them, but the onnx package and onnx-ir refuse external data that has more than one
link, as an attack. Entries may be deleted at any time; the
next build that wants one makes it again.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtdiff.errors import ArtefactError
from trtdiff.files import check_files, copy_file, facts_of
from trtdiff.manifest import MANIFEST_FILE, MANIFEST_SCHEMA, Made, Manifest, key_of, read_manifest, spec_json
from trtdiff.records import write_record
from trtdiff.whole import locked, replaced_folder

_AGAIN = "build again, with the same command: what is damaged is made anew"


@dataclass(frozen=True)
class Entry:
    """One whole artefact."""

    path: Path
    manifest: Manifest

    def copy_to(self, folder: Path) -> None:
        """Copy manifest and files to a new folder."""
        for name, facts in self.manifest.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy_file(self.path / name, target, sha256=facts.sha256)
        copy_file(self.path / MANIFEST_FILE, folder / MANIFEST_FILE)


class Store:
    """A folder of entries."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def get(self, key: str, *, fresh: bool = False) -> Entry | None:
        """Give the entry of that key, checked as the module says; None where there is none. Raises ArtefactError."""
        folder = self.path / key
        if not (folder / MANIFEST_FILE).is_file():
            if folder.exists():
                raise ArtefactError(f"entry {key} has no {MANIFEST_FILE}", where=str(folder), hint=_AGAIN)
            return None
        manifest = read_manifest(folder / MANIFEST_FILE)
        if manifest.key != key:
            raise ArtefactError(f"the entry is {manifest.key}, renamed to {key}", where=str(folder), hint=_AGAIN)
        check_files(folder, manifest.files, hint=_AGAIN, fresh=fresh)
        return Entry(folder, manifest)

    def put(
        self,
        spec: Any,
        make: Callable[[Path], Made],
        *,
        force: bool = False,
        fresh: bool = False,
        waiting: Callable[[str], None] = lambda text: None,  # noqa: ARG005
        discarding: Callable[[str], None] = lambda text: None,  # noqa: ARG005
        stop: threading.Event | None = None,
    ) -> Entry:
        """Give the entry of a spec; where there is none, `make` fills a folder and it becomes the entry.

        A damaged entry is replaced, after `discarding` has been told what was wrong with it; `force` replaces any;
        `fresh` reads every byte of one before it is given. `waiting` is told when somebody else holds the key,
        and `stop` ends the wait.
        Raises what `make` raises, and StorageError.
        """
        plain = spec_json(spec)
        key = key_of(plain)
        began = time.time_ns()
        with locked(self.path / key, waiting, stop):
            try:
                found = self.get(key, fresh=fresh)
            except ArtefactError as error:
                discarding(str(error))
                found = None
            if found is not None and (not force or _written_since(found, began)):
                return found
            with replaced_folder(self.path / key) as folder:
                made = make(folder)
                manifest = Manifest(
                    MANIFEST_SCHEMA, key, plain, facts_of(folder), made.inputs, made.outputs, made.realised,
                    made.seconds, made.peak_memory,
                )  # fmt: skip
                write_record(folder / MANIFEST_FILE, manifest)
            return Entry(self.path / key, manifest)


def _written_since(entry: Entry, began: int) -> bool:
    """Whether another process made this entry while we waited for the lock: it is as new as was asked for."""
    return (entry.path / MANIFEST_FILE).stat().st_mtime_ns >= began
