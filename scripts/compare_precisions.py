"""Bundles of the demo against the first of them, picture by picture from the same seeds: what a precision costs.

    python scripts/compare_precisions.py engines/digits engines/digits-fp16 engines/digits-int8 --pictures 1000
    python scripts/compare_precisions.py engines/digits engines/digits-bf16 --pictures 100 --plot drift.png --json

The first bundle is the reference; every other is compared with it:

right     pictures whose digit and colours are those that were asked for, by the reader of `judge_demo.py`; how many are
          right here alone or in the reference alone, and how many in 100 are lost.
PSNR      10 log10(255² / mean squared difference), of each picture, and pooled: of the mean over all pictures.
SSIM      structural similarity as Wang, Bovik, Sheikh and Simoncelli define it (2004: Gaussian window of 11 pixels,
          standard deviation 1.5, K1 = 0.01, K2 = 0.03), by scikit-image, mean of the three colours. 1 is equal.
FLIP      the mean of NVIDIA's perceptual difference (Andersson et al. 2020), seen at 67 pixels a degree. 0 is equal.
drift     after every step, the relative L2 difference of a picture's latent: mean and 95th percentile of the pictures.

The exit code is 3 where a bundle loses more than `--points` right pictures in 100, or where its pooled PSNR is below
`--least-psnr` (35 dB is a fair wish for fp16 and bf16). All pictures are kept until the end: 1,000 take 0.1 GB a
bundle.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import judge_demo
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table

from trtdiff.bundle import Bundle
from trtdiff.engines import Engines
from trtdiff.parity.pictures import compiled_pictures
from trtdiff.parity.reference import PictureRequest

Array: TypeAlias = NDArray[Any]

POINTS = 2.0  # of 100
BELOW = 3
AT_ONCE = 50  # pictures between two signs of life
SHOWN = 6  # pictures of a plot


@dataclass(frozen=True)
class Drawn:
    """What one bundle made of the questions."""

    name: str
    how: str
    """Precision and backend."""
    latents: Array  # [steps, N, C, h, w] float32
    pixels: Array  # [N, H, W, 3] uint8


@dataclass(frozen=True)
class Settings:
    """What all bundles are asked for, beside the prompts."""

    steps: int
    guidance: float
    seed: int
    scheduler: str


def draw(bundle: Path, prompts: list[str], settings: Settings) -> Drawn:
    """Make a picture of every prompt, picture i from the noise of seed + i."""
    engines = Engines.open(bundle, None, None)
    manifest, how = engines.manifest, f"{engines.precision}, {engines.backend}"
    parts = []
    for start in track(range(0, len(prompts), AT_ONCE), f"{bundle} ({how})", console=Console(stderr=True)):
        request = PictureRequest(
            prompts=tuple(prompts[start : start + AT_ONCE]), negative="", seed=settings.seed + start,
            steps=settings.steps, guidance=settings.guidance, scheduler=settings.scheduler,
            height=manifest.facts.latent.height, width=manifest.facts.latent.width,
        )  # fmt: skip
        parts.append(compiled_pictures(engines, request))
    engines.close()
    return Drawn(
        name=str(bundle),
        how=how,
        latents=np.concatenate([part.latents for part in parts], axis=1),
        pixels=np.concatenate([part.pixels for part in parts]),
    )


# --- differences -----------------------------------------------------------------------------------------------------


def psnr(ours: Array, theirs: Array) -> dict[str, Any]:
    """Decibels of pictures [N, H, W, 3] uint8; infinite ones, of equal pictures, are None in what is written."""
    squares = np.mean((ours.astype(np.float64) - theirs) ** 2, axis=(1, 2, 3))
    each = np.array([decibels(square) for square in squares])
    numbers = {
        "pooled": decibels(squares.mean()), "median": float(np.median(each)), "lowest": float(each.min()),
    }  # fmt: skip
    return {name: value if np.isfinite(value) else None for name, value in numbers.items()}


def decibels(mean_square: float) -> float:
    return float("inf") if mean_square == 0 else 10 * float(np.log10(255**2 / mean_square))


def ssim(ours: Array, theirs: Array) -> dict[str, float]:
    from skimage.metrics import structural_similarity

    each = [
        structural_similarity(
            one, other, data_range=255, channel_axis=-1, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )
        for one, other in zip(ours, theirs, strict=True)
    ]
    return {"mean": float(np.mean(each)), "lowest": float(np.min(each))}


def flip(ours: Array, theirs: Array) -> dict[str, float]:
    import flip_evaluator

    each = [
        flip_evaluator.evaluate(other, one, "LDR", applyMagma=False)[1]
        for one, other in zip(ours.astype(np.float32) / 255, theirs.astype(np.float32) / 255, strict=True)
    ]
    return {"mean": float(np.mean(each)), "highest": float(np.max(each))}


def drift(ours: Array, theirs: Array) -> dict[str, list[float]]:
    """Compare latents [steps, N, C, h, w]: one number a step."""
    flat = (*ours.shape[:2], -1)
    each = np.linalg.norm((ours - theirs).reshape(flat), axis=-1) / np.linalg.norm(theirs.reshape(flat), axis=-1)
    return {"mean": each.mean(axis=1).tolist(), "p95": np.percentile(each, 95, axis=1).tolist()}


def compare(drawn: list[Drawn], right: list[Array], *, points: float, least_psnr: float | None) -> list[dict[str, Any]]:
    """Compare every bundle but the first with the first. `right` says of every picture of each whether it is."""
    reference, known = drawn[0], right[0]
    found = []
    for other, answers in zip(drawn[1:], right[1:], strict=True):
        lost = 100 * int(known.sum() - answers.sum()) / len(known)
        decibel = psnr(other.pixels, reference.pixels)
        loud = least_psnr is None or decibel["pooled"] is None or decibel["pooled"] >= least_psnr
        found.append({
            "bundle": other.name,
            "how": other.how,
            "right": int(answers.sum()),
            "right_here_alone": int((answers & ~known).sum()),
            "right_in_the_reference_alone": int((known & ~answers).sum()),
            "points_lost": lost,
            "psnr": decibel,
            "ssim": ssim(other.pixels, reference.pixels),
            "flip": flip(other.pixels, reference.pixels),
            "drift": drift(other.latents, reference.latents),
            "pass": lost <= points and loud,
        })  # fmt: skip
    return found


def judged(drawn: Drawn, asked: list[judge_demo.Asked], taught: dict[str, Any], reader: judge_demo.Reader) -> Array:
    """Say of every picture whether it shows what was asked for: [N] bool."""
    readings = judge_demo.judge([Image.fromarray(picture) for picture in drawn.pixels], asked, taught, reader)
    return np.array(
        [(q.digit, q.ink, q.page) == (r.digit, r.ink, r.page) for q, r in zip(asked, readings, strict=True)]
    )


# --- showing ---------------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    count, reference, others = report["pictures"], report["reference"], report["others"]
    table = Table("", title=f"{count} pictures, paired by seed with {reference['bundle']} ({reference['how']})")
    for other in others:
        table.add_column(f"{other['bundle']}\n{other['how']}", justify="right")

    def row(name: str, cell: Any) -> None:
        table.add_row(name, *(cell(other) for other in others))

    def loud(value: float | None) -> str:
        return "equal" if value is None else f"{value:.1f} dB"

    row(f"right (reference: {reference['right']})", lambda it: str(it["right"]))
    row("right here alone", lambda it: str(it["right_here_alone"]))
    row("right in the reference alone", lambda it: str(it["right_in_the_reference_alone"]))
    row("points of 100 lost", lambda it: f"{it['points_lost']:.1f}")
    for name in ("pooled", "median", "lowest"):
        row(f"PSNR, {name}", lambda it, name=name: loud(it["psnr"][name]))
    row("SSIM, mean (lowest)", lambda it: f"{it['ssim']['mean']:.4f} ({it['ssim']['lowest']:.3f})")
    row("FLIP, mean (highest)", lambda it: f"{it['flip']['mean']:.4f} ({it['flip']['highest']:.3f})")
    steps = len(others[0]["drift"]["mean"])
    for step in sorted({max(1, round(steps * share)) for share in (0, 0.25, 0.5, 0.75, 1)}):
        row(
            f"drift at step {step}, mean (p95)",
            lambda it, at=step - 1: f"{it['drift']['mean'][at]:.1e} ({it['drift']['p95'][at]:.1e})",
        )
    row("", lambda it: "pass" if it["pass"] else "FAILED")
    console.print(table)


def plot(path: Path, drawn: list[Drawn], found: list[dict[str, Any]]) -> None:
    """Draw drift over steps, and the same pictures by every bundle: from the most different to the least."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(1.4 * SHOWN, 4 + 1.5 * len(drawn)), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[4, 1.5 * len(drawn)])
    axes = above.subplots()
    for other in found:
        means, tails = other["drift"]["mean"], other["drift"]["p95"]
        steps = np.arange(1, len(means) + 1)
        (line,) = axes.plot(steps, means, label=f"{other['bundle']} ({other['how']})")
        axes.plot(steps, tails, color=line.get_color(), linestyle="--", linewidth=0.8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="step", ylabel="relative L2 difference of latents", yscale="log")
    axes.set_title(f"drift from {drawn[0].name} ({drawn[0].how}): mean, and 95th percentile dashed", fontsize="medium")
    axes.legend(fontsize="small")

    differences = [np.mean((it.pixels.astype(np.float64) - drawn[0].pixels) ** 2, axis=(1, 2, 3)) for it in drawn[1:]]
    order = np.argsort(np.max(differences, axis=0))[::-1]
    chosen = order[np.linspace(0, len(order) - 1, min(SHOWN, len(order))).round().astype(int)]
    grid = below.subplots(len(drawn), len(chosen), squeeze=False)
    for row, it in zip(grid, drawn, strict=True):
        for place, picture in zip(row, chosen, strict=True):
            place.imshow(it.pixels[picture], interpolation="nearest")
            place.set(xticks=[], yticks=[])
            if it is drawn[0]:
                place.set_title(f"picture {picture}", fontsize="small")
        row[0].set_ylabel(Path(it.name).name, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path)
    parser.add_argument("others", type=Path, nargs="+")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/digits"), help="says what was taught")
    parser.add_argument("--pictures", type=int, default=1000, metavar="N")
    parser.add_argument("--steps", type=int, default=20, metavar="N")
    parser.add_argument("--guidance", type=float, default=3.0, metavar="SCALE")
    parser.add_argument("--scheduler", default="default", metavar="NAME")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and of the noise")
    parser.add_argument("--points", type=float, default=POINTS, help="right pictures in 100 that may be lost")
    parser.add_argument("--least-psnr", type=float, metavar="DB", help="pooled PSNR that is enough; default: none")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw drift, and some pictures side by side")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    taught = json.loads((arguments.checkpoint / "prompts.json").read_text())
    asked = judge_demo.ask(taught, arguments.pictures, arguments.seed)
    settings = Settings(arguments.steps, arguments.guidance, arguments.seed, arguments.scheduler)
    bundles = [arguments.reference, *arguments.others]
    made_from = [Bundle.open(path).manifest.checkpoint.digest for path in bundles]
    if strangers := [str(path) for path, digest in zip(bundles, made_from, strict=True) if digest != made_from[0]]:
        sys.exit(f"made from another checkpoint than {bundles[0]}: {', '.join(strangers)}")
    drawn = [draw(path, [question.prompt for question in asked], settings) for path in bundles]
    reader = judge_demo.train_reader()
    right = [judged(it, asked, taught, reader) for it in drawn]
    found = compare(drawn, right, points=arguments.points, least_psnr=arguments.least_psnr)
    report = {
        "pictures": len(asked),
        "reference": {"bundle": drawn[0].name, "how": drawn[0].how, "right": int(right[0].sum())},
        "others": found,
        "pass": all(other["pass"] for other in found),
    }
    if arguments.plot:
        plot(arguments.plot, drawn, found)
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        show(report, Console())
    return 0 if report["pass"] else BELOW


if __name__ == "__main__":
    sys.exit(main())
