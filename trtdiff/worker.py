"""Work that may crash, in a process of its own.

A compiler that dies of a segmentation fault, or is killed for its memory, must not take the command line with it. `run`
starts `python -m trtdiff.worker`, hands it one task, and gives back what the task returned; whatever goes wrong in
there comes out as one typed error with the last lines of its log.

The protocol: a line of JSON on the worker's standard input, `{"task": "module:function", "arguments": {…}, "result":
path}`; progress as lines `[done, total]` on its standard output; the outcome in the file `result`. All else that is
printed in there, by Python or by C++, is the log. The worker dies with its parent, and the parent kills it when
interrupted.
"""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import trtdiff
from trtdiff import errors
from trtdiff.errors import BuildError, TrtdiffError

Progress = Callable[[int, int], None]
LOG_LINES = 12
_LOOK = 0.25
"""Seconds between two looks at `stop`; a worker that ends is noticed at once."""
_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
"""What the system says of a file that cannot be written: no room, or no right. All else is no matter of storage."""
UNWRITTEN = 74
"""Exit status of a worker that could not write its result."""


@dataclass(frozen=True)
class Outcome:
    """What a task returned, and what it took."""

    value: Any
    seconds: float
    peak_memory: int
    """Largest resident size in bytes; pages of mapped files count."""


def run(
    task: str,
    arguments: Mapping[str, Any],
    *,
    what: str,
    timeout: float | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Outcome:
    """Run `task` ("module:function", called with the JSON-like keyword arguments and `progress`) in a new process.

    `what` names the work in errors. A TrtdiffError raised in there is raised here; a crash, a kill, a timeout (in
    seconds) or any other exception is a BuildError. Setting `stop`, from another thread, kills it; so does an exception
    of `progress`, which is called in another thread, and the exception is raised here.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trtdiff-worker-") as scratch:
        result, log = Path(scratch, "result.json"), Path(scratch, "log")
        request = json.dumps({"task": task, "arguments": arguments, "result": str(result)})
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "trtdiff.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=sink, env=_environment(), start_new_session=True, text=True,
            )  # fmt: skip
            try:
                status = _follow(process, request, timeout, progress, stop)
            finally:
                _kill(process)
        if status is None and stop is not None and stop.is_set():
            raise BuildError(f"{what}: interrupted")
        outcome = _outcome(result)
        if status != 0 or not outcome:
            raise BuildError(f"{what}: {_cause(status, timeout)}{_tail(log)}", hint=_advice(status))
    if "error" in outcome:
        raise _typed(outcome["error"], what)
    return Outcome(outcome["value"], time.monotonic() - began, outcome["peak_memory"])


def _outcome(result: Path) -> dict[str, Any]:
    """Read what the worker wrote; nothing, where it did not come to that or died while it wrote."""
    try:
        outcome: dict[str, Any] = json.loads(result.read_text())
    except (OSError, ValueError):
        return {}
    return outcome


def _follow(
    process: "subprocess.Popen[str]",
    request: str,
    timeout: float | None,
    progress: Progress | None,
    stop: threading.Event | None,
) -> int | None:
    """Send the request, pass progress on until the worker ends; its exit status, or None when time is up.

    Raises what `progress` raises.
    """
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise BuildError("the worker has no pipes")

    problems: list[BaseException] = []

    def listen() -> None:
        for line in stdout:  # to its end, whatever happens: a worker must not wait at a full pipe
            if progress is None or problems:
                continue
            try:
                done, total = json.loads(line)
                progress(done, total)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
                problems.append(error)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        stdin.write(request + "\n")
        stdin.flush()
    except BrokenPipeError:
        pass  # it died at once: its status says more
    ended = time.monotonic() + (math.inf if timeout is None else timeout)
    status = None
    while status is None and not problems and (left := ended - time.monotonic()) > 0:
        if stop is not None and stop.is_set():
            break
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(min(left, _LOOK))
            listener.join(5)
    if problems:
        raise problems[0]
    return status


def _kill(process: "subprocess.Popen[str]") -> None:
    """End the worker and whatever it started, if it still runs; close the pipes."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except BrokenPipeError:
                continue


def _environment() -> dict[str, str]:
    """Give this process's environment, with this trtdiff first on the path."""
    home = str(Path(trtdiff.__file__).resolve().parent.parent)
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1"}


def _cause(status: int | None, timeout: float | None) -> str:
    if status is None:
        return f"stopped after {timeout:g} s, the time it was given"
    if status < 0:
        return f"the process crashed ({signal.Signals(-status).name})"
    return f"the process ended early (exit status {status})"


def _advice(status: int | None) -> str:
    if status is None:
        return "give it more time"
    if status == UNWRITTEN:
        return f"its result could not be written: free some space in {tempfile.gettempdir()}"
    if status == 0:
        return "something in it ended the process; the log may say what. Please report it"
    if status > 0:
        return "the log says what was raised, and where; please report it"
    if status == -signal.SIGKILL:
        return "the system most likely ran out of memory: close other programs, or build on a machine with more"
    return "the log says where; please report a crash of the compiler to its makers"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n  its last words:" + "".join(f"\n    {line}" for line in lines) if lines else ""


def _typed(fields: Mapping[str, str], what: str) -> TrtdiffError:
    kind = getattr(errors, fields["kind"], None)
    if isinstance(kind, type) and issubclass(kind, TrtdiffError):
        return kind(f"{what}: {fields['message']}", where=fields["where"], hint=fields["hint"])
    return BuildError(f"{what}: {fields['kind']}: {fields['message']}", where=fields["where"], hint=fields["hint"])


# --- in the worker ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Be the worker."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)  # progress; from here on, whatever prints goes to the log
    os.dup2(2, 1)
    _die_with_parent()
    request = json.loads(sys.stdin.readline())
    module, _, function = request["task"].partition(":")

    def progress(done: int, total: int) -> None:
        channel.write(json.dumps([done, total]) + "\n")

    outcome: dict[str, Any]
    try:
        value = getattr(import_module(module), function)(**request["arguments"], progress=progress)
        outcome = {"value": value, "peak_memory": _peak_memory()}
    except TrtdiffError as error:
        outcome = _failure(type(error).__name__, error.message, error.where, error.hint)
    except MemoryError:
        outcome = _failure("BuildError", "out of memory", "", "close other programs, or build on a machine with more")
    except OSError as error:
        if error.errno not in _STORAGE:
            raise
        where, hint = str(error.filename or ""), "free some space or choose another folder"
        outcome = _failure("StorageError", str(error.strerror or error), where, hint)
    try:
        Path(request["result"]).write_text(json.dumps(outcome))
    except OSError:
        sys.exit(UNWRITTEN)


def _failure(kind: str, message: str, where: str, hint: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message, "where": where, "hint": hint}}


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _peak_memory() -> int:
    """Largest resident size so far. Not getrusage, which counts the parent's size at the fork as well."""
    try:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        import resource

        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return size if sys.platform == "darwin" else size * 1024


if __name__ == "__main__":
    main()
