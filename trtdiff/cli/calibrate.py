"""`trtdiff calibrate`: what a checkpoint's values are, over the whole denoising schedule, for precisions of 8 bits."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtdiff.cli.options import CALIBRATION, EXPORTS, HELP, json_option, note, only_folder

if TYPE_CHECKING:
    from trtdiff.calibrate.cache import Cache
    from trtdiff.export.manifest import ExportManifest
    from trtdiff.recipes.quantization import Method

FORMATS = {"int8": "int8", "fp8": "float8"}
"""Word after `--precision` → type of 8 bits."""
_FILE = click.Path(path_type=Path)


@click.command(context_settings=HELP)
@click.argument("folder", required=False, type=_FILE)
@click.option("--prompts", type=_FILE, help="Text file of prompts, one a line. Default: two of the model family's.")
@click.option("--samples", type=int, help="Inputs of the denoiser, each one picture at one step. Default: 64.")
@click.option("--steps", type=int, help="Of the checkpoint's own scheduler. Default: 20; 28 of SD3 and FLUX.")
@click.option("--bands", type=int, help="Equal parts of the schedule, with as many samples each. Default: 8.")
@click.option("--guidance", type=float, help="Guidance scale. Default: the checkpoint's.")
@click.option("--negative", help="Negative prompt, of the other guidance branch.")
@click.option("--seed", type=int, help="Picture i has seed SEED + i. Default: 0.")
@click.option("--height", type=int, help="In pixels. Default: the checkpoint's.")
@click.option("--width", type=int, help="In pixels. Default: the checkpoint's.")
@click.option(
    "--method", type=click.Choice(["max", "mse", "percentile"]),
    help="How clips will be chosen: the largest magnitude, the least squared error (default), or a share of elements.",
)  # fmt: skip
@click.option(
    "--precision", "precisions", multiple=True, type=click.Choice(list(FORMATS)),
    help="Types of 8 bits that are tried. Several times for both. Default: both.",
)  # fmt: skip
@click.option(
    "--sensitivity/--no-sensitivity", default=True, show_default=True,
    help="Measure what rounding does to every layer, on one sample a band.",
)  # fmt: skip
@click.option("-o", "--out", type=_FILE, help="The cache. Default: calibration/NAME.json.")
@click.option("--resume", is_flag=True, help="Go on with a cache that was interrupted, or add what is asked for now.")
@click.option("--force", is_flag=True, help="Begin anew, and replace the cache.")
@click.option(
    "--merge", multiple=True, type=_FILE, metavar="CACHE", help="Put this cache into the one at -o; run nothing."
)
@click.option("--import-tensorrt", type=_FILE, metavar="FILE", help="Make the cache from TensorRT's own; run nothing.")
@click.option("--export-tensorrt", type=_FILE, metavar="FILE", help="Write the cache as TensorRT's own; run nothing.")
@click.option("--component", default="denoiser", show_default=True, help="Graph that TensorRT's cache is of.")
@json_option
def calibrate(
    *,
    folder: Path | None,
    prompts: Path | None,
    precisions: tuple[str, ...],
    sensitivity: bool,
    out: Path | None,
    resume: bool,
    force: bool,
    merge: tuple[Path, ...],
    import_tensorrt: Path | None,
    export_tensorrt: Path | None,
    component: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Make pictures with an export in float32, and write down what its values are.

    FOLDER is what `trtdiff export` made; the only one under exports/ where none is given. The cache that comes of it
    is what `trtdiff build --precision fp8` chooses scales from. Ctrl-C keeps what is done, and --resume goes on.

    \b
    trtdiff calibrate exports/digits --prompts calibration/digits.txt
    trtdiff calibrate --resume
    trtdiff inspect calibration/digits.json --sensitivity
    trtdiff calibrate --seed 100 -o calibration/more.json
    trtdiff calibrate --merge calibration/more.json
    """
    from trtdiff.errors import UsageError
    from trtdiff.export.manifest import EXPORT_FILE
    from trtdiff.export.read import read_export

    if folder is None:
        folder = only_folder(EXPORTS, EXPORT_FILE, what="export", make="trtdiff export CHECKPOINT")
        note(f"export {folder} (the only one there is)")
    export = read_export(folder)
    if out is None:
        out = CALIBRATION / f"{export.name}.json"
        note(f"cache {out} (default)")
    alone = [bool(merge), import_tensorrt is not None, export_tensorrt is not None]
    if sum(alone) > 1 or (any(alone) and resume):
        raise UsageError("one thing at a time", where="--merge, --import-tensorrt, --export-tensorrt, --resume",
                         hint="run trtdiff calibrate once for each")  # fmt: skip
    if merge:
        cache = _merge(export, out, merge, force=force)
    elif import_tensorrt is not None:
        cache = _import(export, folder, out, import_tensorrt, component, force=force)
    elif export_tensorrt is not None:
        cache = _export(export, out, export_tensorrt, component, given["method"], force=force)
    else:
        asked = {name: value for name, value in given.items() if value is not None}
        if precisions:
            asked["formats"] = [FORMATS[word] for word in dict.fromkeys(precisions)]
        asked["sensitivity"] = int(sensitivity)
        asked |= _said_prompts(export, prompts)
        cache = _calibrate(export, folder, out, asked, resume=resume, force=force)
    if as_json:
        click.echo(json.dumps(_summary(cache, out), indent=2, ensure_ascii=False))


def _said_prompts(export: "ExportManifest", file: Path | None) -> dict[str, Any]:
    """Read the prompts; say where there are none of the user's, and what was left out."""
    from trtdiff.calibrate.prompt_file import read_prompts
    from trtdiff.calibrate.prompts import prompts_for

    if file is None:
        note(
            f"prompts {len(prompts_for(export.family))} of the family {export.family} (default; yours: --prompts FILE)"
        )
        return {}
    prompts, blank = read_prompts(file)
    if blank:
        shown = ", ".join(map(str, blank[:5])) + (" …" if len(blank) > 5 else "")
        note(f"{file}: {len(blank)} blank lines were left out (line {shown})")
    return {"prompts": list(prompts)}


def _calibrate(
    export: "ExportManifest", folder: Path, out: Path, asked: dict[str, Any], *, resume: bool, force: bool
) -> "Cache":
    from trtdiff.calibrate.cache import read_cache, write_cache
    from trtdiff.calibrate.calibration import Calibration
    from trtdiff.calibrate.settings import calibration_memory, calibration_settings
    from trtdiff.errors import UsageError
    from trtdiff.estimate import check_disk, check_memory, float32_weights, size
    from trtdiff.whole import locked

    settings = calibration_settings(export, asked)
    weights = float32_weights(folder, export)
    needed = calibration_memory(weights, pixels=settings.height * settings.width)
    work = out.parent / f".{out.stem}.calibrating"

    def save(cache: "Cache") -> None:
        write_cache(out, cache)

    if out.is_dir():
        raise UsageError(f"{out} is a folder", where="-o", hint=f"name a file, as in {out / export.name}.json")
    with locked(out, note):
        if force:
            shutil.rmtree(work, ignore_errors=True)
        start = None if force or not out.exists() else read_cache(out)
        if resume and start is None and not force:
            note(f"{out} is not there yet; beginning")
        with _progress() as progress:
            calibration = Calibration(folder, settings, work, start=start, progress=progress, save=save)
            if calibration.complete:
                calibration.forget()
                note(f"{out} is up to date: it is of this export, these prompts and settings")
                return start or calibration.cache()
            if start is not None and not resume:
                raise UsageError(f"{out} {'lacks what is asked for now' if start.complete else 'is not finished'}",
                                 where=str(out), hint="--resume goes on, --force begins anew")  # fmt: skip
            note(f"{settings}; about {calibration.seconds:.0f} s on two cores, {size(needed)} of memory")
            check_memory("the calibration", needed)
            check_disk({out.parent: max(weights.values(), default=0)}, "the calibration")
            with _keeping(out) if start is None else nullcontext():
                try:
                    cache = calibration.run()
                except KeyboardInterrupt:
                    note(_interrupted(calibration.cache(), out))
                    raise click.exceptions.Exit(130) from None
                _require_unchanged(folder, export, out, start)
        if cache.complete:
            calibration.forget()
            _spare(out).unlink(missing_ok=True)
        else:
            left = ", ".join(key for run in cache.runs for key in run.wanted if run.done.get(key) != run.wanted[key])
            note(f"{out} has what was asked for now; {left} is left from before: --resume with the options of then")
    for line in _words(cache, out):
        note(line)
    return cache


@contextmanager
def _keeping(out: Path) -> Iterator[None]:
    """Keep the cache that stands at `out` until another is complete: beside it where that one is interrupted."""
    spare = _spare(out)
    if out.exists() and not spare.exists():
        out.replace(spare)
    try:
        yield
    except BaseException:
        if spare.exists() and out.exists():
            note(f"what stood there before is {spare}")
        elif spare.exists():
            spare.replace(out)
        raise


def _spare(out: Path) -> Path:
    return out.with_name(f"{out.stem}.before{out.suffix}")


def _require_unchanged(folder: Path, export: "ExportManifest", out: Path, start: "Cache | None") -> None:
    """Take back what was seen of an export that was replaced meanwhile. Raises ArtefactError."""
    from trtdiff.calibrate.cache import write_cache
    from trtdiff.errors import ArtefactError
    from trtdiff.export.read import read_export

    if read_export(folder) != export:
        if start is None:
            out.unlink()
        else:
            write_cache(out, start)
        raise ArtefactError("the export was replaced while it was calibrated", where=str(folder),
                            hint="calibrate again, with --force")  # fmt: skip


def _interrupted(cache: "Cache", out: Path) -> str:
    (run,) = cache.runs
    if not out.exists():
        return "interrupted before anything was seen; nothing was written"
    seen = {key: counts.get("denoiser", 0) for key, counts in run.done.items() if any(counts.values())}
    done = ", ".join(f"{key} {count} of {run.wanted[key]['denoiser']}" for key, count in seen.items()) or "none"
    return f"interrupted; {out} keeps what is done (samples by pass: {done}); add --resume to the same command to go on"


def _words(cache: "Cache", out: Path) -> Iterator[str]:
    """Say in a few lines what was found."""
    from trtdiff.describe_cache import worst_layers

    samples = sum(run.samples for run in cache.runs)
    values = sum(len(component.values) for component in cache.components.values())
    yield f"{out}: {samples} samples, {values} values of {len(cache.components)} graphs; see trtdiff inspect {out}"
    for layer in worst_layers(cache, 3):
        yield f"  most sensitive to {layer.format}: {layer.where}, {layer.decibels:.1f} dB"


def _merge(export: "ExportManifest", out: Path, others: tuple[Path, ...], *, force: bool) -> "Cache":
    """Put caches into the one at `out`; what would lose something that was measured needs `force`."""
    from trtdiff.calibrate.cache import read_cache, require_same_model, write_cache
    from trtdiff.calibrate.merge import merge
    from trtdiff.errors import UsageError
    from trtdiff.whole import locked

    with locked(out, note):
        cache = read_cache(out)
        require_same_model(cache, export)
        for other in others:
            cache, remarks = merge(cache, read_cache(other))
            if remarks and not force:
                raise UsageError(f"merging would lose what was measured: {remarks[0]}", where=f"{out}, {other}",
                                 hint="measure the same in both before, or accept the loss with --force")  # fmt: skip
            for remark in remarks:
                note(f"{other}: {remark}")
        write_cache(out, cache)
    note(f"{out}: {sum(run.samples for run in cache.runs)} samples of {len(cache.runs)} calibrations")
    return cache


def _import(export: "ExportManifest", folder: Path, out: Path, file: Path, component: str, *, force: bool) -> "Cache":
    from trtdiff.calibrate.cache import write_cache
    from trtdiff.calibrate.imported import imported_cache
    from trtdiff.calibrate.tensorrt_text import read_scales
    from trtdiff.errors import UsageError
    from trtdiff.whole import locked

    with locked(out, note):
        if out.exists() and (not force or file.resolve() == out.resolve()):
            raise UsageError(f"{out} is there already", where="-o",
                             hint="name another file, or replace it (not the import itself) with --force")  # fmt: skip
        cache, unknown = imported_cache(export, folder, component, read_scales(file), source=file.name)
        if unknown:
            note(
                f"{len(unknown)} tensors of {file} are not in the graph of the {component}, and were left out: "
                f"{', '.join(unknown[:3])}{' …' if len(unknown) > 3 else ''}"
            )
        cache = write_cache(out, cache)
    if zeros := sum(seen.largest == 0 for seen in cache.components[component].values.values()):
        note(f"warning: {zeros} scales are 0: these tensors are taken to be 0 always")
    note(f"{out}: {len(cache.components[component].values)} tensors of the {component}")
    return cache


def _export(
    export: "ExportManifest", out: Path, file: Path, component: str, method: "Method | None", *, force: bool
) -> "Cache":
    from trtdiff.calibrate.cache import read_cache, require_same_model, statistics_of
    from trtdiff.calibrate.clips import clip_of
    from trtdiff.calibrate.tensorrt_text import write_scales
    from trtdiff.errors import ArtefactError, UsageError

    if file.exists() and (not force or file.resolve() == out.resolve()):
        raise UsageError(f"{file} is there already", where="--export-tensorrt",
                         hint="name another file, or replace it (not the cache itself) with --force")  # fmt: skip
    cache = read_cache(out)
    require_same_model(cache, export)
    if not cache.complete:
        raise ArtefactError(
            f"{out} is not finished", where=str(out), hint="go on with the same trtdiff calibrate, and --resume"
        )
    values = statistics_of(cache, component)
    inputs = {name for layer in cache.components[component].layers.values() for name in layer.inputs}
    found: Method = method or ("mse" if any(values[name].errors.get("int8") for name in inputs) else "max")
    clips = {name: clip_of(seen, "int8", found if name in inputs else "max") for name, seen in values.items()}
    write_scales(file, clips)
    kept = sum(clip > 0 for clip in clips.values())
    note(f"{file}: scales of {kept} tensors of the {component}; those of inputs of layers by {found}")
    return cache


def _summary(cache: "Cache", out: Path) -> dict[str, Any]:
    from trtdiff.manifest import as_json

    return {
        "cache": str(out),
        "digest": cache.digest,
        "complete": cache.complete,
        "runs": [as_json(asdict(run)) for run in cache.runs],
        "components": {
            name: {"rows": seen.rows, "values": len(seen.values), "layers": len(seen.layers)}
            for name, seen in cache.components.items()
        },
    }


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show a bar with the time that is left, on a terminal; elsewhere nothing."""
    import sys

    if not sys.stderr.isatty():
        yield lambda done, total: None  # noqa: ARG005
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("calibrating", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
