"""`trtdiff run`: make pictures with a bundle."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtdiff.cli.options import HELP, json_option, note

if TYPE_CHECKING:
    from trtdiff.execution import Progress
    from trtdiff.pipeline import Pipeline
    from trtdiff.request import Request

PATH = click.Path(path_type=Path)
REFINE_AT = 0.8


@click.command(context_settings=HELP)
@click.argument("bundle", type=PATH)
@click.argument("prompts", nargs=-1, metavar="PROMPT...")
@click.option("-o", "--output", type=PATH, default=Path("out.png"), show_default=True,
              help="PNG to write; several pictures become out-0.png, out-1.png, …")  # fmt: skip
@click.option("--negative", multiple=True, metavar="TEXT", help="What to avoid; one for all prompts, or one for each.")
@click.option("--steps", type=int, default=20, show_default=True, help="Denoising steps.")
@click.option("--guidance", type=float, metavar="SCALE",
              help="How strictly to follow the prompt; 1 or less: off.  [default: the checkpoint's]")  # fmt: skip
@click.option("--true-guidance", type=float, metavar="SCALE",
              help="Weight of the negative prompt where guidance is embedded (FLUX dev).  [default: off]")  # fmt: skip
@click.option("--rescale", type=float, default=0.0, show_default=True, metavar="SHARE",
              help="Share of the guidance rescale, 0 to 1, against pictures that are too bright.")  # fmt: skip
@click.option("--clip-skip", type=int, default=0, show_default=True, metavar="LAYERS",
              help="Last layers of CLIP to leave out for the prompts.")  # fmt: skip
@click.option("--weighted", is_flag=True,
              help="Read (word:1.3), [word] and BREAK in prompts; long ones get more rows of tokens.")  # fmt: skip
@click.option("--seed", metavar="NUMBER|random", default="0", show_default=True,
              help="Of the first picture; every further one has the next.")  # fmt: skip
@click.option("--count", type=int, default=1, show_default=True, help="Pictures of every prompt.")
@click.option("--height", type=int, metavar="PIXELS", help="[default: the checkpoint's, or the image's]")
@click.option("--width", type=int, metavar="PIXELS", help="[default: the checkpoint's, or the image's]")
@click.option("--original-size", type=(int, int), metavar="HEIGHT WIDTH", help="What SDXL is told its picture had.")
@click.option("--crop", type=(int, int), metavar="TOP LEFT", help="Where SDXL is told it was cut out.")
@click.option("--target-size", type=(int, int), metavar="HEIGHT WIDTH", help="What SDXL is told it is to have.")
@click.option("--scheduler", metavar="NAME", help="[default: the checkpoint's]")
@click.option(
    "--image", type=PATH, multiple=True, help="Start from this picture; one for all prompts, or one for each."
)
@click.option("--mask", type=PATH, multiple=True,
              help="Paint anew only where this is white; one for all pictures, or one for each.")  # fmt: skip
@click.option("--strength", type=float,
              help="How much of the picture to change, 0 to 1.  [default: that of diffusers' pipeline]")  # fmt: skip
@click.option("--refiner", type=PATH, metavar="BUNDLE", help="Let this bundle finish the pictures (SDXL's refiner).")
@click.option("--refine-at", type=float, metavar="FRACTION",
              help="When the refiner takes over: the part of the way done by then.  [default: 0.8]")  # fmt: skip
@click.option("--grid", is_flag=True, help="Write a contact sheet too: OUTPUT itself, beside the numbered pictures.")
@click.option("--batch", type=int, help="Pictures computed at once, at most.  [default: as many as the engines take]")
@click.option("--backend", metavar="NAME", help="[default: the best of the bundle's that runs here]")
@click.option("--threads", type=int, help="[default: the backend's choice]")
@click.option("--host-loop", is_flag=True, help="Compute the sampler on the host, for debugging. Slower.")
@json_option
def run(
    bundle: Path,
    prompts: tuple[str, ...],
    output: Path,
    negative: tuple[str, ...],
    steps: int,
    guidance: float | None,
    true_guidance: float | None,
    rescale: float,
    clip_skip: int,
    weighted: bool,
    seed: str,
    count: int,
    height: int | None,
    width: int | None,
    original_size: tuple[int, int] | None,
    crop: tuple[int, int] | None,
    target_size: tuple[int, int] | None,
    scheduler: str | None,
    image: tuple[Path, ...],
    mask: tuple[Path, ...],
    strength: float | None,
    refiner: Path | None,
    refine_at: float | None,
    grid: bool,
    batch: int | None,
    backend: str | None,
    threads: int | None,
    host_loop: bool,
    as_json: bool,
) -> None:
    """Make pictures with a bundle, and a receipt of how.

    \b
    trtdiff run engines/digits "a handwritten seven" --steps 20 --guidance 4 --seed 7 --count 4 -o out.png
    trtdiff run engines/digits "a three" "an eight" --count 2 --grid
    trtdiff run engines/digits "a red nine" --image out-0.png --strength 0.6 -o again.png
    trtdiff run engines/sdxl "a lighthouse" --refiner engines/sdxl-refiner --refine-at 0.8

    Pictures are numbered prompt by prompt; picture i has seed SEED + i, and is the one that diffusers makes with that
    seed. Every PNG carries its parameters; OUTPUT with .json in place of .png is the receipt. Existing files of these
    names are replaced. The files written are listed on standard output.
    """
    import trtdiff
    from trtdiff.execution import Picture
    from trtdiff.output import Output
    from trtdiff.request import make_request

    began = time.perf_counter()
    asked: dict[str, Any] = {
        "negative": negative or None, "steps": steps, "guidance": guidance, "true_guidance": true_guidance,
        "rescale": rescale, "clip_skip": clip_skip, "weighted": weighted, "seed": _seed(seed), "count": count,
        "height": height, "width": width, "original_size": original_size, "crop": crop, "target_size": target_size,
        "scheduler": scheduler, "batch": batch, "loop": "host" if host_loop else "device",
    }  # fmt: skip
    at = _refine_at(refine_at, refiner)
    with ExitStack() as stack:
        pipeline = stack.enter_context(trtdiff.load(bundle, backend, threads))
        final = pipeline if refiner is None else stack.enter_context(trtdiff.load(refiner, backend, threads))
        loaded = time.perf_counter() - began
        if len(pipeline.manifest.engines) > 1 and backend is None:
            note(f"backend {pipeline.backend}, {pipeline.precision} (the best of the bundle's that runs here)")
        request = make_request(
            pipeline.manifest, prompts, image=image or None, mask=mask or None, strength=strength, **asked
        )
        if seed == "random":
            asked["seed"] = request.seed
            note(f"seed {request.seed}")
        last = request if final is pipeline else _to_finish(final, pipeline, request, prompts, asked, at)
        out = Output.of(output, request, sheet=grid)
        for warning in pipeline.warnings(request):
            note(f"warning: {warning}")
        written: list[Path] = []

        with _progress_bar() as (progress, above):
            say = _until_closed(above)

            def save(picture: Picture) -> None:
                written.append(out.write(picture))
                if not as_json:
                    say(str(written[-1]))

            begun = None if final is pipeline else pipeline.begin(request, at, progress=progress)
            result = final.run(last, half_done=begun, progress=progress, finished=save)
        tell = _until_closed(click.echo)
        for path in out.finish(result.pictures, result.receipt):
            if not as_json:
                tell(str(path))
    receipt = result.receipt
    if as_json:
        click.echo(out.receipt.read_text(encoding="utf-8"), nl=False)
    elif sys.stderr.isatty():
        step = receipt.stages["step"]
        pictures = "1 picture" if len(written) == 1 else f"{len(written)} pictures"
        note(f"{pictures} in {receipt.seconds:.2f} s, {1000 * step.median:.1f} ms a step; loaded in {loaded:.2f} s")


def _refine_at(asked: float | None, refiner: Path | None) -> float:
    from trtdiff.errors import UsageError

    if asked is not None and refiner is None:
        raise UsageError("there is no refiner to take over", where="--refine-at", hint="give --refiner BUNDLE")
    return REFINE_AT if asked is None else asked


def _to_finish(
    refiner: "Pipeline",
    base: "Pipeline",
    begun: "Request",
    prompts: tuple[str, ...],
    asked: Mapping[str, Any],
    at: float,
) -> "Request":
    """Ask a refiner for the same pictures, with its own scheduler. Raises UsageError where it cannot finish them."""
    from trtdiff.request import make_request

    own = {"height": begun.height, "width": begun.width, "guidance": begun.guidance, "scheduler": None, "clip_skip": 0}
    told = refiner.manifest.facts.framed
    own |= dict.fromkeys(name for name in ("original_size", "crop", "target_size") if name not in told)
    request = make_request(refiner.manifest, prompts, **{**asked, **own})
    refiner.check_finish(request, base, begun, at)
    return request


def _until_closed(say: Callable[[str], None]) -> Callable[[str], None]:
    """Say things until nobody listens (`| head -1`): the pictures are made and written nevertheless."""
    open_ = True

    def tell(text: str) -> None:
        nonlocal open_
        try:
            if open_:
                say(text)
                sys.stdout.flush()
        except BrokenPipeError:
            open_ = False
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for the flush when the process ends

    return tell


def _seed(text: str) -> int | None:
    from trtdiff.errors import UsageError

    if text == "random":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"seed {text[:40]!r} is not a whole number, or is out of range", hint="give an integer, or: random"
        ) from None


@contextmanager
def _progress_bar() -> Iterator[tuple["Progress | None", Callable[[str], None]]]:
    """Show steps done and time left, on a terminal only; and give what prints a result past the bar."""
    if not sys.stderr.isatty():
        yield None, click.echo
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("denoising"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn())
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with Bar(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("", total=None)

        def say(text: str) -> None:
            """Print above the bar where both are on the terminal; else into the pipe."""
            bar.console.print(text, markup=False) if sys.stdout.isatty() else click.echo(text)

        yield lambda done, total: bar.update(task, completed=done, total=total), say
