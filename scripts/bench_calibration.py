"""Calibration and quantization of one UNet by trtdiff and by its peers: seconds, memory, and what 8 bits cost.

    python scripts/bench_calibration.py [--only plain --only ort-minmax …] [--folder FOLDER] [--json]

The work is the same for all: a UNet as Stable Diffusion 1.5's with half its channels (219.8 M parameters, torch's own
initialisation from seed 0, float32), 16 samples of batch 2 to calibrate on and 4 fresh ones for the error, all random:
latents [4, 32, 32], timesteps 0 to 999, text [77, 768]. trtdiff takes its own export of the checkpoint; the peers take
the plain float32 ONNX model that torch.onnx.export writes of the same weights (opset 20, static shapes). Peers are
installed in environments of their own under FOLDER (modelopt: 6.5 GB). Everything is measured each time.

Every case is one process, from starting Python to the written model; `plain` is float32 inference of the 16 samples in
ONNX Runtime. The error is the relative L2 difference of the fresh predictions from the float32 model's, in ONNX Runtime
as a user opens a model (all graph optimizations, which make integer kernels of INT8), and `as written` without any.
Shares are of multiply-adds whose inputs are 8-bit: of convolutions and linear layers, and of attention's two products.

Measured on two cores of an AMD EPYC, one case after the other, with a few seconds of small work beside the first five.
The machine's own speed varies: `plain`, six times in between, took 11.3 to 15.8 s.

                             wall s  cpu s  peak GB   error  as written    share  attention
    plain                      15.8     26     1.35
    trtdiff-int8-max           27.6     39     1.33  0.0568      0.0564   99.9 %      0.0 %
    trtdiff-int8-mse           46.9     74     1.34  0.0444      0.0447   99.9 %      0.0 %
    trtdiff-fp8-max            29.6     43     1.33  0.1157      0.1159   99.9 %      2.8 %
    trtdiff-fp8-mse            62.3     89     1.43  0.1148      0.1148   99.9 %      2.8 %
    plain                      14.2     25     1.34
    ort-minmax                 62.9     80     5.88  0.0826      0.0818  100.0 %    100.0 %
    ort-percentile            197.4    209     4.73  0.0676      0.0679  100.0 %    100.0 %
    modelopt-int8-max         175.6    176     8.96  0.0808      0.0807  100.0 %     10.7 %
    modelopt-fp8-max          196.0    215     8.96  0.1522      0.1513   99.9 %    100.0 %
    modelopt-int8-entropy     166.0    171     8.96  0.0729      0.0725  100.0 %     10.7 %
    plain                      11.3     20     1.34
    modelopt-fp8-entropy      271.1    275     9.27  0.1527      0.1533   99.9 %    100.0 %   (plain then: 15.2, 17.6)

Again, with the calibration alone in brackets: plain 12.9, 11.7, 12.2; int8-max 30.8 (28.2), 25.9 (23.5); int8-mse 43.4
(41.3). That is 2.0 times plain for max and 3.4 for mse. Of the 12 s that max takes beyond plain, 5 are the export's
weights, read from the disk and written as they are multiplied, 3 are ONNX Runtime opening a graph in which 791
values are observed, and 2 are slower first executions; a sample itself takes 1.1 times as long. So the ratio falls with
the number of samples, and with weights that the page cache holds (read and written in 0.8 s then).

trtdiff quantizes attention's products where heads are multiples of 16: here they are 20, 40 and 80.
For INT8, modelopt leaves attention over more than 512 tokens in float32. onnxruntime would keep every value of every
sample for its percentiles; here it is told to take one sample at a time (CalibStridedMinMax).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

UNET = {
    "_class_name": "UNet2DConditionModel", "sample_size": 32, "in_channels": 4, "out_channels": 4,
    "center_input_sample": False, "flip_sin_to_cos": True, "freq_shift": 0, "layers_per_block": 2,
    "block_out_channels": [160, 320, 640, 640],
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
    "attention_head_dim": 8, "cross_attention_dim": 768, "norm_num_groups": 32, "norm_eps": 1e-05, "act_fn": "silu",
}  # fmt: skip
SEED = 0
BATCH, SAMPLES, FRESH = 2, 16, 4
FOLDER = Path("build/bench_calibration")
OWN = ""
SECONDS = "calibration.json"
"""File in which a case says how long its calibration alone took, where it can tell."""
ENVIRONMENTS = {
    "onnxruntime": ("onnxruntime==1.32.0", "onnx==1.23.2", "numpy==2.4.6"),
    "modelopt": (
        "nvidia-modelopt[onnx]==0.47.0", "onnx==1.21.0", "onnxruntime-gpu==1.24.4", "torch==2.14.1", "numpy==2.4.6",
    ),
}  # fmt: skip
"""Environment → what is installed in it. modelopt asks for CUDA's libraries, on a machine without a GPU too: 6.5 GB."""


@dataclass(frozen=True)
class Case:
    """One way to quantize: a function that runs in a process of its own, in the environment it needs."""

    environment: str
    """One of ENVIRONMENTS, or this one."""
    run: Callable[[Path, Path, Mapping[str, Any]], None]
    """Takes the folder of the work, the file to write and `settings`."""
    settings: Mapping[str, Any]


@dataclass
class Measured:
    """What one case took, and what it made."""

    case: str
    wall: float
    """Seconds of the whole process: starting Python, imports, reading and writing."""
    cpu: float
    """Seconds of processor time, of the process and its children."""
    peak: int
    """Bytes of resident memory, children included (together sampled every 0.1 s); mapped pages of files count."""
    calibration: float | None = None
    """Seconds of the calibration alone, with the opening of the model; of `plain`, those of the samples likewise."""
    error: float | None = None
    """Relative L2 difference of the predictions on fresh inputs from those of the float32 model."""
    error_as_written: float | None = None
    """The same with ONNX Runtime's graph optimizations off: no integer kernels, all sums in float32."""
    share: float | None = None
    """Of the multiply-adds of convolutions and linear layers (those of attention too), how many have 8-bit inputs."""
    attention: float | None = None
    """The same of attention's two products of activations."""
    failed: str = ""


# --- the work --------------------------------------------------------------------------------------------------------


def make_work(folder: Path) -> None:
    """Make what is not there yet; the file of references is written last."""
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    make_checkpoint(folder / "checkpoint")
    make_inputs(folder / "inputs.npz")
    export_by_reference(folder / "checkpoint", folder / "export")
    export_plain(folder / "checkpoint", folder / "inputs.npz", folder / "plain" / "model.onnx")
    predictions = predict(folder / "plain" / "model.onnx", list(samples(folder)))
    np.savez(folder / "reference.npz", prediction=predictions)


def make_checkpoint(folder: Path) -> None:
    import torch
    from bench_export import write_tokenizer
    from diffusers import UNet2DConditionModel
    from safetensors.torch import save_file

    (folder / "unet").mkdir(parents=True)
    (folder / "scheduler").mkdir()
    torch.manual_seed(SEED)
    module = UNet2DConditionModel.from_config(UNET)
    save_file(module.state_dict(), folder / "unet" / "diffusion_pytorch_model.safetensors")
    (folder / "unet" / "config.json").write_text(json.dumps(UNET, indent=2))
    (folder / "scheduler" / "scheduler_config.json").write_text(
        json.dumps({"_class_name": "DDIMScheduler", "clip_sample": False})
    )
    write_tokenizer(folder / "tokenizer")
    index = {"_class_name": "StableDiffusionPipeline", "scheduler": ["diffusers", "DDIMScheduler"],
             "tokenizer": ["transformers", "CLIPTokenizer"], "unet": ["diffusers", "UNet2DConditionModel"]}  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))


def make_inputs(path: Path) -> None:
    rng = np.random.default_rng(SEED)
    count = SAMPLES + FRESH
    np.savez(
        path,
        sample=rng.standard_normal((count, BATCH, 4, 32, 32), np.float32),
        timestep=rng.integers(0, 1000, (count, BATCH)).astype(np.float32),
        encoder_hidden_states=rng.standard_normal((count, BATCH, 77, 768), np.float32),
    )


def export_by_reference(checkpoint: Path, out: Path) -> None:
    from bench_export import TEXT, VAE

    from trtdiff.checkpoint import Checkpoint
    from trtdiff.export.export import export_components
    from trtdiff.families.stable_diffusion import StableDiffusion

    opened = Checkpoint.open(str(checkpoint))
    configs = {"unet": opened.configs["unet"], "vae": VAE, "text_encoder": TEXT}
    specs = [spec for spec in StableDiffusion().components(configs) if spec.name == "denoiser"]
    out.mkdir(parents=True, exist_ok=True)
    for _ in export_components(specs, configs["unet"], opened.tensors("unet"), out, check=False):
        pass


def export_plain(checkpoint: Path, inputs: Path, path: Path) -> None:
    import torch
    from diffusers import UNet2DConditionModel

    class Denoiser(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unet = UNet2DConditionModel.from_pretrained(checkpoint, subfolder="unet")

        def forward(self, sample: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
            return self.unet(sample, timestep, encoder_hidden_states, return_dict=False)[0]

    with np.load(inputs) as arrays:
        feeds = {name: torch.from_numpy(arrays[name][0]) for name in arrays.files}
    path.parent.mkdir(parents=True, exist_ok=True)
    program = torch.onnx.export(
        Denoiser().eval(), (), kwargs=feeds, dynamo=True, opset_version=20, output_names=["prediction"], verbose=False
    )
    program.save(path, external_data=True)


def samples(folder: Path) -> Iterator[dict[str, np.ndarray]]:
    """Give all inputs: those to calibrate on, then the fresh ones."""
    with np.load(folder / "inputs.npz") as file:
        arrays = {name: file[name] for name in file.files}
    for index in range(SAMPLES + FRESH):
        yield {name: array[index] for name, array in arrays.items()}


def calibration_samples(folder: Path) -> list[dict[str, np.ndarray]]:
    return list(samples(folder))[:SAMPLES]


def predict(model: Path, feeds: list[dict[str, np.ndarray]], *, as_written: bool = False) -> np.ndarray:
    """Run a model in ONNX Runtime: [samples, batch, 4, 32, 32]."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    if as_written:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return np.stack([session.run(None, feed)[0] for feed in feeds])


# --- the cases, each in a process of its own -------------------------------------------------------------------------


@contextmanager
def timed(out: Path) -> Iterator[None]:
    """Write down how long the calibration alone takes, for a case that can tell."""
    began = time.perf_counter()
    yield
    (out.parent / SECONDS).write_text(json.dumps(time.perf_counter() - began))


def run_plain(folder: Path, out: Path, settings: Mapping[str, Any]) -> None:  # noqa: ARG001
    """Make no model: float32 inference of the samples to calibrate on, the measure of the others."""
    with timed(out):
        predict(folder / "plain" / "model.onnx", calibration_samples(folder))


def run_onnxruntime(folder: Path, out: Path, settings: Mapping[str, Any]) -> None:
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.feeds = calibration_samples(folder)
            self.set_range(0, len(self.feeds))

        def __len__(self) -> int:
            return len(self.feeds)

        def set_range(self, start_index: int, end_index: int) -> None:
            self.left = iter(self.feeds[start_index:end_index])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.left, None)

    quantize_static(
        folder / "plain" / "model.onnx",
        out,
        Reader(),
        op_types_to_quantize=["Conv", "Gemm", "MatMul"],  # of all that it knows, it fails on this model
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod[settings["method"]],
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True, **settings["options"]},
    )


def run_modelopt(folder: Path, out: Path, settings: Mapping[str, Any]) -> None:
    from modelopt.onnx.quantization import quantize

    feeds = calibration_samples(folder)
    data = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
    quantize(
        str(folder / "plain" / "model.onnx"),
        calibration_data=data,
        calibration_eps=["cpu"],
        high_precision_dtype="fp32",
        output_path=str(out),
        **settings,
    )


def run_trtdiff(folder: Path, out: Path, settings: Mapping[str, Any]) -> None:
    """Calibrate the export on the same samples, and write the lowered float32 graph with its Q/DQ to `out`."""
    from dataclasses import replace

    from trtdiff.calibrate.feeds import calibrate_feeds
    from trtdiff.lowered import read_graph, write_graph
    from trtdiff.passes.quantize import quantize
    from trtdiff.passes.widen_weights import widen_weights
    from trtdiff.recipes import recipe

    how = recipe(settings["recipe"]).quantization
    assert how is not None
    how = replace(how, method=settings["method"])
    graph = folder / "export" / "denoiser.onnx"
    feeds = [(0, sample) for sample in list(samples(folder))[:SAMPLES]]
    formats = [how.activations] if how.activations else []
    with timed(out):
        seen = calibrate_feeds(graph, feeds, out.parent / "calibrating", method=how.method, formats=formats)
    model = read_graph(graph)
    quantize(model, how=how, base="float32", statistics=seen.values)
    widen_weights(model)
    made = write_graph(model, out.parent)
    made.rename(out)


CASES = {
    "plain": Case(OWN, run_plain, {}),
    "trtdiff-int8-max": Case(OWN, run_trtdiff, {"recipe": "int8", "method": "max"}),
    "trtdiff-int8-mse": Case(OWN, run_trtdiff, {"recipe": "int8", "method": "mse"}),
    "trtdiff-fp8-max": Case(OWN, run_trtdiff, {"recipe": "fp8", "method": "max"}),
    "trtdiff-fp8-mse": Case(OWN, run_trtdiff, {"recipe": "fp8", "method": "mse"}),
    "ort-minmax": Case("onnxruntime", run_onnxruntime, {"method": "MinMax", "options": {}}),
    "ort-percentile": Case(
        "onnxruntime", run_onnxruntime, {"method": "Percentile", "options": {"CalibStridedMinMax": 1}}
    ),
    "modelopt-int8-max": Case("modelopt", run_modelopt, {"quantize_mode": "int8", "calibration_method": "max"}),
    "modelopt-int8-entropy": Case("modelopt", run_modelopt, {"quantize_mode": "int8", "calibration_method": "entropy"}),
    "modelopt-fp8-max": Case("modelopt", run_modelopt, {"quantize_mode": "fp8", "calibration_method": "max"}),
    "modelopt-fp8-entropy": Case("modelopt", run_modelopt, {"quantize_mode": "fp8", "calibration_method": "entropy"}),
}  # fmt: skip


# --- what was made ---------------------------------------------------------------------------------------------------


def score(folder: Path, model: Path) -> dict[str, float]:
    """Give the errors and shares of a quantized model."""
    fresh = list(samples(folder))[SAMPLES:]
    with np.load(folder / "reference.npz") as file:
        expected = file["prediction"][SAMPLES:]

    def error(*, as_written: bool) -> float:
        return float(np.linalg.norm(predict(model, fresh, as_written=as_written) - expected) / np.linalg.norm(expected))

    layers, products = quantized_shares(model, fresh[0])
    return {
        "error": error(as_written=False),
        "error_as_written": error(as_written=True),
        "share": layers,
        "attention": products,
    }


def quantized_shares(model: Path, feeds: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """Count multiply-adds with 8-bit inputs: their share in layers with weights, and in products of activations."""
    import onnx

    graph = onnx.load(model, load_external_data=False).graph
    producers = {name: node for node in graph.node for name in node.output}
    weights = {weight.name for weight in graph.initializer}

    def origin(name: str, through: set[str]) -> str:
        """Follow a value back through some operators: the one that made it, or `weight`."""
        while name in producers and producers[name].op_type in through:
            name = producers[name].input[0]
        return producers[name].op_type if name in producers else "weight" if name in weights else "input"

    found = {node.output[0]: operands(node) for node in graph.node if node.op_type in MULTIPLY_ADDS}
    sizes = sizes_of(model, {name for output, inputs in found.items() for name in (output, *inputs)}, feeds)
    whole, quantized = {"layer": 0, "product": 0}, {"layer": 0, "product": 0}
    for output, inputs in found.items():
        work = MULTIPLY_ADDS[producers[output].op_type](*(sizes[name] for name in (*inputs, output)))
        kind = "layer" if "weight" in {origin(name, MOVES | QDQ) for name in inputs} else "product"
        whole[kind] += work
        quantized[kind] += work * all(origin(name, MOVES) in QDQ for name in inputs)
    return quantized["layer"] / whole["layer"], quantized["product"] / whole["product"]


MULTIPLY_ADDS: dict[str, Callable[..., int]] = {
    "Conv": lambda _x, w, y: prod(y) * prod(w[1:]),
    "Gemm": lambda a, _b, y: prod(y) * (prod(a) // y[0]),
    "MatMul": lambda a, _b, y: prod(y) * a[-1],
    "Attention": lambda q, k, _v, y: (prod(q) + prod(y)) * k[-2],
    "MultiHeadAttention": lambda q, k, _v, y: (prod(q) + prod(y)) * k[-2],
}
"""Operator → its multiply-adds, from the shapes of its operands and of its output."""
MOVES = {"Transpose", "Reshape", "Cast", "Identity", "Squeeze", "Unsqueeze"}
QDQ = {"QuantizeLinear", "DequantizeLinear"}


def operands(node: Any) -> list[str]:
    """Name the inputs that are multiplied."""
    return list(node.input[: 3 if "Attention" in node.op_type else 2])


def sizes_of(model: Path, names: set[str], feeds: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    """Run a copy of the model whose outputs are the shapes of these values."""
    import onnx
    import onnxruntime as ort

    proto = onnx.load(model, load_external_data=False)
    sizes = {weight.name: tuple(weight.dims) for weight in proto.graph.initializer}
    wanted = sorted(names - set(sizes))
    del proto.graph.output[:]
    for name in wanted:
        proto.graph.node.append(onnx.helper.make_node("Shape", [name], [f"{name}/size"]))
        proto.graph.output.append(onnx.helper.make_tensor_value_info(f"{name}/size", onnx.TensorProto.INT64, None))
    copy = model.with_name("sizes.onnx")  # beside the model's external data
    onnx.save(proto, copy)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(copy, options, providers=["CPUExecutionProvider"])
    found = session.run(None, dict(feeds))
    copy.unlink()
    return sizes | {name: tuple(size.tolist()) for name, size in zip(wanted, found, strict=True)}


# --- measuring -------------------------------------------------------------------------------------------------------


def interpreter(environment: str, folder: Path) -> Path:
    """Give the Python of an environment, which is made where it is not there or holds something else."""
    if environment == OWN:
        return Path(sys.executable)
    place = folder / "environments" / environment
    python, ready = place / "bin" / "python", place / "ready.txt"
    pins = ENVIRONMENTS[environment]
    if not ready.exists() or ready.read_text().split() != [*pins]:
        print(f"installing {environment} …", file=sys.stderr)
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *pins], check=True, stdout=2)
        ready.write_text("\n".join(pins))
    return python.absolute()


def measure(name: str, folder: Path) -> Measured:
    """Run a case, and score what it made; both in processes of their own."""
    out = folder / "quantized" / name / "model.onnx"
    shutil.rmtree(out.parent, ignore_errors=True)
    out.parent.mkdir(parents=True)
    python = interpreter(CASES[name].environment, folder)
    began = time.monotonic()
    with (out.parent / "log.txt").open("w+") as log:
        child = subprocess.Popen([python, __file__, "--folder", folder, "--child", name], stdout=log, stderr=log)
        child.returncode, cpu, peak = watch(child.pid)
        wall = time.monotonic() - began
        log.seek(0)
        words = log.read().strip()
    measured = Measured(name, wall, cpu, peak)
    if child.returncode:
        measured.failed = words.rpartition("\n")[2] or f"exit status {child.returncode}"
        return measured  # its log stays
    if (out.parent / SECONDS).exists():
        measured.calibration = json.loads((out.parent / SECONDS).read_text())
    if out.exists():
        command = [sys.executable, __file__, "--folder", folder, "--child", f"score:{name}"]
        scored = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        for field, value in json.loads(scored.stdout).items():
            setattr(measured, field, value)
    shutil.rmtree(out.parent)
    return measured


def watch(pid: int) -> tuple[int, float, int]:
    """Wait for a process: its exit status, seconds of processor time, and peak of resident memory with its children."""
    import psutil

    root, peak = psutil.Process(pid), 0
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            largest = 1024 * usage.ru_maxrss  # of one process, exact
            return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, max(peak, largest)
        with suppress(psutil.Error):  # a process that has just ended has no memory
            peak = max(peak, sum(each.memory_info().rss for each in (root, *root.children(recursive=True))))
        time.sleep(0.1)


def show(measured: list[Measured]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="calibration and quantization of a UNet of 219.8 M parameters, 16 samples of batch 2")
    for heading in ("", "wall s", "calibration s", "cpu s", "peak GB", "error", "as written", "share", "attention"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in measured:
        alone = "" if row.calibration is None else f"{row.calibration:.1f}"
        cells = [f"{row.wall:.1f}", alone, f"{row.cpu:.1f}", f"{row.peak / 1e9:.2f}"]
        if row.failed:
            cells += [row.failed]
        elif row.error is not None:
            cells += [f"{row.error:.4f}", f"{row.error_as_written:.4f}", f"{row.share:.1%}", f"{row.attention:.1%}"]
        table.add_row(row.case, *cells)
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="keeps the work and the peers' environments")
    parser.add_argument("--json", action="store_true", help="print one object a line")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    what, _, name = (arguments.child or "").rpartition(":")
    if name == "work":
        make_work(folder)
    elif what == "score":
        print(json.dumps(score(folder, folder / "quantized" / name / "model.onnx")))
    elif name:
        CASES[name].run(folder, folder / "quantized" / name / "model.onnx", CASES[name].settings)
    if arguments.child:
        return 0

    if not (folder / "reference.npz").exists():
        print("making the work …", file=sys.stderr)
        subprocess.run([sys.executable, __file__, "--folder", folder, "--child", "work"], check=True, stdout=2)
    measured = []
    for case in arguments.only or CASES:
        measured.append(measure(case, folder))
        if arguments.json:
            print(json.dumps(asdict(measured[-1])), flush=True)
    if not arguments.json:
        show(measured)
    return int(any(row.failed for row in measured))


if __name__ == "__main__":
    sys.exit(main())
