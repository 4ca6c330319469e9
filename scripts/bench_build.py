"""Time builds at SDXL's size for a CPU, on random weights, and the same build again when nothing has changed.

    python scripts/bench_build.py [--folder FOLDER] [--again 5]

The checkpoint is Stable Diffusion 1's networks with a denoiser so wide that it has about as many parameters as SDXL's
(2.6 billion, 5.2 GB in fp16). FOLDER takes some 35 GB: checkpoint, export, and twice the engines, whose weights are
float32. Wall and processor time are of whole processes, the peak is of resident memory. The digest of every file is
paid when it is written, so building again should take no longer than with a small model.
"""

import argparse
import sys
from pathlib import Path

from bench_export import SD15, TEXT, VAE, make_checkpoint, measure

WIDE = SD15 | {"block_out_channels": [576, 1088, 2240, 2240]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/bench_build"))
    parser.add_argument("--again", type=int, default=5, help="how often the unchanged build is timed  [default: 5]")
    arguments = parser.parse_args()
    checkpoint, exported, out = (arguments.folder / name for name in ("wide", "exports/wide", "engines/wide"))
    make_checkpoint(checkpoint, {"unet": WIDE, "vae": VAE, "text_encoder": TEXT})
    trtdiff = [sys.executable, "-c", "from trtdiff.cli import main; main()"]
    build = [*trtdiff, "build", str(exported), "-o", str(out), "--schedulers", "ddim"]
    print(f"{'':20} {'wall s':>8} {'cpu s':>8} {'peak GB':>8}")
    measure("export", [*trtdiff, "export", str(checkpoint), "-o", str(exported), "--no-check", "--force"])
    measure("build", [*build, "--force"])
    for _ in range(arguments.again):
        measure("build, unchanged", build)


if __name__ == "__main__":
    main()
