"""An export that changes while its ranges are scanned: what was scanned is of neither, and nothing is kept."""

import json
from pathlib import Path

import pytest

from trtdiff import build, worker
from trtdiff.errors import ArtefactError
from trtdiff.export.manifest import EXPORT_FILE
from trtdiff.export.read import read_export
from trtdiff.plan import make_plan
from trtdiff.store import Store

pytest.importorskip("onnx_ir")


@pytest.mark.parametrize("replaced", [True, False])
def test_ranges_of_an_export_that_was_replaced_are_not_kept(export_maker, tmp_path, monkeypatch, replaced):
    export = export_maker(tmp_path / "toy")

    def work(task, arguments, **_):
        if task == "trtdiff.lowering:compile_samplers":
            Path(arguments["out"], "samplers.safetensors").write_bytes(b"tables")
            return worker.Outcome({"realised": {"samplers": arguments["names"], "refused": {}}}, 0.1, 1)
        if task != "trtdiff.calibrate.scan:scan_ranges":
            raise InterruptedError("the scan was kept, and engines are begun")
        about = json.loads((export / EXPORT_FILE).read_text())
        if replaced:
            about["checkpoint"]["digest"] = "0" * 64
        (export / EXPORT_FILE).write_text(json.dumps(about))
        return worker.Outcome({"realised": {}}, 0.1, 1)

    monkeypatch.setattr(worker, "run", work)
    plan = make_plan(read_export(export), name="toy", precision="fp16", targets=["rounded"], schedulers=("ddim",))
    store = Store(tmp_path / "store")
    expected = ArtefactError if replaced else InterruptedError
    with pytest.raises(expected) as caught:
        build.build(plan, export, tmp_path / "bundle", store)
    if replaced:
        assert caught.value.message == "the export was replaced while it was measured"
        assert caught.value.where == str(export)
        assert caught.value.hint == "build again"
    assert (store.get(plan.ranges.key) is None) == replaced
