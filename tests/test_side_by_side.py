"""Jobs that run together: within the memory, one after another where they must, and what an error does."""

import threading
import time

import pytest

from trtdiff.side_by_side import Job, run_side_by_side


class Watch:
    """Jobs that last until all that are to run together have begun."""

    def __init__(self):
        self.running, self.most, self.order = {}, 0, []
        self.lock = threading.Lock()

    def job(self, name, memory, *, seconds=1.0, after="", error=None):
        def run(stop):
            with self.lock:
                self.running[name] = memory
                self.order.append(name)
                self.most = max(self.most, sum(self.running.values()))
            stop.wait(0.05)
            with self.lock:
                del self.running[name]
            if error:
                raise error
            return name.upper()

        return Job(name, run, memory, seconds, after)


def test_every_job_gives_its_result():
    watch = Watch()
    assert run_side_by_side([watch.job(name, 1) for name in "abc"], memory=3, at_once=2) == {
        "a": "A", "b": "B", "c": "C",
    }  # fmt: skip


def test_memory_is_shared_and_what_does_not_fit_runs_alone():
    watch = Watch()
    sizes = {"a": 6, "b": 5, "c": 4, "d": 20}
    run_side_by_side([watch.job(name, size) for name, size in sizes.items()], memory=10, at_once=4)
    assert watch.most == 20  # d alone, or it would be more
    watch = Watch()
    run_side_by_side([watch.job(name, 3) for name in "abcdef"], memory=10, at_once=8)
    assert watch.most == 9


def test_no_more_at_once_than_was_said():
    watch = Watch()
    run_side_by_side([watch.job(name, 1) for name in "abcdef"], memory=100, at_once=2)
    assert watch.most == 2


def test_the_longest_begins_first_unless_it_waits_for_another():
    watch = Watch()
    jobs = [
        watch.job("short", 1, seconds=1),
        watch.job("long", 1, seconds=9),
        watch.job("waits", 1, seconds=99, after="short"),
        watch.job("free", 1, seconds=5, after="not among them"),
    ]
    run_side_by_side(jobs, memory=1, at_once=1)
    assert watch.order == ["long", "free", "short", "waits"]


def test_after_an_error_nothing_is_begun_and_what_runs_may_end():
    ended = []

    def slow(stop):
        assert not stop.wait(0.3)
        ended.append("slow")

    def fails(stop):
        raise ValueError("no")

    never = Job("never", lambda stop: ended.append("never"), 1, 0.5)
    waits = Job("waits", lambda stop: ended.append("waits"), 1, 0.5, after="fails")
    with pytest.raises(ValueError, match="no"):
        run_side_by_side([Job("slow", slow, 1, 9), Job("fails", fails, 1, 8), never, waits], memory=9, at_once=2)
    assert ended == ["slow"]


def test_an_interrupt_stops_what_runs(monkeypatch):
    stopped = threading.Event()

    def patient(stop):
        assert stop.wait(30)
        stopped.set()

    def interrupt(*_, **__):
        time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr("trtdiff.side_by_side.wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_side_by_side([Job("patient", patient, 1, 1)], memory=1, at_once=1)
    assert stopped.is_set()


def test_an_error_is_told_at_once_with_what_still_runs():
    watch, told, both = Watch(), [], threading.Barrier(2)
    over = threading.Event()

    def slow(stop):
        both.wait(10)
        assert over.wait(10)

    def failing(stop):
        both.wait(10)
        raise RuntimeError("first")

    def failed(error, running):
        told.append((str(error), running))
        over.set()

    jobs = [Job("slow", slow, 1, 1.0), Job("failing", failing, 1, 1.0), watch.job("never", 1, seconds=0.1)]
    with pytest.raises(RuntimeError, match="first"):
        run_side_by_side(jobs, memory=2, at_once=2, failed=failed)
    assert told == [("first", ["slow"])]
    assert not watch.order
