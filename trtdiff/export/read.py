"""Read an export, and see that its files are those its manifest speaks of. Imports neither torch nor onnx."""

from collections.abc import Mapping
from pathlib import Path

from trtdiff.digest import file_digest
from trtdiff.errors import ArtefactError, UsageError
from trtdiff.export.manifest import EXPORT_FILE, EXPORT_SCHEMA, ExportManifest
from trtdiff.records import read_record


def read_export(folder: Path, *, fresh: bool = False) -> ExportManifest:
    """Read an export and check its files against it, by every byte where `fresh`. Raises UsageError, ArtefactError."""
    file = folder / EXPORT_FILE
    if not file.is_file():
        raise UsageError(f"{folder} is not an export: it has no {EXPORT_FILE}", where=str(folder),
                         hint="make one with: trtdiff export CHECKPOINT")  # fmt: skip
    export = read_record(file, ExportManifest, schema=EXPORT_SCHEMA)
    wanted = {export.tokenizers[name]: sha256 for name, sha256 in export.tokenizer_sha256.items()}
    for component in export.components:
        wanted |= {component.graph: component.graph_sha256, **component.weights}
    check_export(folder, wanted, fresh=fresh)
    return export


def check_export(folder: Path, files: Mapping[str, str], *, fresh: bool = False) -> None:
    """Raise ArtefactError for the first file of an export that is not what its manifest says, by name → sha256."""
    for name, sha256 in files.items():
        path = folder / name
        try:
            found = file_digest(path, fresh=fresh)
        except OSError as error:
            reason = "has no" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror}):"
            raise ArtefactError(f"the export {reason} {name}", where=str(path), hint="export again") from None
        if found != sha256:
            raise ArtefactError(f"{name} was changed after the export", where=str(path), hint="export again")
