"""The export folder: it appears whole or not at all, and an unchanged one is recognised without importing torch."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trtdiff import __version__
from trtdiff.digest import file_digest
from trtdiff.errors import ArtefactError, StorageError, UsageError
from trtdiff.export.manifest import EXPORT_FILE, EXPORT_SCHEMA, CheckpointOrigin, ExportManifest
from trtdiff.records import read_record

LIBRARIES = ("torch", "diffusers", "transformers", "onnxscript", "onnx-ir", "onnx")
"""Distributions whose versions change what a graph looks like."""


def library_versions() -> dict[str, str]:
    """Give the installed versions of what makes graphs, without importing it."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def require_replaceable(folder: Path) -> None:
    """Refuse to put an export where something else lies. Raises UsageError."""
    if not folder.exists():
        return
    if folder.is_dir() and ((folder / EXPORT_FILE).is_file() or not any(folder.iterdir())):
        return
    raise UsageError(
        f"{folder} is not an export of trtdiff, and is left as it is",
        where=str(folder),
        hint="choose another folder with -o",
    )


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder beside `folder`; on success it takes its place, else it is removed."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    except OSError as error:
        raise StorageError(f"cannot write {folder.name}: {error.strerror}", where=str(folder.parent),
                           hint="choose a folder that can be written with -o")  from None  # fmt: skip
    try:
        yield temporary
        temporary.chmod(0o755)
        _take_place(temporary, folder)
    except OSError as error:
        raise StorageError(
            f"cannot write {folder.name}: {error.strerror or error}",
            where=str(folder.parent),
            hint="free some space or choose another folder; nothing was changed",
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _take_place(temporary: Path, folder: Path) -> None:
    if not folder.exists():
        temporary.rename(folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".old", dir=folder.parent))
    folder.rename(old / folder.name)
    try:
        temporary.rename(folder)
    except BaseException:
        (old / folder.name).rename(folder)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def current(
    folder: Path, origin: CheckpointOrigin, *, dtype: str, components: tuple[str, ...], checked: bool
) -> tuple[ExportManifest | None, str]:
    """Give the manifest of an export that is just what would be made now, or None and what differs."""
    if not (folder / EXPORT_FILE).is_file():
        return None, "there is none"
    try:
        manifest = read_record(folder / EXPORT_FILE, ExportManifest, schema=EXPORT_SCHEMA)
    except ArtefactError as error:
        return None, error.message
    before = {
        "checkpoint": manifest.checkpoint.digest,
        "dtype": manifest.dtype,
        "components": ", ".join(component.name for component in manifest.components),
        "trtdiff": manifest.trtdiff,
        **manifest.versions,
    }
    now = {
        "checkpoint": origin.digest,
        "dtype": dtype,
        "components": ", ".join(components),
        "trtdiff": __version__,
        **library_versions(),
    }
    for field in now | before:
        if before.get(field) != now.get(field):
            return None, f"{field} was {_short(before.get(field))}, is {_short(now.get(field))}"
    if checked and not all(name in manifest.checks for name in components):
        return None, "it was not checked against PyTorch"
    if damaged := _damaged(folder, manifest):
        return None, f"{damaged} is missing or changed"
    return manifest, ""


def _damaged(folder: Path, manifest: ExportManifest) -> str:
    files: dict[str, str] = {}
    for component in manifest.components:
        files |= {component.graph: component.graph_sha256, **component.weights}
    for name, file in manifest.tokenizers.items():
        files[file] = manifest.tokenizer_sha256[name]
    return next((file for file, sha256 in files.items() if not _is(folder / file, sha256)), "")


def _is(path: Path, sha256: str) -> bool:
    try:
        return file_digest(path) == sha256
    except OSError:
        return False


def _short(text: str | None) -> str:
    return "absent" if text is None else text[:12] + "…" if len(text) > 40 else text


def sizes_of_files(folder: Path, files: Mapping[str, str]) -> int:
    """Bytes of an export's files."""
    return sum((folder / file).stat().st_size for file in files)
