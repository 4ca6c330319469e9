"""This machine: the cores and memory that this process may use, and the facts that receipts write down.

Reading versions asks the installed distributions; no library is imported for it.
"""

import os
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil  # type: ignore[import-untyped]

LIBRARIES = (
    "numpy", "pillow", "tokenizers", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "cuda-python"
)  # fmt: skip
"""Distributions whose versions change a run's result or speed."""


@dataclass(frozen=True)
class Machine:
    """The machine that a run was measured on."""

    system: str
    """Operating system, its release and the processor's architecture."""
    processor: str
    cores: int
    """Logical cores that this process may use."""
    memory: int
    """Bytes of RAM."""
    python: str
    libraries: Mapping[str, str]
    """Version of each installed distribution of `LIBRARIES`."""


def this_machine() -> Machine:
    """Read the facts anew; they are cheap."""
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_processor(),
        cores=usable_cores(),
        memory=int(psutil.virtual_memory().total),
        python=platform.python_version(),
        libraries=installed(LIBRARIES),
    )


def usable_cores() -> int:
    """Count the logical cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_cores() -> int:
    """Count the physical cores this process may use: more threads than that only get in each other's way."""
    return max(1, min(psutil.cpu_count(logical=False) or usable_cores(), usable_cores()))


def available_memory() -> int:
    """Bytes that can be had without swapping, within the limit of the control group (version 2) where there is one."""
    free = int(psutil.virtual_memory().available)
    for folder in _control_groups():
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            reclaimable = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max":
            free = min(free, int(limit) - used + int(reclaimable.get("inactive_file", 0)))
    return max(free, 0)


def peak_memory() -> int:
    """Give the largest resident size this process has had, in bytes; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or "unknown"


def installed(libraries: Iterable[str]) -> dict[str, str]:
    """Give the version of each of these distributions that is installed, without importing it."""
    found = {}
    for name in libraries:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _control_groups() -> list[Path]:
    """List the folders of this process's control group and the groups above it."""
    root = Path("/sys/fs/cgroup")
    try:
        line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    own = root / line.removeprefix("0::").lstrip("/")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
