"""What this machine offers: cores and memory, as far as this process may use them."""

import os
from pathlib import Path

import psutil  # type: ignore[import-untyped]


def physical_cores() -> int:
    """Count the physical cores this process may use: more threads than that only get in each other's way."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or usable, usable))


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


def _control_groups() -> list[Path]:
    """List the folders of this process's control group and the groups above it."""
    root = Path("/sys/fs/cgroup")
    try:
        line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    own = root / line.removeprefix("0::").lstrip("/")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
