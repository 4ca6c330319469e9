"""Compile schedulers into sampler tables: which ones, under which names, and the file that holds them.

Names follow what users of diffusers and of other programs call them; each is a diffusers class made as users make it,
`Class.from_config(pipeline.scheduler.config, **overrides)`. `default` is the checkpoint's own. The file is described
where it is read, in `trtdiff.sampler_book`.
"""

import importlib
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtdiff.errors import SamplerError, UsageError
from trtdiff.export.affinity import check_affinity
from trtdiff.export.closed_form import check_sizes
from trtdiff.export.layout import INFINITE
from trtdiff.export.sampler_pages import SamplerPages, write_book
from trtdiff.export.schedule_call import ScheduleCall, StableDiffusionCall
from trtdiff.export.scheduler_rows import Prober, RefusedSteps, Run, Stage
from trtdiff.sampler_book import near


@dataclass(frozen=True)
class SchedulerChoice:
    """A diffusers scheduler class and the config fields set on top of the checkpoint's."""

    class_name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Config fields that take the value of another field of the checkpoint's, if it is there: new name to old name."""


DEFAULT = "default"
"""The checkpoint's own scheduler."""

_PLAIN = {"use_karras_sigmas": False}
_KARRAS = {"use_karras_sigmas": True}
_2M = {"algorithm_type": "dpmsolver++", "solver_order": 2}
_SDE = {"algorithm_type": "sde-dpmsolver++", "solver_order": 2}

SCHEDULERS: dict[str, SchedulerChoice] = {
    "ddim": SchedulerChoice("DDIMScheduler"),
    "ddpm": SchedulerChoice("DDPMScheduler"),
    "deis": SchedulerChoice("DEISMultistepScheduler"),
    "dpm2": SchedulerChoice("KDPM2DiscreteScheduler", _PLAIN),
    "dpm2_a": SchedulerChoice("KDPM2AncestralDiscreteScheduler", _PLAIN),
    "dpm2_a_karras": SchedulerChoice("KDPM2AncestralDiscreteScheduler", _KARRAS),
    "dpm2_karras": SchedulerChoice("KDPM2DiscreteScheduler", _KARRAS),
    "dpmpp_2m": SchedulerChoice("DPMSolverMultistepScheduler", _2M | _PLAIN),
    "dpmpp_2m_karras": SchedulerChoice("DPMSolverMultistepScheduler", _2M | _KARRAS),
    "dpmpp_2m_sde": SchedulerChoice("DPMSolverMultistepScheduler", _SDE | _PLAIN),
    "dpmpp_2m_sde_karras": SchedulerChoice("DPMSolverMultistepScheduler", _SDE | _KARRAS),
    "dpmpp_2s": SchedulerChoice("DPMSolverSinglestepScheduler", _2M | _PLAIN),
    "dpmpp_2s_karras": SchedulerChoice("DPMSolverSinglestepScheduler", _2M | _KARRAS),
    "dpmpp_3m": SchedulerChoice("DPMSolverMultistepScheduler", {**_2M, **_PLAIN, "solver_order": 3}),
    "euler": SchedulerChoice("EulerDiscreteScheduler", _PLAIN),
    "euler_a": SchedulerChoice("EulerAncestralDiscreteScheduler"),
    "euler_karras": SchedulerChoice("EulerDiscreteScheduler", _KARRAS),
    "heun": SchedulerChoice("HeunDiscreteScheduler", _PLAIN),
    "heun_karras": SchedulerChoice("HeunDiscreteScheduler", _KARRAS),
    "lcm": SchedulerChoice("LCMScheduler"),
    "lms": SchedulerChoice("LMSDiscreteScheduler", _PLAIN),
    "lms_karras": SchedulerChoice("LMSDiscreteScheduler", _KARRAS),
    "pndm": SchedulerChoice("PNDMScheduler"),
    "sa_solver": SchedulerChoice("SASolverScheduler"),
    "tcd": SchedulerChoice("TCDScheduler"),
    "unipc": SchedulerChoice("UniPCMultistepScheduler", _PLAIN),
}

_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
_SHIFT = {"flow_shift": "shift"}

FLOW_SCHEDULERS: dict[str, SchedulerChoice] = {
    "flow_deis": SchedulerChoice("DEISMultistepScheduler", _FLOW, _SHIFT),
    "flow_dpmpp_2m": SchedulerChoice("DPMSolverMultistepScheduler", _2M | _FLOW, _SHIFT),
    "flow_dpmpp_2s": SchedulerChoice("DPMSolverSinglestepScheduler", _2M | _FLOW, _SHIFT),
    "flow_euler": SchedulerChoice("FlowMatchEulerDiscreteScheduler"),
    "flow_heun": SchedulerChoice("FlowMatchHeunDiscreteScheduler"),
    "flow_unipc": SchedulerChoice("UniPCMultistepScheduler", _FLOW, _SHIFT),
}
"""Those for models that predict a flow (Stable Diffusion 3, FLUX). Which of them a pipeline can call depends on the
checkpoint's config; stochastic ones are missing, as these pipelines do not give them the image's generator."""

USUAL = (DEFAULT, "ddim", "euler", "euler_a", "dpmpp_2m", "dpmpp_2m_karras", "dpmpp_2m_sde_karras", "unipc")
"""What is compiled when nobody asks for anything else."""

USUAL_FLOW = (DEFAULT, "flow_dpmpp_2m", "flow_unipc")
"""The same for models that predict a flow."""

REFUSED: dict[str, str] = dict.fromkeys(
    ("DPMSolverSDEScheduler", "CosineDPMSolverMultistepScheduler"),
    "its noise is a Brownian tree over the whole schedule, not draws from the image's generator",
)
"""Classes that no table can reproduce, and why."""

ANOTHER = "choose another scheduler"
MAX_STEPS = 100
TRIED_STEPS = (1, 4, 20)
"""Step counts of which a scheduler must take one: some refuse few, distilled ones refuse many."""
MAX_WINDOW = 16
"""Entries. Known schedulers need 1 to 4; PNDM with its Runge-Kutta warm-up needs 11."""
RESIDUAL = 1e-12
"""Largest residual of a table. Measured: 0 for schedulers that look back on a few entries, 2e-15 for the others."""

Progress = Callable[[str, int, int], None]
"""Called with the scheduler's name, step counts done and step counts in all."""


@dataclass(frozen=True)
class SamplerReport:
    """What compiling one scheduler gave."""

    name: str
    class_name: str
    window: int
    residual: float
    affinity: float
    """Largest relative difference from diffusers' own loop on a non-linear model at real amplitudes."""
    steps: tuple[int, ...]
    refused_steps: Mapping[int, str]
    """Step counts that the scheduler itself refuses, each with its reason."""
    no_image: str
    """Why image to image is impossible, where it is."""
    no_mask: str
    """Why a mask cannot keep a part of a picture, where it cannot."""
    no_other_size: str
    """Why tables hold for the size of the call only, where they do."""
    rows: int
    """Rows stored."""
    seconds: float


@dataclass(frozen=True)
class CompiledSamplers:
    """What `compile_samplers` wrote."""

    path: Path
    size: int
    """Bytes."""
    samplers: tuple[SamplerReport, ...]
    refused: Mapping[str, str]
    """Optional schedulers left out, each with the reason."""


def make_scheduler(
    config: Mapping[str, Any],
    name: str = DEFAULT,
    call: ScheduleCall | None = None,
    choices: Mapping[str, SchedulerChoice] = SCHEDULERS,
) -> Any:
    """Make the diffusers scheduler that a name stands for, from the checkpoint's `scheduler_config.json`.

    The pipeline is built with the checkpoint's own scheduler, and may rewrite its config; the others are then made from
    that config: `pipeline.scheduler = Class.from_config(pipeline.scheduler.config, **overrides)`.
    """
    if name != DEFAULT and name not in choices:
        raise UsageError(f"no scheduler is called {name!r}", hint=near(name, [DEFAULT, *choices]))
    own = _from_config(str(config.get("_class_name", "")), config, {})
    (call or StableDiffusionCall()).adopt(own)
    if name == DEFAULT:
        return own
    choice = choices[name]
    renamed = {new: own.config[old] for new, old in choice.renamed.items() if old in own.config}
    return _from_config(choice.class_name, own.config, {**choice.overrides, **renamed})


def compile_samplers(
    config: Mapping[str, Any],
    names: Sequence[str] = USUAL,
    *,
    path: Path,
    call: ScheduleCall | None = None,
    choices: Mapping[str, SchedulerChoice] = SCHEDULERS,
    steps: Iterable[int] = range(1, MAX_STEPS + 1),
    optional: Sequence[str] = (),
    image_tokens: Sequence[int] = (),
    progress: Progress | None = None,
) -> CompiledSamplers:
    """Compile the named schedulers for all step counts and image-to-image starts, and write them to `path`.

    `config` is the checkpoint's `scheduler_config.json`; `call` and `choices` are the family's. A scheduler of `names`
    that cannot be a table is a SamplerError; one of `optional` is left out and reported. Where schedules depend on the
    size of the picture, tables of other sizes are derived when they are asked for; that is proved here for the sizes in
    `image_tokens`.
    """
    call = call or StableDiffusionCall()
    steps = tuple(steps)
    if not names or not steps:
        raise UsageError("no scheduler or no step count to compile")
    refused: dict[str, str] = {}
    wanted = dict.fromkeys(optional, False) | dict.fromkeys(names, True)

    @contextmanager
    def may_refuse(name: str) -> Iterator[None]:
        try:
            yield
        except SamplerError as error:
            if wanted[name]:
                raise
            refused[name] = error.message

    schedulers, pages, reports = {}, [], []
    for name in dict.fromkeys([*names, *optional]):  # a mistake in any name shows before the work begins
        with may_refuse(name):
            schedulers[name] = make_scheduler(config, name, call, choices)
    for name, scheduler in schedulers.items():
        with may_refuse(name):
            page, report = compile_sampler(
                scheduler, name, call, steps=steps, image_tokens=image_tokens, progress=progress
            )
            pages.append(page)
            reports.append(report)
    versions = {library: importlib.import_module(library).__version__ for library in ("diffusers", "torch")}
    write_book(path, pages, versions)
    return CompiledSamplers(path, path.stat().st_size, tuple(reports), refused)


def check_default(config: Mapping[str, Any], call: ScheduleCall) -> None:
    """Raise SamplerError where the checkpoint's own scheduler is not known, or its pipeline cannot call it."""
    with _quiet():
        scheduler, reasons = make_scheduler(config, DEFAULT, call), []
    with _quiet(), Stage(scheduler) as stage:
        for count in TRIED_STEPS:
            try:
                Prober(stage, call, count).run(None)
            except RefusedSteps as error:
                reasons.append(str(error))
            else:
                return
    kind = type(scheduler).__name__
    raise SamplerError(
        f"the pipeline cannot call its scheduler {kind}: {reasons[-1]}", where=f"scheduler class {kind}",
        hint="put the scheduler there that the model was trained with"
    )  # fmt: skip


def compile_sampler(
    scheduler: Any,
    name: str,
    call: ScheduleCall,
    *,
    steps: Sequence[int],
    image_tokens: Sequence[int] = (),
    progress: Progress | None = None,
) -> tuple[SamplerPages, SamplerReport]:
    """Compile one scheduler object: its pages of the book, and what was found out about it."""
    began = time.perf_counter()
    kind = type(scheduler).__name__
    where = f"scheduler {name} ({kind})"
    if kind in REFUSED:
        raise SamplerError(f"{name}: {kind} cannot be compiled: {REFUSED[kind]}", where=where, hint=ANOTHER)
    say = progress or (lambda _name, _done, _total: None)
    refused_steps: dict[int, str] = {}
    runs: dict[int, tuple[Prober, Run]] = {}
    with _quiet(), Stage(scheduler) as stage:
        for count in steps:
            try:
                prober = Prober(stage, call, count)
                runs[count] = (prober, prober.run(None))
            except RefusedSteps as error:
                refused_steps[count] = str(error)
            say(name, len(runs) + len(refused_steps), 2 * len(steps))
        if not runs:
            raise SamplerError(
                f"{name}: {kind} runs at no step count: {next(iter(refused_steps.values()))}", where=where, hint=ANOTHER
            )
        window = _window(name, [run for _, run in runs.values()])
        order = getattr(scheduler, "order", 1)
        pages = SamplerPages(name, kind, _identity(scheduler, call), window, refused_steps, order)
        for done, (count, (prober, full)) in enumerate(runs.items()):
            pages.add(count, None, full)
            try:
                for start in range(count):
                    pages.add(count, start, prober.run(start, window, full))
            except RefusedSteps as error:
                pages.no_image = str(error)
            say(name, len(steps) + done + 1, 2 * len(steps))
        pages.no_other_size = check_sizes(stage, call, pages, image_tokens, runs)
    if pages.residual > RESIDUAL:
        raise SamplerError(f"{name}: {kind} looks back over more than {window} entries from a start", where=where)
    with _quiet():
        pages.affinity = check_affinity(scheduler, call, pages)
    return pages, SamplerReport(
        name=name,
        class_name=kind,
        window=window,
        residual=pages.residual,
        affinity=pages.affinity,
        steps=tuple(runs),
        refused_steps=refused_steps,
        no_image=pages.no_image,
        no_mask=pages.no_mask,
        no_other_size=pages.no_other_size,
        rows=pages.stored_rows,
        seconds=time.perf_counter() - began,
    )


def _window(name: str, runs: Sequence[Run]) -> int:
    """Find the shortest window that expresses every row of every run."""
    window = 1
    for run in sorted(runs, key=lambda run: len(run.rows)):
        while run.coefficients(window)[1] > RESIDUAL:
            window += 1
            if window > MAX_WINDOW:
                raise SamplerError(f"{name}: needs a window of more than {MAX_WINDOW} entries", hint=ANOTHER)
    return window


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep diffusers' advice about configs to itself: it would come once a step count."""
    logger = logging.getLogger("diffusers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)


def _from_config(class_name: str, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    where = f"scheduler class {class_name or '(none given)'}"
    if class_name in REFUSED:
        raise SamplerError(f"{class_name} cannot be compiled: {REFUSED[class_name]}", where=where, hint=ANOTHER)
    scheduler_class = getattr(importlib.import_module("diffusers"), class_name or "-", None)
    if not isinstance(scheduler_class, type) or not class_name.endswith("Scheduler"):
        raise SamplerError(
            f"diffusers has no scheduler {class_name or 'without a name'}",
            where=where,
            hint="scheduler_config.json names the class",
        )
    config = {name: float(value) if value in INFINITE else value for name, value in config.items()}
    try:
        return scheduler_class.from_config(config, **overrides)  # type: ignore[attr-defined]
    except Exception as error:  # a config that the class refuses, or a library that it wants
        raise SamplerError(f"diffusers refuses this config: {type(error).__name__}: {error}", where=where) from error


def _identity(scheduler: Any, call: ScheduleCall) -> dict[str, Any]:
    """Everything that the coefficients follow from, JSON-like, for the digest and for whoever reads the file."""
    config = {name: _plain(value) for name, value in scheduler.config.items() if not name.startswith("_")}
    return {"class": type(scheduler).__name__, "config": config, "call": dict(call.identity)}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
