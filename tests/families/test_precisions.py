"""Half precision of the families: what each keeps in float32, and that TensorRT for RTX takes every graph."""

import shutil

import numpy as np
import pytest

KINDS_COMPILED = ("sdxl", "sd3", "flux-dev", "pixart")


@pytest.mark.parametrize("kind", KINDS_COMPILED)
def test_tensorrt_compiles_every_graph_in_half_precision(kind, made, tmp_path):
    """All but the VAE's, which are those of Stable Diffusion."""
    pytest.importorskip("tensorrt_rtx")
    from trtdiff.backends import target_backend
    from trtdiff.export.manifest import EXPORT_FILE, EXPORT_SCHEMA, ExportManifest
    from trtdiff.families import family
    from trtdiff.lowering import PROLOGUES, build_engine
    from trtdiff.recipes import recipe
    from trtdiff.records import read_record

    export, target = made(kind) / "export", target_backend("rtx:sm89")
    manifest = read_record(export / EXPORT_FILE, ExportManifest, schema=EXPORT_SCHEMA)
    facts, few = manifest.facts, {"batch": "1:1:2", "window": "1:3:9", "branches": "1:1:2"}
    sides = f"{2 * facts.sizes_multiple_of}:{4 * facts.sizes_multiple_of}:{4 * facts.sizes_multiple_of}"
    sizes = {**few, "height": sides, "width": sides, **{name: str(length) for name, length in facts.lengths.items()}}
    specs = [spec for spec in family(manifest.family).components(manifest.configs) if spec.folder != "vae"]
    for spec in specs:
        prologue = PROLOGUES.get(spec.name)
        passes = [*recipe("fp16").passes, *target.passes]
        (tmp_path / spec.name).mkdir()
        built = build_engine(
            graph=str(export / f"{spec.name}.onnx"), backend=target.name, device=target.device, options={},
            passes=[*passes, *([f"{prologue} form={target.sums} mask=yes"] if prologue else [])],
            computes_in="float16", profile=sizes, out=str(tmp_path / spec.name), islands=spec.keep_high,
            progress=lambda done, total: None,
        )  # fmt: skip
        assert built["realised"]["plan_bytes"] > 0
        assert not built["realised"].get("widened")


@pytest.mark.parametrize("kind", [*KINDS_COMPILED, "sd2", "sd-inpaint", "lcm"])
def test_no_graph_has_float64_or_sequences(kind, made):
    import onnx

    for path in sorted((made(kind) / "export").glob("*.onnx")):
        graph = onnx.load(path, load_external_data=False).graph
        typed = [(value.name, value.type.tensor_type.elem_type) for value in graph.value_info]
        typed += [(tensor.name, tensor.data_type) for tensor in graph.initializer]
        assert [name for name, dtype in typed if dtype == onnx.TensorProto.DOUBLE] == []
        assert not {node.op_type for node in graph.node} & {"SplitToSequence", "SequenceAt", "SequenceConstruct"}


@pytest.fixture(scope="module")
def loud_t5(made, tmp_path_factory):
    """SD3's T5 with a residual stream beyond the end of float16, exported alone: checkpoint and export."""
    from safetensors.numpy import load_file, save_file

    from trtdiff.checkpoint import Checkpoint
    from trtdiff.export.export import export_checkpoint

    folder = shutil.copytree(made("sd3") / "checkpoint", tmp_path_factory.mktemp("loud") / "checkpoint")
    file = folder / "text_encoder_3/model.safetensors"
    weights = load_file(file)
    weights["encoder.block.0.layer.1.DenseReluDense.wo.weight"] *= 1e5
    save_file(weights, file, metadata={"format": "pt"})
    opened = Checkpoint.open(str(folder))
    return folder, export_checkpoint(
        opened, folder.parent / "export", components=["text_encoder_3"], check=False
    ).folder


@pytest.mark.parametrize("islands", [True, False])
def test_t5_keeps_its_residual_stream_in_float32(islands, loud_t5, tmp_path):
    import torch
    from transformers import T5EncoderModel

    from trtdiff.backends import backend
    from trtdiff.families import t5
    from trtdiff.lowering import build_engine
    from trtdiff.recipes import recipe

    checkpoint, export = loud_t5
    target = backend("rounded")
    built = build_engine(
        graph=str(export / "text_encoder_3.onnx"), passes=[*recipe("fp16").passes, *target.passes], backend="rounded",
        device="cpu", computes_in="float16", profile={"batch": "1:1:2", t5.TOKENS: "16"}, options={}, out=str(tmp_path),
        progress=lambda done, total: None, islands=t5.KEEP_HIGH if islands else {},
    )  # fmt: skip
    ids = np.random.default_rng(0).integers(3, 90, (1, 16))
    with target.load(tmp_path / "engine", threads=1) as session:
        got = session.run({"input_ids": ids})["encoder_hidden_states"]
    model = T5EncoderModel.from_pretrained(checkpoint / "text_encoder_3").eval()
    with torch.inference_mode():
        made = model(torch.from_numpy(ids), output_hidden_states=True)
    assert made.hidden_states[1].abs().max() > 65504
    expected = made.last_hidden_state.numpy()
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    if islands:
        assert error < 5e-3  # measured 7e-4
        assert "encoder.block.*.layer.?" in built["realised"]["islands"]
    else:
        assert not error < 0.1  # NaN, or nonsense
