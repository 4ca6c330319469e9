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
PROFILES = {"turbo": "branches=1", "sdxl": "context=16:16:48"}


def _tiny():
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TINY = _tiny()
KINDS = tuple(TINY.KINDS)


def build(kind: str, folder: Path) -> None:
    """Export and build in this process, for few steps and sizes."""
    from trtdiff import build as builder
    from trtdiff import worker
    from trtdiff.checkpoint import Checkpoint
    from trtdiff.export import schedulers
    from trtdiff.export.export import export_checkpoint
    from trtdiff.lowering import named
    from trtdiff.plan import make_plan
    from trtdiff.store import Store

    def in_this_process(task, arguments, **_):
        return worker.Outcome(named(task)(**arguments, progress=lambda done, total: None), 0.0, 0)

    opened = Checkpoint.open(str(folder / "checkpoint"))
    with pytest.MonkeyPatch.context() as patch:
        exported = export_checkpoint(opened, folder / "export")
        patch.setattr(worker, "run", in_this_process)
        patch.setattr(schedulers, "compile_samplers", partial(schedulers.compile_samplers, steps=STEPS))
        step = exported.manifest.facts.sizes_multiple_of
        sizes = f"{2 * step}:{4 * step}:{8 * step}"
        plan = make_plan(
            exported.manifest, name=kind, precision="fp32", targets=["cpu"],
            schedulers=("default", *SCHEDULERS.get(kind, ())),
            profile=f"batch=1:1:4,height={sizes},width={sizes}," + PROFILES.get(kind, ""),
        )  # fmt: skip
        builder.build(plan, exported.folder, folder / "bundle", Store(folder / "store"))


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
