"""`trtdiff doctor`: what this machine can do, and what is missing for the rest."""

import json
import platform
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import click

from trtdiff import __version__
from trtdiff.backends import BACKENDS, TARGETS, backend
from trtdiff.backends.gpu import gpus
from trtdiff.cli.options import HELP, console, json_option
from trtdiff.errors import MissingDependency
from trtdiff.machine import available_memory, physical_cores
from trtdiff.recipes import SCANNED

SCANNER = "onnxruntime"
"""The backend that range scans run on."""


@dataclass(frozen=True)
class Library:
    """A distribution an extra asks for."""

    name: str
    found: str | None
    """Installed version, or None."""


@dataclass(frozen=True)
class Diagnosis:
    """Everything `doctor` found."""

    trtdiff: str
    python: str
    system: str
    cpu: str
    cores: int
    memory_available: int
    disk_free: int
    gpus: tuple[str, ...]
    libraries: dict[str, tuple[Library, ...]]
    can: dict[str, str]
    """Verb → `yes`, or what is missing and how to get it."""
    problems: tuple[str, ...]


def diagnose() -> Diagnosis:
    """Look at this machine; imports none of the libraries it reports."""
    extras = dict.fromkeys(["compile", *(backend(name).extra for name in BACKENDS)])
    libraries = {extra: _libraries(extra) for extra in extras}
    problems = []
    if _version("onnxruntime") and _version("onnxruntime-gpu"):
        problems.append("onnxruntime and onnxruntime-gpu are both installed and overwrite each other: uninstall both, "
                        "then install one")  # fmt: skip
    return Diagnosis(
        trtdiff=__version__,
        python=f"{platform.python_version()} ({sys.executable})",
        system=platform.platform(),
        cpu=_cpu(),
        cores=physical_cores(),
        memory_available=available_memory(),
        disk_free=shutil.disk_usage(Path.cwd()).free,
        gpus=_gpus(),
        libraries=libraries,
        can=_abilities(libraries["compile"]),
        problems=tuple(problems),
    )


def _abilities(compiler: tuple[Library, ...]) -> dict[str, str]:
    """Give `yes`, or what is missing, for everything a person may want to do; backends answer for themselves."""
    absent = [item.name for item in compiler if item.found is None]
    tracing = f"{', '.join(absent)} missing; pip install 'trtdiff[compile]'" if absent else ""
    building = {name: _missing_for(name) for name in BACKENDS}
    running = {name: backend(name).runnable() for name in BACKENDS}
    missing = {"export": tracing}
    for target, name in TARGETS.items():
        missing[f"build --target {target}"] = "; ".join(filter(None, [tracing, building[name]]))
    missing |= {f"run ({name})": text for name, text in running.items()}
    missing["check"] = "; ".join(
        filter(None, [tracing, "" if "" in running.values() else next(iter(running.values()))])
    )
    answers = {verb: f"no: {text}" if text else "yes" for verb, text in missing.items()}
    for target, name in TARGETS.items():
        scans = backend(name).bases[0] in SCANNED
        if scans and answers[f"build --target {target}"] == "yes" and building[SCANNER]:
            answers[f"build --target {target}"] = f"yes, with --no-range-scan: {building[SCANNER]}"
    return answers


def _missing_for(name: str) -> str:
    """Say what a backend lacks on this machine to compile; nothing where it would."""
    try:
        backend(name).toolchain()
    except MissingDependency as error:
        return f"{error.message}; {error.hint}"
    return ""


def _gpus() -> tuple[str, ...]:
    """Name the NVIDIA GPUs that the driver shows, with their compute capabilities; none without a driver."""
    try:
        return tuple(gpu.words for gpu in gpus())
    except MissingDependency:
        return ()


def _libraries(extra: str) -> tuple[Library, ...]:
    """Read what an extra asks for from this package's own metadata."""
    asked = (line.replace('"', "'") for line in requires("trtdiff") or [])
    wanted = [re.split(r"[^A-Za-z0-9_.-]", line)[0] for line in asked if line.endswith(f"extra == '{extra}'")]
    return tuple(Library(name, _version(name)) for name in wanted)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@click.command(context_settings=HELP)
@json_option
def doctor(*, as_json: bool) -> None:
    """Say what this machine can export, build and run, and what is missing.

    \b
    trtdiff doctor
    trtdiff doctor --json
    """
    found = diagnose()
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
        return
    from rich.table import Table
    from rich.text import Text

    out = console()
    machine = Table.grid(padding=(0, 2))
    facts: dict[str, Any] = {
        "trtdiff": found.trtdiff,
        "Python": found.python,
        "system": found.system,
        "CPU": f"{found.cpu}, {found.cores} cores",
        "memory": f"{found.memory_available / 1e9:.1f} GB available",
        "disk": f"{found.disk_free / 1e9:.1f} GB free here",
        "GPU": ", ".join(found.gpus) or "none that an NVIDIA driver shows",
    }
    for name, value in facts.items():
        machine.add_row(name, Text(str(value)))
    out.print(machine)
    table = Table("extra", "library", "installed")
    for extra, libraries in found.libraries.items():
        for library in libraries:
            table.add_row(extra, library.name, library.found or "[red]missing[/red]")
    out.print(table)
    abilities = Table("to", "this machine can")
    for verb, answer in found.can.items():
        abilities.add_row(verb, Text(answer))
    out.print(abilities)
    for problem in found.problems:
        out.print(Text(f"problem: {problem}", style="yellow"))
