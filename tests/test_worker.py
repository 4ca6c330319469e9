"""Every way a worker can end, and that nothing of it stays."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from trtdiff import worker
from trtdiff.errors import ArtefactError, BuildError, MissingDependency, StorageError, TrtdiffError

TASKS = """
import ctypes, os, signal, sys, time
from trtdiff.errors import ArtefactError, MissingDependency

def add(a, b, progress):
    for done in range(3):
        progress(done, 2)
    return {"sum": a + b}

def chatty(progress):
    os.write(1, b"from C\\n"); print("from Python"); sys.stderr.write("to stderr\\n")
    return "ok"

def segfault(progress):
    print("about to read address zero", flush=True)
    ctypes.string_at(0)

def abort(progress):
    print("\\n".join(f"line {n}" for n in range(100)), flush=True)
    os.abort()

def killed(progress):
    os.kill(os.getpid(), signal.SIGKILL)

def leave(progress):
    os._exit(3)

def sleep(progress, pidfile):
    with open(pidfile, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)

def typed(progress):
    raise ArtefactError("it is stale", where="here", hint="do that")

def missing(progress):
    raise MissingDependency("no compiler", hint="install it")

def python_error(progress):
    return {}["nothing"]

def full(progress):
    raise OSError(28, "No space left on device", "/a/file")

def broken_library(progress):
    raise OSError("libcudart.so.13: cannot open shared object file: No such file or directory")

def flood(progress, pidfile):
    with open(pidfile, "w") as file:
        file.write(str(os.getpid()))
    for done in range(100_000):  # more than a pipe holds
        progress(done, 100_000)
    open(pidfile + ".done", "w").close()
    time.sleep(60)

def hungry(progress):
    raise MemoryError

def big(progress, megabytes):
    data = bytearray(megabytes << 20)
    for place in range(0, len(data), 4096):
        data[place] = 1
    return len(data)
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    (tmp_path / "worker_tasks.py").write_text(TASKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda name, timeout=None, progress=None, **arguments: worker.run(
        f"worker_tasks:{name}", arguments, what="denoiser", timeout=timeout, progress=progress
    )


def test_a_result_comes_back_with_progress_time_and_memory(tasks):
    seen = []
    outcome = tasks("add", a=2, b=3, progress=lambda done, total: seen.append((done, total)))
    assert outcome.value == {"sum": 5}
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert 0 < outcome.seconds < 30


def test_peak_memory_is_the_workers_own(tasks):
    ballast = bytearray(b"x" * (200 << 20))  # in this process: a child's getrusage would count it
    small, big = tasks("big", megabytes=1).peak_memory, tasks("big", megabytes=101).peak_memory
    assert len(ballast) > big
    assert 95 << 20 < big - small < 110 << 20


def test_what_is_printed_in_there_does_not_disturb(tasks):
    assert tasks("chatty").value == "ok"


@pytest.mark.parametrize(
    ("name", "says", "advice"),
    [
        ("segfault", r"denoiser: the process crashed \(SIGSEGV\)\n.*about to read address zero", "report a crash"),
        ("abort", r"denoiser: the process crashed \(SIGABRT\)", "report a crash"),
        ("killed", r"denoiser: the process crashed \(SIGKILL\)", "ran out of memory"),
        ("leave", r"denoiser: the process ended early \(exit status 3\)", ""),
        ("python_error", r"denoiser: the process ended early.*KeyError: 'nothing'", ""),
        ("broken_library", r"denoiser: the process ended early.*libcudart\.so\.13: cannot open", "please report"),
        ("hungry", r"denoiser: out of memory", "more"),
    ],
)
def test_a_crash_is_a_build_error_with_the_last_words(tasks, name, says, advice):
    with pytest.raises(BuildError, match=f"(?s){says}") as caught:
        tasks(name)
    assert advice in caught.value.hint


def test_the_log_is_cut_to_its_tail(tasks):
    with pytest.raises(BuildError) as caught:
        tasks("abort")
    assert len(str(caught.value).splitlines()) <= worker.LOG_LINES + 4


def test_errors_of_ours_arrive_typed(tasks):
    with pytest.raises(ArtefactError, match="denoiser: it is stale") as caught:
        tasks("typed")
    assert (caught.value.where, caught.value.hint) == ("here", "do that")
    with pytest.raises(MissingDependency, match="no compiler"):
        tasks("missing")
    with pytest.raises(StorageError, match="No space left on device") as caught:
        tasks("full")
    assert caught.value.where == "/a/file"


def test_every_error_of_ours_is_where_the_parent_looks_for_it():
    import pkgutil
    from importlib import import_module

    import trtdiff

    for module in pkgutil.walk_packages(trtdiff.__path__, "trtdiff."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    kinds = [TrtdiffError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert len(kinds) > 10
    assert {kind.__module__ for kind in kinds} == {"trtdiff.errors"}


@pytest.mark.parametrize("problem", [ZeroDivisionError, KeyboardInterrupt])
def test_what_progress_raises_kills_the_worker_and_comes_out(tasks, tmp_path, problem):
    told = []

    def progress(done, total):
        told.append(done)
        raise problem

    began = time.monotonic()
    with pytest.raises(problem):
        tasks("flood", progress=progress, pidfile=str(tmp_path / "pid"))
    assert time.monotonic() - began < 30
    assert told == [0]
    assert _gone(tmp_path / "pid")


def test_what_progress_raises_as_the_worker_ends_comes_out(tasks):
    def progress(done, total):
        if done == total:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tasks("add", a=1, b=1, progress=progress)


def _gone(pidfile, within=10):
    pid = int(pidfile.read_text())
    until = time.monotonic() + within
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _written(path):
    while not (path.exists() and path.read_text()):
        time.sleep(0.02)


def test_a_timeout_kills(tasks, tmp_path):
    with pytest.raises(BuildError, match=r"denoiser: stopped after 3 s"):
        tasks("sleep", timeout=3, pidfile=str(tmp_path / "pid"))
    assert _gone(tmp_path / "pid")


def test_ctrl_c_kills(tasks, tmp_path, request):
    pidfile = tmp_path / "pid"

    def interrupt():
        _written(pidfile)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with pytest.raises(KeyboardInterrupt):
        tasks("sleep", pidfile=str(pidfile))
    assert _gone(pidfile)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_worker_dies_with_its_parent(tasks, tmp_path):
    pidfile = tmp_path / "pid"
    program = f"""
        from trtdiff import worker
        worker.run("worker_tasks:sleep", {{"pidfile": {str(pidfile)!r}}}, what="denoiser")
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    _written(pidfile)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert _gone(pidfile)


def test_nothing_is_left_in_the_temporary_folder(tasks, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    tasks("add", a=1, b=1)
    with pytest.raises(BuildError):
        tasks("killed")
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("content", ["", '{"value": {"su', "\x00"])
def test_a_result_that_was_half_written_is_none(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    assert worker._outcome(tmp_path / "result.json") == {}
    assert worker._outcome(tmp_path / "absent.json") == {}
