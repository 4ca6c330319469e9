"""Time and memory of compiling full-size components for RTX GPUs, on random weights; no GPU takes part.

    python scripts/bench_rtx.py [--only sd15-denoiser --only …] [--precision fp8] [--folder FOLDER] [--json]

Exports are made with `bench_export.py` and kept in FOLDER (14 GB) for the next time; engines are removed. Each build
is the task that `trtdiff build` runs, in a process of its own: passes, weights converted, TensorRT. Wall and processor
time include starting Python. The peak is of resident memory; `own` and `mapped` are its two parts when it was sampled,
every 50 ms: memory that the process wrote, and pages of files.

Measured on two cores of an AMD EPYC, for sm89 (seconds: SD1.5's UNet in fp16 24.8 to 25.3, SDXL's 105 to 110):

                              wall s  weights GB  peak GB  ratio
    sd15-denoiser       fp16    24.8        1.72     4.18   2.43
    sd15-denoiser       bf16    30.5        1.72     4.27   2.48
    sd15-text_encoder   fp16     3.7        0.25     0.99   4.01
    sd15-vae_decoder    fp16     2.6        0.10     0.69   7.02
    sd15-vae_encoder    fp16     2.3        0.07     0.63   9.17
    sdxl-denoiser       fp16   109.9        5.13    11.15   2.17
    sdxl-denoiser       bf16   116.0        5.13    11.90   2.32
    sdxl-text_encoder   fp16     4.9        0.25     0.99   4.02
    sdxl-text_encoder_2 fp16    14.7        1.39     2.99   2.16
    sdxl-vae_decoder    fp16     2.4        0.10     0.63   6.34
    sdxl-vae_encoder    fp16     2.3        0.07     0.63   9.17

8 bits, in an hour in which fp16 took 40.0 s; `8 bits` is the share of all multiply-adds that read them by the builder's
own list of layers (of `int8-weights` none: they are read in float16). The rest of fp8's is attention with heads of 40,
and the layers that stay in float16.

                              wall s   plan GB  peak GB  ratio  8 bits
    sd15-denoiser       fp16    40.0      1.74     4.16   2.42
    sd15-denoiser       int8    42.4      0.93     2.69   1.57  84.3 %
    sd15-denoiser        fp8    49.8      0.94     2.65   1.54  86.4 %
    sd15-denoiser  fp8-mixed    55.6      0.95     2.67   1.55  84.8 %
    sd15-denoiser int8-weights  40.1      0.91     2.64   1.54

TensorRT alone, from the lowered graph of SD1.5's UNet to a plan in memory, takes 20.4 to 26.1 s and 5.8 GB in the same
hour: the rest is Python, reading, the passes, and writing the plan. The export stores fp16, so that only bf16 converts
weights. Mapped pages of the weights are dropped as they are read (4.0 GB instead of 5.5, at 0.3 s) and the plan is
streamed to disk; what is left is the builder's own copy of the weights and a second one while it serializes. Small
components are held by the libraries: half a gigabyte.
"""

import argparse
import json
import math
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
from bench_export import CHECKPOINTS

TARGET = "rtx:sm89"
PRECISIONS = ("fp16", "bf16", "int8", "fp8", "fp8-mixed", "int8-weights")
SIZES = {"sd15": "256:512:768", "sdxl": "512:1024:1024", "sd3": "512:1024:1024", "flux": "512:1024:1024"}
"""Heights and widths."""
CASES = tuple(
    f"{name}-{component}"
    for name in CHECKPOINTS
    for component in (
        "denoiser", *(part for part in CHECKPOINTS[name][1] if part.startswith("text")), "vae_decoder", "vae_encoder"
    )
)  # fmt: skip
"""Checkpoint and component; which of them fit into this machine is for the memory preflight to say."""


@dataclass
class Measured:
    """Seconds and bytes of one build."""

    case: str
    precision: str
    wall: float
    cpu: float
    weights: int
    plan: int
    peak: int
    own: int
    mapped: int
    arithmetic: dict[str, int]
    quantized: float
    """Share of the multiply-adds that read 8 bits."""

    @property
    def ratio(self) -> float:
        """Peak memory for a byte of weights in half precision."""
        return self.peak / self.weights


class Watch(threading.Thread):
    """Samples the memory of this process's only child, until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.own = self.mapped = 0
        self.cpu = 0.0
        self.stopped = threading.Event()

    def run(self) -> None:
        """Look until told to stop."""
        while not self.stopped.wait(0.05):
            for child in psutil.Process().children():
                with suppress(OSError, KeyError, ValueError, psutil.Error):  # a child that has just ended has no memory
                    lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
                    facts = dict(line.split(":", 1) for line in lines)
                    own, mapped = (int(facts[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
                    if own + mapped > self.own + self.mapped:
                        self.own, self.mapped = own, mapped
                    times = child.cpu_times()
                    self.cpu = times.user + times.system


def measure(case: str, precision: str, folder: Path) -> Measured:
    from trtdiff import worker
    from trtdiff.backends import target_backend
    from trtdiff.export.manifest import EXPORT_FILE, EXPORT_SCHEMA, ExportManifest
    from trtdiff.families import family
    from trtdiff.lowering import HALVES, PROLOGUES
    from trtdiff.manifest import as_json
    from trtdiff.recipes import recipe
    from trtdiff.records import read_record
    from trtdiff.types import ShapeProfile

    name, _, component = case.partition("-")
    graph = folder / "exports" / case / f"{component}.onnx"
    manifest = read_record(graph.parent / EXPORT_FILE, ExportManifest, schema=EXPORT_SCHEMA)
    kind = family(manifest.family)
    sizes = kind.profile(manifest.facts).merged(ShapeProfile.parse(f"height={SIZES[name]},width={SIZES[name]}"))
    profile = {dim: str(span) for dim, span in sizes.dims.items()} | {"window": "1:3:48"}
    (spec,) = (spec for spec in kind.components(manifest.configs) if spec.name == component)
    chosen, compiler = recipe(precision), target_backend(TARGET)
    content = as_json(chosen.content(component))
    quantized = "quantization" in content and chosen.calibrated
    calibration = str(calibrated(graph, component, folder).absolute()) if quantized else ""
    prologue = PROLOGUES.get(component)
    passes = [*chosen.passes, *compiler.passes, *([f"{prologue} form={compiler.sums} mask=yes"] if prologue else [])]
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    watch = Watch()
    watch.start()
    try:
        made = worker.run(
            "trtdiff.lowering:build_engine",
            {
                "graph": str(graph.absolute()),
                "passes": passes,
                "backend": compiler.name,
                "device": compiler.device,
                "computes_in": chosen.computes_in,
                "quantization": content.get("quantization"),
                "calibration": calibration,
                "profile": profile,
                "islands": dict(spec.keep_high) if chosen.computes_in in HALVES else {},
                "options": {},
                "out": str(out.absolute()),
            },
            what=case,
        )
    finally:
        watch.stopped.set()
        watch.join()
        shutil.rmtree(out)
    realised = made.value["realised"]
    return Measured(
        case=case,
        precision=precision,
        wall=made.seconds,
        cpu=watch.cpu,
        weights=weight_bytes(graph),
        plan=realised["plan_bytes"],
        peak=made.peak_memory,
        own=watch.own,
        mapped=watch.mapped,
        arithmetic=realised["arithmetic"],
        quantized=realised.get("quantized", {}).get("share", 0.0),
    )


def calibrated(graph: Path, component: str, folder: Path) -> Path:
    """Calibrate a component on noise at a small size, once: builds do not depend on how good scales are."""
    from trtdiff.calibrate.cache import CACHE_SCHEMA, Cache, Data, Model, write_cache
    from trtdiff.calibrate.feeds import calibrate_feeds
    from trtdiff.lowered import read_graph

    path = folder / "calibrations" / f"{graph.parent.name}.json"
    if path.exists():
        return path
    print(f"calibrating {graph} on noise …", file=sys.stderr)
    random = np.random.default_rng(0)
    dims = {"batch": 1, "tokens": 77, "context": 77, "height": 128, "width": 128, "height/8": 16, "width/8": 16}
    feeds = {
        str(value.name): random.normal(size=[
            dim if isinstance(dim, int) else dims[str(dim.value)] for dim in value.shape
        ]).astype(np.float32)
        for value in read_graph(graph).graph.inputs
    }  # fmt: skip
    feeds["timestep"] = np.full(1, 500, np.float32)
    seen = calibrate_feeds(graph, [(0, feeds)], folder / "calibrating", component=component)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = Data("", 0, "", 1, 1.0, 128, 128, "", ((0, 1000),))
    write_cache(path, Cache(CACHE_SCHEMA, "", Model("", "", "", {}, {}), data, "mse", (), {component: seen}, {}))
    return path


def weight_bytes(graph: Path) -> int:
    """Bytes of a graph's weights in half precision."""
    import onnx

    weights = onnx.load(graph, load_external_data=False).graph.initializer
    return sum(2 * math.prod(weight.dims) for weight in weights)


# --- exports ---------------------------------------------------------------------------------------------------------


def make_export(case: str, folder: Path) -> None:
    """Make an export that is not there yet, in a process of its own."""
    if any((folder / "exports" / case).glob("*.onnx")):
        return
    print(f"exporting {case} …", file=sys.stderr)
    name, _, component = case.partition("-")
    script = str(Path(__file__).with_name("bench_export.py"))
    command = [sys.executable, script, "--only", name, "--components", component, "--folder", str(folder)]
    subprocess.run(command, check=True, stdout=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--precision", choices=PRECISIONS, action="append")
    parser.add_argument("--folder", type=Path, default=Path("build/bench_export"))
    parser.add_argument("--json", action="store_true", help="print one object a line")
    arguments = parser.parse_args()
    if not arguments.json:
        print(
            f"{'':33} {'wall s':>7} {'cpu s':>7} {'weights':>8} {'peak GB':>8} {'own':>6} {'mapped':>6} {'ratio':>6} "
            f"{'plan GB':>8} {'8 bits':>7}"
        )
    for case in arguments.only or CASES:
        make_export(case, arguments.folder)
        for precision in arguments.precision or ("fp16", "bf16"):
            found = measure(case, precision, arguments.folder)
            if arguments.json:
                print(json.dumps({**asdict(found), "ratio": round(found.ratio, 2)}), flush=True)
                continue
            sizes = (found.weights, found.peak, found.own, found.mapped)
            weights, peak, own, mapped = (count / 1e9 for count in sizes)
            print(
                f"{case:20} {precision:12} {found.wall:7.1f} {found.cpu:7.1f} {weights:8.2f} {peak:8.2f} {own:6.2f} "
                f"{mapped:6.2f} {found.ratio:6.2f} {found.plan / 1e9:8.2f} {found.quantized:7.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
