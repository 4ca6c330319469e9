"""Every kind of tiny checkpoint, exported and built once for all test processes."""

from pathlib import Path

import pytest
import tiny

STEPS = (1, 2, 4, 5)
SCHEDULERS = {
    "sd1": ("ddim", "euler_a", "dpmpp_2m", "unipc"),
    "sd2": ("dpmpp_2m",),
    "turbo": ("euler",),
    "sdxl": ("euler", "dpmpp_2m"),
    "sdxl-refiner": ("euler", "dpmpp_2m"),
}
PROFILES = {"sdxl": "context=16:16:48"}


@pytest.fixture(scope="session")
def compile_kind(compiler):
    """`compile_kind(kind, export, out, profile="branches=1")` builds it for few steps and sizes."""
    from trtdiff.export.manifest import EXPORT_FILE, EXPORT_SCHEMA, ExportManifest
    from trtdiff.records import read_record

    def build(kind: str, export: Path, out: Path, profile: str = "") -> None:
        step = read_record(export / EXPORT_FILE, ExportManifest, schema=EXPORT_SCHEMA).facts.sizes_multiple_of
        sizes = f"{2 * step}:{4 * step}:{8 * step}"
        compiler(
            export, out, schedulers=("default", *SCHEDULERS.get(kind, ())), steps=STEPS,
            profile=f"batch=1:1:4,height={sizes},width={sizes},{profile or PROFILES.get(kind, '')}",
        )  # fmt: skip

    return build


@pytest.fixture(scope="session")
def made(shared_folder, compile_kind):
    """`made(kind)` gives a folder with `checkpoint`, `export` and `bundle`."""
    from trtdiff.checkpoint import Checkpoint
    from trtdiff.export.export import export_checkpoint
    from trtdiff.whole import locked

    def make(kind: str) -> Path:
        folder = shared_folder / "families" / kind
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock", lambda _text: None):
            if not (folder / "done").exists():
                tiny.make(kind, folder / "checkpoint")
                export_checkpoint(Checkpoint.open(str(folder / "checkpoint")), folder / "export", check=False)
                compile_kind(kind, folder / "export", folder / "bundle")
                (folder / "done").touch()
        return folder

    return make
