"""Heuristics where memory or time is short."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems.strategies import problems

from optpipe import Problem, check
from optpipe_solver.bounds.least_memory import least_memory
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.heuristics.naive import one_at_a_time
from optpipe_solver.methods import HEURISTICS


@st.composite
def tight_problems(draw):
    """Any problem, with hardly more memory than the least."""
    problem = draw(problems(max_stages=5, max_microbatches=5))
    content = problem.to_dict()
    for device in content["devices"]:
        host = draw(st.sampled_from([None, 0, 5, 25, 60]))
        device |= {} if host is None else {"host_memory_bytes": host}
    for device, needed in zip(content["devices"], least_memory(Problem.from_dict(content)), strict=True):
        device["activation_budget_bytes"] = needed + draw(st.sampled_from([0, 0, 1, 5, 20]))
    return Problem.from_dict(content)


@settings(max_examples=examples(400), deadline=None)
@given(tight_problems())
def test_heuristics_fit_wherever_any_schedule_does(problem):
    for name in HEURISTICS:
        assert check(problem, next(STREAMS[name](problem, "makespan"))) == []


@settings(max_examples=examples(200), deadline=None)
@given(tight_problems())
def test_one_micro_batch_at_a_time_fits_wherever_any_schedule_does(problem):
    assert check(problem, one_at_a_time(problem, "naive")) == []


@settings(max_examples=examples(20), deadline=None)
@given(problems())
def test_a_stream_ends_at_its_deadline(problem):
    for stream in STREAMS.values():
        assert 1 <= len(list(stream(problem, "makespan", deadline=0.0))) <= 2
