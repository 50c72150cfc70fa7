"""A long schedule from a short one: where list scheduling becomes periodic, repeating its period is as good as going
on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from support.examples import examples
from support.problems import pipeline as make_pipeline
from support.problems import stage
from support.strategies import problems

from optpipe import Problem, check
from optpipe.lift import lift_table
from optpipe_solver import plan
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.heuristics.list_scheduling import ListScheduler
from optpipe_solver.heuristics.periods import lengthened
from optpipe_solver.heuristics.policy import Policy
from optpipe_solver.heuristics.policy_schedules import PolicySchedules


def pipeline(devices: int, microbatches: int, memory: int, jitter: float = 0.0) -> Problem:
    noise = np.random.default_rng(0)
    times = [(10 * (1 + jitter * noise.random()), 10 * (1 + jitter * noise.random()), 8) for _ in range(devices)]
    stages = [stage(ms, (5, 2), offload=(12, 12, 5)) for ms in times]
    return make_pipeline(devices, microbatches, memory, stages, p2p_ms=1.0)


def run(problem: Problem, policy: Policy):
    scheduler = ListScheduler(problem)
    assert scheduler.run(policy)
    return np.array(scheduler.rows, dtype=np.int32), np.array(scheduler.starts)


@pytest.mark.parametrize("policy", [Policy(offload=(1.0,) * 6, patience=0.5), Policy(), Policy(split=False)])
@pytest.mark.parametrize("microbatches", [61, 120])
def test_a_repeated_period_is_as_good_as_list_scheduling_all_of_it(policy, microbatches):
    problem = pipeline(6, microbatches, 15)
    longer = lengthened(*run(problem.replace(microbatches=40), policy), microbatches)
    assert longer is not None
    schedule = lift_table(problem, *longer)
    assert check(problem, schedule) == []
    assert schedule.makespan_ms <= 1.02 * lift_table(problem, *run(problem, policy)).makespan_ms


def test_without_a_period_nothing_is_repeated():
    assert lengthened(*run(pipeline(6, 6, 15), Policy()), 20) is None
    table = np.array([[0, 0, j, 0, 0] for j in range(12)], dtype=np.int32)
    assert lengthened(table, np.cumsum(np.arange(12.0)), 20) is None


def test_a_large_problem_is_listed_by_its_period(monkeypatch):
    problem = pipeline(6, 400, 15, jitter=0.05)
    policy = Policy(offload=(1.0,) * 6, patience=0.5, alike=True)
    whole = PolicySchedules(problem, "x").schedule(policy)
    handled = []
    run_to_the_end = ListScheduler.run
    monkeypatch.setattr(plan, "REPEAT_FORWARDS", 1000)
    monkeypatch.setattr(
        ListScheduler,
        "run",
        lambda self, *asked: handled.append(self.problem.microbatches) or run_to_the_end(self, *asked),
    )
    quick = PolicySchedules(problem, "x").schedule(policy)
    assert len(handled) == 1
    assert handled[0] < 50
    assert quick.makespan_ms <= 1.01 * whole.makespan_ms


@settings(max_examples=examples(20), deadline=None)
@given(problems())
def test_a_stream_ends_at_its_deadline(problem):
    for name, stream in STREAMS.items():
        assert list(stream(problem, "makespan", deadline=0.0)) == [] or name == "naive"
