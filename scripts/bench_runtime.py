"""Measure what the runtime itself costs: time a step outside the network, imports, help, and a cold start.

    python scripts/bench_runtime.py [BUNDLE] [--steps NUMBER] [--json FILE]

Outside the network a step costs the prologue (the sampler's weighted sum), the guidance tail, and the host's loop. They
are measured around a network that does next to nothing, at 64 by 64 latents, one image, two guidance branches, one
thread: the loop with prologue and tail, less the bare network on the same rows. Every figure is the best median of
several rounds, since other processes only ever make one slower. A stochastic sampler's noise is drawn on the host while
the network runs, so there the network is one that takes about a millisecond; what drawing adds is the median difference
between loops with and without noises that alternate, on the same buffers, and stands on top of the step without.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trtdiff.backends import backend
from trtdiff.latent_log import ENTRY
from trtdiff.loop import DenoisingLoop, Start
from trtdiff.machine import this_machine
from trtdiff.noise import TorchStream
from trtdiff.sampler import SamplerTable

LATENT = (1, 4, 64, 64)
TOKENS, WIDTH, CALLS, ROUNDS, DRAWN_ROUNDS = 77, 768, 50, 7, 21
LIMITS = {"step outside the network, µs": 100, "import trtdiff, s": 0.15, "trtdiff --help, s": 0.4}


def network(work: int) -> str:
    """Give a network with the denoiser's inputs, in ONNX text; `work` matrix products, each some 0.1 ms."""
    products = "\n".join(f"    x{i + 1} = MatMul (x{i}, shifted)" for i in range(work))
    return f"""<ir_version: 10, opset_import: ["" : 20]>
network (float[batch,4,rows,columns] sample, float[batch] timestep, float[batch,{TOKENS},{WIDTH}] states)
     => (float[batch,4,rows,columns] prediction)
<int64[2] tail = {{1, 2}}, int64[4] corner = {{-1, 1, 1, 1}},
 int64[1] first = {{0}}, int64[1] second = {{1}}, int64[1] axis = {{1}}>
{{
    row = Slice (states, first, second, axis)
    mean = ReduceMean <keepdims = 0> (row, tail)
    sum = Sub (mean, timestep)
    shift = Reshape (sum, corner)
    shifted = Mul (sample, shift)
    x0 = Identity (shifted)
{products}
    prediction = Identity (x{work})
}}"""


def build(folder: Path, work: int, *, prologue: bool) -> Any:
    import onnx.parser
    import onnx_ir as ir

    from trtdiff.passes.sampler_prologue import denoiser_prologue

    model = ir.serde.deserialize_model(onnx.parser.parse_model(network(work)))
    if prologue:
        denoiser_prologue(model, mask="yes")
    folder.mkdir()
    ir.save(model, folder / "model.onnx")
    return backend("onnxruntime").load(folder, threads=1)


def table(window: int, *, draws: bool) -> SamplerTable:
    """Any table of that window; the coefficients do not matter to the clock."""
    coefficients = np.zeros((CALLS + 1, ENTRY * window))
    coefficients[:, -1] = 0.1 if draws else 0
    coefficients[0, -1] = 1
    coefficients[1:, -ENTRY] = 0.9
    times = np.full(CALLS, 0.5, np.float32)
    return SamplerTable("bench", "", CALLS, None, coefficients, np.ones(CALLS), times, np.full(CALLS, draws), 0.0)


def best(measure: Callable[[], float]) -> float:
    return min(measure() for _ in range(ROUNDS))


def bare_network(session: Any) -> float:
    """Median seconds of the network alone, on bound buffers with both branches' rows."""
    rows = (2 * LATENT[0], *LATENT[1:])
    buffers = {
        "sample": session.allocate(rows, "float32"),
        "timestep": session.allocate(rows[:1], "float32"),
        "states": session.allocate((rows[0], TOKENS, WIDTH), "float32"),
        "prediction": session.allocate(rows, "float32"),
    }
    call = session.bind(buffers)

    def once() -> float:
        seconds = []
        for _ in range(CALLS):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    return best(once)


def steps_of(session: Any, window: int) -> Callable[[bool], float]:
    """Prepare a loop; the function it gives runs it once, with noises drawn or not, and tells the median step."""
    conditions = {"states": np.zeros((2, LATENT[0], TOKENS, WIDTH), np.float32)}
    loop = DenoisingLoop(session, LATENT, {name: values.shape for name, values in conditions.items()}, window)
    guidance = np.array([-3, 4], np.float32)
    tables = {draws: table(window, draws=draws) for draws in (False, True)}

    def once(draws: bool) -> float:  # noqa: FBT001 - the one thing that changes
        stream = TorchStream(0)
        start = Start(stream.randn(LATENT), None, [stream])
        return statistics.median(loop.run(tables[draws], start, conditions, guidance).seconds)

    return once


def added_by_drawing(once: Callable[[bool], float]) -> float:
    """Median difference of loops that alternate."""
    once(True)
    return statistics.median(once(True) - once(False) for _ in range(DRAWN_ROUNDS))


def fresh_process(code: list[str]) -> float:
    """Seconds of a new interpreter, less those of one that does nothing."""

    def seconds(arguments: list[str]) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began

    return best(lambda: seconds(code)) - best(lambda: seconds(["-c", "pass"]))


def cold_start(bundle: Path, steps: int) -> dict[str, float]:
    """Load and first picture in a new process."""
    code = """
import json, sys, time
began = time.perf_counter()
import trtdiff
with trtdiff.load(sys.argv[1]) as pipeline:
    loaded = time.perf_counter()
    pipeline("", steps=int(sys.argv[2]))
    first = time.perf_counter()
    pipeline("", steps=int(sys.argv[2]))
    second = time.perf_counter()
print(json.dumps({"load, s": loaded - began, "first picture, s": first - loaded, "second picture, s": second - first}))
"""
    command = [sys.executable, "-c", code, str(bundle), str(steps)]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(3)]
    return min(runs, key=lambda run: sum(run.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", help="measure a cold start of this bundle too")
    parser.add_argument("--steps", type=int, default=10, help="of the cold start's picture  [default: 10]")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"machine": this_machine().processor, "cores": this_machine().cores}
    with tempfile.TemporaryDirectory() as folder:
        bare = bare_network(build(Path(folder, "bare"), 0, prologue=False))
        figures["bare network, µs"] = round(1e6 * bare, 1)
        quick, slow = (build(Path(folder, f"prologue{work}"), work, prologue=True) for work in (0, 10))
        for window in (1, 2, 3, 4):
            steps = steps_of(quick, window)
            outside = 1e6 * (best(lambda steps=steps: steps(False)) - bare)
            drawing = 1e6 * added_by_drawing(steps_of(slow, window))
            name = f"step outside the network, µs, m = {window}"
            figures |= {name: round(outside, 1), f"{name}, noise drawn": round(outside + drawing, 1)}
    figures["import trtdiff, s"] = round(fresh_process(["-c", "import trtdiff"]), 3)
    figures["load and run imports, s"] = round(fresh_process(["-c", "import trtdiff.pipeline"]), 3)
    figures["trtdiff --help, s"] = round(fresh_process(["-c", "from trtdiff.cli import main; main(['--help'])"]), 3)
    if arguments.bundle:
        figures |= cold_start(arguments.bundle, arguments.steps)
    for name, value in figures.items():
        limit = next((bound for start, bound in LIMITS.items() if name.startswith(start)), None)
        print(f"{name:50} {value}" + (f"  (at most {limit})" if limit else ""))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
