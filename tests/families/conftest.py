"""Every kind of tiny checkpoint, exported and built once for all test processes."""

import importlib.util
from functools import partial
from pathlib import Path

import pytest

STEPS = (1, 2, 4, 5)
SCHEDULERS = {
    "sd1": ("ddim", "euler_a", "dpmpp_2m", "unipc"),
    "sd2": ("dpmpp_2m",),
    "sdxl": ("euler", "dpmpp_2m"),
    "sdxl-refiner": ("euler", "dpmpp_2m"),
}
PROFILES = {"sdxl": "context=16:16:48"}


def _tiny():
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TINY = _tiny()
KINDS = tuple(TINY.KINDS)


def compile_export(export: Path, out: Path, *, schedulers: tuple[str, ...] = (), profile: str = "") -> None:
    """Build an export in this process, for few steps and sizes."""
    from trtdiff import build as builder
    from trtdiff import worker
    from trtdiff.export import schedulers as compiled
    from trtdiff.export.manifest import EXPORT_FILE, EXPORT_SCHEMA, ExportManifest
    from trtdiff.lowering import named
    from trtdiff.plan import make_plan
    from trtdiff.records import read_record
    from trtdiff.store import Store

    def in_this_process(task, arguments, **_):
        return worker.Outcome(named(task)(**arguments, progress=lambda done, total: None), 0.0, 0)

    manifest = read_record(export / EXPORT_FILE, ExportManifest, schema=EXPORT_SCHEMA)
    step = manifest.facts.sizes_multiple_of
    sizes = f"{2 * step}:{4 * step}:{8 * step}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "run", in_this_process)
        patch.setattr(compiled, "compile_samplers", partial(compiled.compile_samplers, steps=STEPS))
        plan = make_plan(
            manifest, name=out.parent.name, precision="fp32", targets=["cpu"], schedulers=("default", *schedulers),
            profile=f"batch=1:1:4,height={sizes},width={sizes},{profile}",
        )  # fmt: skip
        builder.build(plan, export, out, Store(out.parent / "store"))


def build(kind: str, folder: Path) -> None:
    """Export and build a kind of checkpoint."""
    from trtdiff.checkpoint import Checkpoint
    from trtdiff.export.export import export_checkpoint

    exported = export_checkpoint(Checkpoint.open(str(folder / "checkpoint")), folder / "export")
    compile_export(
        exported.folder, folder / "bundle", schedulers=SCHEDULERS.get(kind, ()), profile=PROFILES.get(kind, "")
    )


@pytest.fixture(scope="session")
def compiler():
    """`compiler(export, out, profile="branches=1")` builds an export."""
    return compile_export


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """`made(kind)` gives a folder with `checkpoint`, `export` and `bundle`."""
    from trtdiff.whole import locked

    root = tmp_path_factory.getbasetemp()
    shared = root.parent if root.name.startswith("popen") else root  # of all test processes

    def make(kind: str) -> Path:
        folder = shared / "families" / kind
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock", lambda _text: None):
            if not (folder / "done").exists():
                TINY.make(kind, folder / "checkpoint")
                build(kind, folder)
                (folder / "done").touch()
        return folder

    return make
