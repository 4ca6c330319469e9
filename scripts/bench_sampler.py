"""Measure what samplers cost: compiling tables, the file they make, opening it, and the log's bookkeeping in the loop.

    python scripts/bench_sampler.py                      # the usual schedulers, every step count to 100
    python scripts/bench_sampler.py --steps 20 --schedulers ddim,unipc

Times are of this process's CPU, so that other work on the machine shows less. The config is Stable Diffusion 1.5's.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trtdiff.latent_log import LatentLog, slots_for
from trtdiff.noise import TorchStream
from trtdiff.sampler import stack_tables
from trtdiff.sampler_book import SamplerBook

SD15 = {
    "_class_name": "PNDMScheduler", "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1,
    "clip_sample": False, "trained_betas": None,
}  # fmt: skip


def each(action: Callable[[], object], times: int) -> float:
    """Seconds of CPU for one action, on average."""
    action()
    began = time.process_time()
    for _ in range(times):
        action()
    return (time.process_time() - began) / times


def main() -> None:
    from trtdiff.export.sampler_pages import write_book
    from trtdiff.export.schedule_call import StableDiffusionCall
    from trtdiff.export.schedulers import USUAL, compile_sampler, make_scheduler

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="largest step count")
    parser.add_argument("--schedulers", default=",".join(USUAL))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samplers.safetensors"
        pages, whole = [], 0.0
        print(f"{'sampler':22s} {'m':>2s} {'residual':>9s} {'affinity':>9s} {'rows':>7s} {'CPU s':>7s}")
        for name in options.schedulers.split(","):
            began = time.process_time()
            scheduler = make_scheduler(SD15, name)
            page, it = compile_sampler(scheduler, name, StableDiffusionCall(), steps=range(1, options.steps + 1))
            seconds = time.process_time() - began
            print(f"{name:22s} {it.window:2d} {it.residual:9.1e} {it.affinity:9.1e} {it.rows:7d} {seconds:7.1f}")
            pages.append(page)
            whole += seconds
        write_book(path, pages, {})
        print(f"all: {whole:.1f} s CPU, {path.stat().st_size / 1e6:.2f} MB")
        steps = min(20, options.steps)
        print(f"open: {each(lambda: SamplerBook.open(path), 20) * 1e3:.2f} ms")
        print(f"open and first table: {each(lambda: SamplerBook.open(path).table(name, steps), 20) * 1e3:.2f} ms")
        table = SamplerBook.open(path).table(name, steps)
    batch = stack_tables([table])
    log = LatentLog(np.empty((slots_for(batch.window), 1, 4, 64, 64), np.float32), batch.window)

    def bookkeeping() -> None:
        for call in range(batch.calls):
            _ = log.window, log.latent, log.prediction, batch.coefficients[call], batch.timesteps[call]
            log.advance()

    print(f"log bookkeeping: {each(bookkeeping, 200) / batch.calls * 1e6:.2f} µs a call (window {batch.window})")
    for size in (64, 128):
        shape = (1, 4, size, size)
        print(f"seed and draw {shape}: {each(lambda shape=shape: TorchStream(7).randn(shape), 50) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
