"""Nested phases as one fraction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtdiff.backends.tensorrt_progress import STEPS, Phases, Told


def test_steps_of_inner_phases_are_parts_of_the_outer_step():
    phases = Phases()
    assert phases.fraction == 0
    phases.start("engine", None, 4)
    phases.step("engine", 0)
    assert phases.fraction == 1 / 4
    phases.start("graph", "engine", 2)
    phases.step("graph", 0)
    assert phases.fraction == pytest.approx(1 / 4 + 1 / 8)
    phases.start("kernels", "graph", 5)
    phases.step("kernels", 1)
    assert phases.fraction == pytest.approx(1 / 4 + (1 / 2 + 2 / 5 / 2) / 4)
    phases.finish("kernels")
    phases.finish("graph")
    assert phases.fraction == 1 / 2
    phases.finish("engine")
    assert phases.fraction == 1


def test_a_second_phase_within_one_step_does_not_lower_it():
    phases = Phases()
    phases.start("engine", None, 2)
    phases.start("first", "engine", 10)
    phases.step("first", 7)
    assert phases.fraction == pytest.approx(0.4)
    phases.finish("first")
    phases.start("second", "engine", 10)
    phases.step("second", 0)
    assert phases.fraction == pytest.approx(0.5)


EVENTS = st.tuples(
    st.sampled_from(["start", "step", "finish"]), st.sampled_from("abcd"), st.sampled_from(["a", "b", None, "?"]),
    st.integers(0, 9),
)  # fmt: skip


@given(st.lists(EVENTS, max_size=40))
def test_whatever_the_library_tells_the_fraction_stays_within_bounds_and_never_falls(events):
    phases, last = Phases(), 0.0
    for kind, name, parent, number in events:
        if kind == "start":
            phases.start(name, parent, number)
        elif kind == "step":
            phases.step(name, number)
        else:
            phases.finish(name)
        assert last <= phases.fraction <= 1
        last = phases.fraction


def test_a_phase_that_names_one_inside_of_it_as_its_parent_stands_alone():
    phases = Phases()
    for name, parent in [("b", None), ("a", "b"), ("a", "a"), ("b", "a")]:
        phases.start(name, parent, 2)
    phases.step("a", 0)
    assert phases.fraction == pytest.approx(0.5)


def test_measures_count_by_their_shares_and_only_ever_more():
    heard = []
    told = Told(lambda done, total: heard.append((done, total)), {"read": 0.25, "written": 0.75})
    for measure, fraction in [("read", 0.4), ("written", 0.2), ("read", 0.1), ("read", 7), ("written", 0.2)]:
        told.tell(measure, fraction)
    assert heard == [(100, STEPS), (250, STEPS), (400, STEPS)]
    told.finish()
    assert heard[-1] == (STEPS, STEPS)


def test_the_first_problem_is_kept_and_ends_the_telling():
    heard = []

    def progress(done, total):
        heard.append(done)
        raise KeyboardInterrupt

    told = Told(progress, {"read": 1.0})
    told.tell("read", 0.5)
    assert isinstance(told.problem, KeyboardInterrupt)
    told.tell("read", 0.9)
    assert heard == [500]
