"""Several long jobs at once, as many as memory and cores allow, with those first that others wait for."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Job(Generic[T]):
    """Something that another process does, and a thread waits for."""

    name: str
    run: Callable[[threading.Event], T]
    """Does it; gives up soon after the event is set."""
    memory: int
    """Bytes that it needs."""
    seconds: float
    """How long it may take, about: the longest begin first."""
    after: str = ""
    """Name of a job that must have ended."""


def run_side_by_side(
    jobs: Iterable[Job[T]],
    *,
    memory: int,
    at_once: int,
    failed: Callable[[Exception, list[str]], None] = lambda error, running: None,  # noqa: ARG005
) -> dict[str, T]:
    """Run all jobs and give their results by name.

    Jobs run together while their memory adds up to no more than `memory`; one that needs more runs alone. When one
    fails, none is begun any more, those that run are let end, and the first error is raised. An interrupt stops all.
    `failed` is told of every error at once, and which jobs still run.
    """
    waiting = sorted(jobs, key=lambda job: job.seconds, reverse=True)
    awaited = {job.name for job in waiting}
    running: dict[Future[T], Job[T]] = {}
    results: dict[str, T] = {}
    failures: list[Exception] = []
    stop = threading.Event()

    def may_begin(job: Job[T]) -> bool:
        used = sum(other.memory for other in running.values())
        ready = job.after not in awaited or job.after in results
        return ready and len(running) < at_once and (not running or used + job.memory <= memory)

    with ThreadPoolExecutor(at_once) as pool:
        try:
            while waiting or running:
                for job in list(waiting) if not failures else ():
                    if may_begin(job):
                        waiting.remove(job)
                        running[pool.submit(job.run, stop)] = job
                if not running:
                    break
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    job = running.pop(future)
                    try:
                        results[job.name] = future.result()
                    except Exception as error:  # noqa: BLE001 - raised below, once the others have ended
                        failures.append(error)
                        failed(error, [other.name for other in running.values()])
        except BaseException:
            stop.set()
            raise
    if failures:
        raise failures[0]
    return results
