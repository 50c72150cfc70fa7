"""A schedule for every step (`optpipe.steps`)."""

import os
import sys
import threading
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from support.oracles.enumeration import best_of_all
from support.problems import pipeline, stage

from optpipe import InputError, Problem, certify, check
from optpipe.steps import StepMemoryError, StepRules, StepScheduler, assign


def step_of(devices: int, weights: list[float], memory: int) -> Problem:
    """A step whose micro-batches cost their weight times (2, 2, 1) ms and 100 bytes on each device."""
    one = stage((2, 2, 1), (100, 40))
    each = {name: tuple(type(value)(value * weight) for weight in weights) for name, value in one.items()}
    return pipeline(devices, len(weights), memory, each, p2p_ms=0.5)


def random_step(devices: int, microbatches: int, seed: int = 0, memory: float = 2.0) -> Problem:
    weights = np.random.default_rng(seed).lognormal(0.0, 0.4, microbatches)
    return step_of(devices, weights.tolist(), int(memory * 100 * weights.max()))


@pytest.mark.parametrize("weights", [[1, 3], [3, 1], [2, 2], [1, 7]])
@pytest.mark.parametrize("memory", [400, 1200])
def test_a_first_schedule_is_as_short_as_any_of_a_tiny_step(weights: list[float], memory: int) -> None:
    problem = step_of(2, weights, memory) if max(weights) * 100 <= memory else step_of(2, weights, max(weights) * 100)
    planned = StepScheduler(problem).plan(problem, improve=False)
    assert planned.first.makespan_ms == pytest.approx(best_of_all(problem, "makespan")[0], rel=1e-9)


@pytest.mark.parametrize("memory", [1.0, 1.3, 4.0])
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (2, 5), (4, 8)])
def test_schedules_are_valid_and_only_become_shorter(devices: int, microbatches: int, memory: float) -> None:
    problem = random_step(devices, microbatches, 1, memory)
    planned = StepScheduler(problem).plan(problem)
    best = planned.best()
    assert best.makespan_ms <= planned.first.makespan_ms
    for schedule in (planned.first, best):
        assert not check(problem, schedule)
        assert certify(problem, schedule).fits
    assert planned.best() is best
    assert planned.ready()


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is a process's elsewhere")
def test_a_search_beside_the_training_is_nicer_than_it() -> None:
    before = set(threading.enumerate())
    planned = StepScheduler(random_step(8, 32)).plan(random_step(8, 32))
    (thread,) = set(threading.enumerate()) - before
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    while thread.is_alive() and os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) == mine:
        pass
    assert thread.is_alive()
    planned.best()
    thread.join()
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


@pytest.mark.parametrize(("memory", "seed"), [(1.6, 9), (2.0, 3), (2.0, 8)])
def test_a_step_starts_from_the_rules_of_another(memory: float, seed: int) -> None:
    """By what micro-batches weigh, whatever their numbers are: one with the same ones has no longer schedule."""
    before = random_step(4, 8, seed, memory)
    planned = StepScheduler(before).plan(before, improve=False)
    planned._search(20_000)
    best = planned.best()
    assert best.rules is not None
    start = StepRules(best.rules, before)
    same = before.entering(np.random.default_rng(1).permutation(8).tolist())
    alone, started = (StepScheduler(same).plan(same, False, starts).first.makespan_ms for starts in ((), (start,)))
    assert started <= best.makespan_ms * (1 + 1e-9) < alone
    for other in (random_step(4, microbatches, 3, memory) for microbatches in (1, 5, 13)):
        assert not check(other, StepScheduler(other).plan(other, False, [start]).first)
    assert StepScheduler(same).plan(same, False, [StepRules(start.rules, random_step(4, 5))]).first, "rules of no step"


@pytest.mark.parametrize("microbatches", [1, 3, 9])
def test_a_step_has_any_number_of_micro_batches_and_one_first_schedule_on_all_ranks(microbatches: int) -> None:
    step = random_step(2, microbatches)
    first, again = (StepScheduler(random_step(2, 4)).plan(step, improve=False).first for _ in range(2))
    assert not check(step, first)
    assert first.programs == again.programs


@pytest.mark.parametrize(
    "relief", [{"recompute": (2, 10)}, {"offload": (1, 1, 90)}, {"offload": (1, 1, 90), "offload_parts": 2}]
)
def test_what_fits_only_if_activations_leave_is_scheduled(relief: dict[str, Any]) -> None:
    chunks = [stage((2, 2, 1), (100, 40), device=d, **relief) for d in (0, 1, 0, 1)]
    problem = pipeline(2, 3, 150, chunks)
    problem = problem.replace(stages=[s.model_copy(update={"forward_ms": (2.0, 3.0, 1.0)}) for s in problem.stages])
    assert not check(problem, StepScheduler(problem).plan(problem, improve=False).first)
    assert sorted(map(len, assign(problem, 2, [2, 1]).microbatches)) == [1, 2]


@pytest.mark.parametrize("first_stage", [0, 1])
def test_a_micro_batch_without_room_is_named_before_the_step(first_stage: int) -> None:
    devices = [first_stage, 1 - first_stage, first_stage]
    chunks = [stage((2, 2, 1), (0, 0), device=d) | {"activation_bytes": (100, 260, 90)} for d in devices]
    problem = pipeline(2, 3, 500, chunks)
    scheduler = StepScheduler(problem)
    with pytest.raises(StepMemoryError, match="micro-batch 1 by itself needs at least 520 B") as error:
        scheduler.plan(problem)
    assert (error.value.microbatch, error.value.device) == (1, first_stage)


@pytest.mark.parametrize("weights", [[1, 9, 2, 3, 5], [4, 4, 4, 1, 1], [1, 2, 3, 4, 8]])
@pytest.mark.parametrize("counts", [[3, 2], [2, 3]])
def test_no_other_assignment_of_a_tiny_batch_is_faster_by_much(weights: list[float], counts: list[int]) -> None:
    batch = step_of(2, weights, 2000)
    scheduler, assignment = StepScheduler(batch), assign(batch, 2, counts)

    def slowest_ms(first: frozenset[int]) -> float:
        """Of the replica that has these micro-batches, and the one that has the others."""
        steps = [batch.entering(sorted(each)) for each in (first, set(range(5)) - first)]
        return max(scheduler.plan(step, improve=False).first.makespan_ms for step in steps)

    assert [len(each) for each in assignment.microbatches] == counts
    assert sorted(sum(assignment.microbatches, ())) == list(range(5))
    shortest = min(slowest_ms(frozenset(first)) for first in combinations(range(5), counts[0]))
    assert slowest_ms(frozenset(assignment.microbatches[0])) <= 1.03 * shortest


@pytest.mark.parametrize("memory", [1.0, 4.0])
@pytest.mark.parametrize("free", [False, True])
def test_replicas_end_close_to_the_mean_work(free: bool, memory: float) -> None:
    batch = random_step(2, 32, 3, memory)
    assignment = assign(batch, 4, free=free)
    assert sorted(sum(assignment.microbatches, ())) == list(range(32))
    assert all(assignment.microbatches)
    assert free or {len(each) for each in assignment.microbatches} == {8}
    assert assignment.floor_ms <= assignment.slowest_ms <= (1.1 if memory > 1 else 2.2) * assignment.floor_ms
    for microbatches, ms in zip(assignment.microbatches, assignment.ms, strict=True):
        step = batch.entering(microbatches)
        assert StepScheduler(step).plan(step, improve=False).first.makespan_ms <= ms * (1 + 1e-9)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"replicas": 5}, "replicas = 5: 8 micro-batches cannot be divided equally"),
        ({"replicas": 9}, "replicas = 9: from 1 to the 8"),
        ({"replicas": 2, "counts": [4, 5]}, "sum 8"),
        ({"replicas": 2, "counts": [8, 0]}, "at least 1"),
    ],
)
def test_numbers_of_replicas_and_stages_that_do_not_match_are_refused(
    arguments: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        assign(random_step(2, 8), **arguments)
    with pytest.raises(InputError, match="same devices"):
        StepScheduler(random_step(2, 4)).plan(random_step(3, 4))
