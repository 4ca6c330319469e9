"""Half precision of the families: what each keeps in float32, and that TensorRT for RTX takes every graph."""

import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest

COMPILED = {"sdxl": "fp16", "sd3": "fp16", "flux-dev": "bf16", "pixart": "bf16"}


@pytest.mark.parametrize(("kind", "precision"), COMPILED.items())
def test_tensorrt_compiles_every_graph_in_half_precision(kind, precision, made, tmp_path):
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
        passes = [*recipe(precision).passes, *target.passes]
        (tmp_path / spec.name).mkdir()
        built = build_engine(
            graph=str(export / f"{spec.name}.onnx"), backend=target.name, device=target.device, options={},
            passes=[*passes, *([f"{prologue} form={target.sums} mask=yes"] if prologue else [])],
            computes_in=recipe(precision).computes_in, profile=sizes, out=str(tmp_path / spec.name),
            islands=spec.keep_high, progress=lambda done, total: None,
        )  # fmt: skip
        assert built["realised"]["plan_bytes"] > 0
        assert not built["realised"].get("widened")


@pytest.mark.parametrize("kind", ["sd1", "sd2", "lcm", "sdxl", "sdxl-refiner", "sd3", "flux-dev", "pixart"])
def test_what_a_family_keeps_in_float32_is_there(kind, made):
    from trtdiff.checkpoint import Checkpoint
    from trtdiff.families import family_of_pipeline
    from trtdiff.lowered import read_graph
    from trtdiff.passes.mark_islands import matching

    checkpoint = Checkpoint.open(str(made(kind) / "checkpoint"))
    for spec in family_of_pipeline(checkpoint.pipeline, where=kind).components(checkpoint.configs):
        graph = read_graph(made(kind) / f"export/{spec.name}.onnx").graph
        for pattern in (*spec.keep_high, *spec.keep_unmeasured):
            assert matching(graph, pattern)


ENDS = {
    "sdxl": ["conv_in", "conv_out", "time_embedding.linear_1", "add_embedding.linear_1"],
    "sd3": ["pos_embed.proj", "proj_out", "norm_out.linear", "context_embedder"],
    "flux-dev": ["x_embedder", "proj_out", "time_text_embed.guidance_embedder.linear_1", "context_embedder"],
    "pixart": ["pos_embed.proj", "proj_out", "adaln_single.linear", "caption_projection.linear_1"],
}


@pytest.mark.parametrize("kind", ENDS)
def test_8_bits_leave_out_where_latent_time_and_text_come_in(kind, made):
    from trtdiff.export.graph import MODULE
    from trtdiff.lowered import read_graph
    from trtdiff.recipes import recipe

    graph = read_graph(made(kind) / "export/denoiser.onnx").graph
    modules = {node.metadata_props.get(MODULE, "") for node in graph if node.op_type in {"Conv", "MatMul", "Gemm"}}
    for name in ("int8", "fp8", "fp8-mixed", "int8-weights"):
        keep = recipe(name).quantization.keep
        kept = {module for module in modules if any(fnmatchcase(module, pattern) for pattern in keep)}
        assert kept >= set(ENDS[kind])
        assert len(kept) < len(modules) / 2


@pytest.mark.parametrize("kind", [*COMPILED, "sd2", "sd-inpaint", "lcm"])
def test_no_graph_has_float64_or_sequences(kind, made):
    import onnx

    for path in sorted((made(kind) / "export").glob("*.onnx")):
        graph = onnx.load(path, load_external_data=False).graph
        typed = [(value.name, value.type.tensor_type.elem_type) for value in graph.value_info]
        typed += [(tensor.name, tensor.data_type) for tensor in graph.initializer]
        assert [name for name, dtype in typed if dtype == onnx.TensorProto.DOUBLE] == []
        assert not {node.op_type for node in graph.node} & {"SplitToSequence", "SequenceAt", "SequenceConstruct"}


def _louder(checkpoint: Path, to: Path, folder: str, factors: dict[str, float]) -> Path:
    """Copy a checkpoint, with some weights of a component multiplied."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(checkpoint, to)
    file = next((to / folder).glob("*.safetensors"))
    weights = load_file(file)
    for part, factor in factors.items():
        names = [name for name in weights if name.endswith(part)]
        assert names
        weights.update({name: weights[name] * np.float32(factor) for name in names})
    save_file(weights, file, metadata={"format": "pt"})
    return to


def _rounded_build(graph: Path, profile: dict[str, str], out: Path, islands: dict[str, str]) -> dict:
    """Build a graph for float16 as the processor emulates it; give what was realised."""
    from trtdiff.backends import backend
    from trtdiff.lowering import build_engine
    from trtdiff.recipes import recipe

    return build_engine(
        graph=str(graph), passes=[*recipe("fp16").passes, *backend("rounded").passes], backend="rounded", device="cpu",
        computes_in="float16", profile=profile, options={}, out=str(out), progress=lambda done, total: None,
        islands=islands,
    )["realised"]  # fmt: skip


@pytest.fixture(scope="module")
def loud_queries(made, tmp_path_factory):
    """A UNet of 2.x whose queries leave float16, and whose keys make up for it."""
    from trtdiff.checkpoint import Checkpoint
    from trtdiff.export.export import export_checkpoint

    folder = tmp_path_factory.mktemp("loud")
    checkpoint = _louder(made("sd2") / "checkpoint", folder / "checkpoint", "unet", {
        ".to_q.weight": 2.0**18, ".to_k.weight": 2.0**-18,
    })  # fmt: skip
    opened = Checkpoint.open(str(checkpoint))
    return checkpoint, export_checkpoint(opened, folder / "export", components=["denoiser"], check=False).folder


@pytest.mark.parametrize("islands", [True, False])
def test_upcast_attention_is_in_float32(islands, loud_queries, tmp_path):
    import torch
    from diffusers import UNet2DConditionModel

    from trtdiff.backends import backend
    from trtdiff.checkpoint import Checkpoint
    from trtdiff.families import family_of_pipeline

    checkpoint, export = loud_queries
    opened = Checkpoint.open(str(checkpoint))
    parts = family_of_pipeline(opened.pipeline, where="").components(opened.configs)
    keep = next(spec.keep_high for spec in parts if spec.name == "denoiser")
    profile = {"batch": "1:1:2", "context": "16", "height": "64", "width": "64"}
    realised = _rounded_build(export / "denoiser.onnx", profile, tmp_path, keep if islands else {})
    rng = np.random.default_rng(0)
    sample, text = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 4, 8, 8), (1, 16, 32)))
    feeds = {"sample": sample, "timestep": np.full(1, 500, np.float32), "encoder_hidden_states": text}
    with backend("rounded").load(tmp_path / "engine", threads=1) as session:
        got = session.run(feeds)["prediction"]
    model = UNet2DConditionModel.from_pretrained(checkpoint / "unet").eval()
    with torch.inference_mode():
        expected = model(torch.from_numpy(sample), 500, torch.from_numpy(text)).sample.numpy()
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    if islands:
        assert error < 5e-3
        assert "*.attn?" in realised["islands"]
    else:
        assert not error < 0.1  # NaN, or nonsense


@pytest.fixture(scope="module")
def loud_t5(made, tmp_path_factory):
    """SD3's T5 with a residual stream beyond the end of float16, exported alone: checkpoint and export."""
    from trtdiff.checkpoint import Checkpoint
    from trtdiff.export.export import export_checkpoint

    folder = tmp_path_factory.mktemp("loud")
    checkpoint = _louder(made("sd3") / "checkpoint", folder / "checkpoint", "text_encoder_3", {
        "encoder.block.0.layer.1.DenseReluDense.wo.weight": 1e5
    })  # fmt: skip
    opened = Checkpoint.open(str(checkpoint))
    return checkpoint, export_checkpoint(opened, folder / "export", components=["text_encoder_3"], check=False).folder


@pytest.mark.parametrize("islands", [True, False])
def test_t5_keeps_its_residual_stream_in_float32(islands, loud_t5, tmp_path):
    import torch
    from transformers import T5EncoderModel

    from trtdiff.backends import backend
    from trtdiff.families import t5

    checkpoint, export = loud_t5
    profile = {"batch": "1:1:2", t5.TOKENS: "16"}
    realised = _rounded_build(export / "text_encoder_3.onnx", profile, tmp_path, t5.KEEP_HIGH if islands else {})
    ids = np.random.default_rng(0).integers(3, 90, (1, 16))
    with backend("rounded").load(tmp_path / "engine", threads=1) as session:
        got = session.run({"input_ids": ids})["encoder_hidden_states"]
    model = T5EncoderModel.from_pretrained(checkpoint / "text_encoder_3").eval()
    with torch.inference_mode():
        made = model(torch.from_numpy(ids), output_hidden_states=True)
    assert made.hidden_states[1].abs().max() > 65504
    expected = made.last_hidden_state.numpy()
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    if islands:
        assert error < 5e-3  # measured 7e-4
        assert "encoder.block.*.layer.?" in realised["islands"]
    else:
        assert not error < 0.1  # NaN, or nonsense


def test_three_text_encoders_in_8_bits_hold_their_tolerances(made, compiler, tmp_path, capsys):
    """SD3: every component has a tolerance, and weights in 8 bits are those of every text encoder too."""
    from trtdiff.bundle import Bundle
    from trtdiff.cli import exit_code as cli

    bundle = tmp_path / "bundle"
    compiler(
        made("sd3") / "export", bundle, schedulers=("flow_euler",), steps=(20,), target="rounded",
        precision="int8-weights", profile="batch=1:1:2,height=32:32:64,width=32:64:64",
    )  # fmt: skip
    opened = Bundle.open(bundle)
    for encoder in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        assert opened.engine_manifest("rounded", encoder).realised["quantization"]["layers"]["int8 weights"] > 0
    assert cli(["check", str(bundle), "--against", str(made("sd3") / "checkpoint"), "--shapes", "opt"]) == 0
    assert "text_encoder_3" in capsys.readouterr().out
