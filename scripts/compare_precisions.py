"""Two bundles of the demo, picture by picture from the same seeds: what a precision costs, in digits and in decibels.

    python scripts/compare_precisions.py engines/digits engines/digits-fp16 --pictures 1000
    python scripts/compare_precisions.py engines/digits engines/digits-bf16 --pictures 1000 --json

The first bundle is the reference. Both are judged by the reader of `judge_demo.py`: "right" is a picture whose digit
and colours are those that were asked for. PSNR is 10 log10(255² / mean squared difference), of each picture against the
reference's, and pooled: of the mean over all pictures. The exit code is 3 where the other bundle has more than one
right picture in 100 fewer, or where the pooled PSNR is below 35 dB.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import judge_demo
import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table

POINTS = 1.0  # of 100
DECIBELS = 35.0
BELOW = 3
AT_ONCE = 50  # pictures between two signs of life


def draw(bundle: Path, prompts: list[str], steps: int, guidance: float, seed: int) -> list[Image.Image]:
    import trtdiff

    images: list[Image.Image] = []
    with trtdiff.load(bundle) as pipe:
        starts = range(0, len(prompts), AT_ONCE)
        for start in track(starts, f"{bundle.name} ({pipe.precision}, {pipe.backend})", console=Console(stderr=True)):
            some = prompts[start : start + AT_ONCE]
            images += pipe(some, steps=steps, guidance=guidance, seed=seed + start).images
    return images


def decibels(mean_square: float) -> float:
    return float("inf") if mean_square == 0 else 10 * float(np.log10(255**2 / mean_square))


def compare(pictures: list[list[Image.Image]], asked: list[judge_demo.Asked], taught: dict[str, Any]) -> dict[str, Any]:
    reader = judge_demo.train_reader()
    right = []
    for images in pictures:
        readings = judge_demo.judge(images, asked, taught, reader)
        right.append(
            [(q.digit, q.ink, q.page) == (r.digit, r.ink, r.page) for q, r in zip(asked, readings, strict=True)]
        )
    reference, other = (np.array(answers) for answers in right)
    squares = [
        float(np.mean((np.asarray(b, np.float64) - np.asarray(a, np.float64)) ** 2))
        for a, b in zip(*pictures, strict=True)
    ]
    each = np.array([decibels(square) for square in squares])
    lost = 100 * float(reference.mean() - other.mean())
    pooled = decibels(float(np.mean(squares)))
    return {
        "pictures": len(asked),
        "right": {"reference": int(reference.sum()), "other": int(other.sum())},
        "right_only_in": {"reference": int((reference & ~other).sum()), "other": int((other & ~reference).sum())},
        "points_lost": lost,
        "psnr": {
            "pooled": pooled, "median": float(np.median(each)), "lowest": float(each.min()),
            "below": int((each < DECIBELS).sum()),
        },
        "pass": lost <= POINTS and pooled >= DECIBELS,
    }  # fmt: skip


def show(found: dict[str, Any], console: Console) -> None:
    table = Table("", "", title=f"{found['pictures']} pictures, paired by seed")
    right, only, psnr = found["right"], found["right_only_in"], found["psnr"]
    table.add_row("right in the reference", str(right["reference"]))
    table.add_row("right in the other", str(right["other"]))
    table.add_row("right in one alone", f"{only['reference']} in the reference, {only['other']} in the other")
    table.add_row("points of 100 lost", f"{found['points_lost']:.1f}")
    table.add_row("PSNR, pooled", f"{psnr['pooled']:.1f} dB")
    table.add_row("PSNR, median picture", f"{psnr['median']:.1f} dB")
    table.add_row("PSNR, lowest", f"{psnr['lowest']:.1f} dB; {psnr['below']} pictures below {DECIBELS:g}")
    console.print(table)
    console.print("pass" if found["pass"] else "FAILED")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/digits"), help="says what was taught")
    parser.add_argument("--pictures", type=int, default=1000, metavar="N")
    parser.add_argument("--steps", type=int, default=20, metavar="N")
    parser.add_argument("--guidance", type=float, default=3.0, metavar="SCALE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    taught = json.loads((arguments.checkpoint / "prompts.json").read_text())
    asked = judge_demo.ask(taught, arguments.pictures, arguments.seed)
    prompts = [question.prompt for question in asked]
    bundles = (arguments.reference, arguments.other)
    pictures = [draw(path, prompts, arguments.steps, arguments.guidance, arguments.seed) for path in bundles]
    found = compare(pictures, asked, taught)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        show(found, Console())
    return 0 if found["pass"] else BELOW


if __name__ == "__main__":
    sys.exit(main())
