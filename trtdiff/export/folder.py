"""The export folder: what may be replaced by one, and whether one is just what would be made, without torch."""

from pathlib import Path

from trtdiff import __version__
from trtdiff.digest import code_digest, file_digest
from trtdiff.errors import ArtefactError, UsageError
from trtdiff.export.manifest import EXPORT_FILE, EXPORT_SCHEMA, CheckpointOrigin, ExportManifest
from trtdiff.families.base import ModelFamily
from trtdiff.machine import installed
from trtdiff.records import read_record
from trtdiff.types import names
from trtdiff.whole import foreign_files

LIBRARIES = (
    "torch", "diffusers", "transformers", "tokenizers", "onnxscript", "onnx-ir", "onnx", "ml_dtypes", "numpy"
)  # fmt: skip
"""Distributions whose versions change what a graph looks like."""


def library_versions() -> dict[str, str]:
    """Give the installed versions of what makes graphs, without importing it."""
    return installed(LIBRARIES)


def export_code(family: ModelFamily) -> str:
    """sha256 of the code of ours that makes an export of this family."""
    makers = ("export", "trace", "graph", "contract", "check")
    return code_digest([type(family).__module__, *(f"trtdiff.export.{name}" for name in makers)])


def require_replaceable(folder: Path) -> None:
    """Refuse to put an export where something else lies, or has been put beside one. Raises UsageError."""
    if not folder.exists():
        return
    if folder.is_dir() and ((folder / EXPORT_FILE).is_file() or not any(folder.iterdir())):
        _refuse_foreign(folder)
        return
    raise UsageError(
        f"{folder} is not an export of trtdiff, and is left as it is",
        where=str(folder),
        hint="choose another folder with -o",
    )


def _refuse_foreign(folder: Path) -> None:
    try:
        manifest = read_record(folder / EXPORT_FILE, ExportManifest, schema=EXPORT_SCHEMA)
    except ArtefactError:
        return  # nobody knows what belongs to it
    own = {EXPORT_FILE, *manifest.tokenizers.values()}
    for component in manifest.components:
        own |= {component.graph, *component.weights}
    if others := foreign_files(folder, own):
        raise UsageError(f"the export {folder} has files in it that are not its own: {names(others, 3)}",
                         where=str(folder), hint="it is replaced as a whole: move them elsewhere")  # fmt: skip


def current(
    folder: Path, origin: CheckpointOrigin, *, dtype: str, components: tuple[str, ...], code: str, checked: bool
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
        "trtdiff_code": manifest.code,
        **manifest.versions,
    }
    now = {
        "checkpoint": origin.digest,
        "dtype": dtype,
        "components": ", ".join(components),
        "trtdiff": __version__,
        "trtdiff_code": code,
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
