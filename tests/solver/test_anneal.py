"""The engine `anneal`: what it finds is valid and as long as it counted, and shorter than what it began with."""

import random
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from support.examples import examples
from support.frames import schedules
from support.problems import pipeline, stage, with_budgets
from support.problems.small import problems_of_every_sort, several_a_device
from support.problems.strategies import arranged

from optpipe.evaluate.jit import plain
from optpipe.evaluate.objective import length_ms
from optpipe.model.arrays import NONE, Table
from optpipe.model.ops import Kind
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.process.protocol import Frame, Programs, Ready, Request
from optpipe.schedule import Schedule, check
from optpipe_solver import anneal, systems
from optpipe_solver.anneal import Annealing
from optpipe_solver.clock import Clock
from optpipe_solver.cpsat.grid import split_dispensable
from optpipe_solver.heuristics import generate

PROBLEMS = st.one_of(
    several_a_device(),
    problems_of_every_sort(max_devices=4, max_stages=6, max_microbatches=6),
    problems_of_every_sort(max_devices=4, max_stages=6, max_microbatches=6, beyond=True),
)


def start_of(problem: Problem, method: str) -> Schedule:
    """A heuristic's schedule of a problem that the engine supports; other examples are passed over."""
    if anneal.unsupported(problem):
        reject()
    return split_dispensable(generate(method, problem))


@settings(max_examples=examples(60), deadline=None)
@given(problem=PROBLEMS, method=st.sampled_from(("naive", "adaoffload")), hot=st.sampled_from((0.0, 0.5, 50.0)))
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_what_it_finds_is_valid_and_as_long_as_counted(objective, problem: Problem, method: str, hot: float) -> None:
    """Chunks, routes, unlike micro-batches, what is recomputed; mostly only what starts after a move is timed anew."""
    start = start_of(problem, method)
    annealing = Annealing(start, objective, 0)
    assert annealing.best_ms == pytest.approx(length_ms(start, objective))
    for _ in range(4):
        annealing.go_on(hot, 200 * annealing.ops)
        best = annealing.best()
        assert check(problem, best) == []
        assert annealing.best_ms == pytest.approx(length_ms(best, objective))
        assert length_ms(best, objective) <= length_ms(start, objective) + 1e-6


def relieved_in_two_ways(number: int) -> Schedule:
    """A schedule at random of devices on which one stage's activations can leave and another's be recomputed, in the
    memory that it takes."""
    chance = random.Random(number)
    devices, microbatches = chance.choice([1, 1, 2]), chance.randint(2, 5)

    def ms(count: int) -> list[int]:
        return [chance.choice([1, 2, 3, 5, 8]) for _ in range(count)]

    def costs(d: int, leaves: bool) -> dict[str, Any]:
        held = chance.randint(4, 12)
        relief = {"recompute": (*ms(1), chance.randint(0, held // 3))}
        if leaves:
            relief = {"offload": (*ms(2), chance.randint(held // 2, held)), "offload_parts": chance.choice([1, 2])}
        return stage(ms(3), (held, chance.choice([0, held // 2])), **relief) | {"device": d}

    leaves = [chance.random() < 0.5 for _ in range(devices)]
    stages = [costs(d, leaves[d] != again) for again in (False, True) for d in range(devices)]
    mode = chance.choice(["half_duplex", "full_duplex"])
    problem = pipeline(devices, microbatches, 10**6, stages, transfer_mode=mode)
    start = split_dispensable(arranged(problem, chance.choice))
    return start.on(with_budgets(problem, [device.bytes for device in start.compiled.certificate.device]))


@settings(max_examples=examples(30), deadline=None)
@given(number=st.integers(0, 10**6), seed=st.integers(0, 99))
@example(number=4, seed=1)
@example(number=15, seed=1)
@example(number=46, seed=1)
def test_what_is_kept_again_moves_what_leaves(number: int, seed: int) -> None:
    """More is held from its forward on, so drops come forward, and reloads later, before what was recomputed: the order
    at hand is timed from there on."""
    start = relieved_in_two_ways(number)
    annealing = Annealing(start, "makespan", seed)
    for _ in range(250):
        annealing.go_on(50.0, 5 * annealing.ops)
        order = annealing._order[annealing._order != NONE]
        at_hand = Schedule.in_order(start.problem, annealing._table[order])
        assert check(start.problem, at_hand) == []
        assert annealing._lengths_ms[0] == pytest.approx(at_hand.makespan_ms)


@settings(max_examples=examples(16), deadline=None)
@given(problem=PROBLEMS, objective=st.sampled_from(("makespan", "span")))
def test_plain_loops_do_what_compiled_ones_do(problem: Problem, objective) -> None:
    both = [Annealing(start_of(problem, "naive"), objective, 1) for _ in range(2)]
    both[1]._anneal = plain(both[1]._anneal)
    for annealing in both:
        annealing.go_on(1.0, 30 * annealing.ops)
    assert both[0].best() == both[1].best()
    for one, other in zip(both[0]._room, both[1]._room, strict=True):
        np.testing.assert_array_equal(one, other)


def half_memory(devices: int, microbatches: int) -> Problem:
    """Zero-bubble's costs, in V-shaped chunks, with half of what 1F1B holds."""
    costs = stage((18.522, 18.086, 9.337), (60, 22))
    whole = pipeline(devices, microbatches, devices * 30, costs, p2p_ms=0.601)
    return Placement(chunks=2, shape="v").apply(whole)


@pytest.mark.parametrize("shape", [(1, 1, 100), (2, 8, 2)])
def test_tries_count_where_hardly_an_order_is_timed(shape: tuple[int, int, int]) -> None:
    """Nothing can move in F, B, W of one micro-batch, and little with memory for one; its time ends all the same."""
    annealing = Annealing(start_of(pipeline(*shape, stage((1, 1, 1), (2, 1))), "naive"), "makespan", 0)
    assert annealing.go_on(1.0, 10_000) > 5_000
    clock = Clock(0.01, counts=True, wall_s=inf)
    for _ in annealing.improvements(clock):
        pass
    assert 0.01 <= clock.spent_s < 1.0


def test_it_goes_far_below_the_search_over_building_blocks() -> None:
    """In a quarter of a second or so; bounds by one device alone are about 1320 ms."""
    start = systems.generate("v-auto", half_memory(8, 24))
    assert start.makespan_ms > 1570
    frames: list[Frame] = []
    asked = {"warm_start": Programs.from_schedule(start), "time_limit_s": 1.0, "seed": 1}
    spent_s = anneal.run(Request(problem=start.problem, method="anneal", **asked), frames.append)
    assert spent_s is not None
    assert 1.0 <= spent_s < 1.5
    assert isinstance(frames[0], Ready)
    *_, best = schedules(frames, start.problem)
    assert check(start.problem, best) == []
    assert best.makespan_ms < 0.95 * start.makespan_ms


def test_micro_batches_that_differ_enter_in_another_order() -> None:
    """Where two devices run one op each, Johnson's rule begins with the shortest, which is the last by its number."""
    first = {**stage((1, 0, 0), (1, 0)), "forward_ms": [8.0, 4.0, 2.0, 1.0]}
    problem = pipeline(2, 4, 100, [first, stage((6, 0, 0), (1, 0))])
    annealing = Annealing(start_of(problem, "naive"), "makespan", 0)
    annealing.go_on(1.0, 4000 * annealing.ops)
    assert annealing.best_ms == pytest.approx(1.0 + 4 * 6.0)


def test_micro_batches_that_differ_keep_a_fixed_order() -> None:
    first = {**stage((1, 0, 0), (1, 0)), "forward_ms": [8.0, 4.0, 2.0, 1.0]}
    problem = pipeline(2, 4, 100, [first, stage((6, 0, 0), (1, 0))], fixed_order=True)
    annealing = Annealing(start_of(problem, "naive"), "makespan", 0)
    annealing.go_on(1.0, 4000 * annealing.ops)
    assert check(problem, annealing.best()) == []
    assert annealing.best_ms == pytest.approx(8.0 + 4 * 6.0)


def test_without_a_warm_start_it_begins_with_a_heuristic() -> None:
    problem = half_memory(2, 4)
    frames: list[Frame] = []
    anneal.run(Request(problem=problem, method="anneal", time_limit_s=0.01), frames.append)
    assert schedules(frames, problem)


@pytest.mark.parametrize(("relief", "kind"), [({"offload": (3, 3, 20)}, Kind.O), ({"recompute": (2, 4)}, Kind.C)])
def test_what_stays_may_leave_or_be_recomputed(relief: dict[str, tuple[int, ...]], kind: Kind) -> None:
    """A device holds one activation, and the next one only once that has left, or as a checkpoint."""
    problem = pipeline(2, 6, 24, stage((10, 10, 10), (20, 4), **relief))
    start = start_of(problem, "naive")
    assert not start.compiled.rows.of_kinds(kind).any()
    annealing = Annealing(start, "makespan", 0)
    annealing.go_on(10.0, 2000 * annealing.ops)
    best = annealing.best()
    assert check(problem, best) == []
    assert best.compiled.rows.of_kinds(kind).any()
    assert best.makespan_ms < 0.9 * start.makespan_ms


def test_what_leaves_may_stay() -> None:
    """There is memory for everything, and the link is slow."""
    costs = stage((10, 10, 10), (20, 4), offload=(40, 40, 20))
    start = start_of(pipeline(2, 4, 200, costs), "naive")
    leaving = Schedule.in_order(start.problem, with_transfers(start.compiled.rows.table))
    assert check(start.problem, leaving) == []
    annealing = Annealing(leaving, "makespan", 0)
    annealing.go_on(10.0, 4000 * annealing.ops)
    assert not annealing.best().compiled.rows.of_kinds(Kind.O).any()
    assert annealing.best_ms < start.makespan_ms < leaving.makespan_ms


def test_what_is_recomputed_may_be_kept() -> None:
    problem = pipeline(2, 4, 200, stage((10, 10, 10), (20, 4), recompute=(8, 4)))
    start = split_dispensable(systems.generate("1f1b-recompute", problem))
    assert start.compiled.rows.of_kinds(Kind.C).any()
    annealing = Annealing(start, "makespan", 0)
    annealing.go_on(10.0, 4000 * annealing.ops)
    assert check(problem, annealing.best()) == []
    assert not annealing.best().compiled.rows.of_kinds(Kind.C).any()


def with_transfers(table: Table) -> Table:
    """The rows of programs in which every activation leaves behind its forward and comes back before its backward."""
    ops = []
    for kind, *rest in table.tolist():
        ops += [(Kind.R, *rest)] if kind == Kind.B else []
        ops.append((kind, *rest))
        ops += [(Kind.O, *rest), (Kind.D, *rest)] if kind == Kind.F else []
    return np.array(ops, table.dtype)


def test_what_it_cannot_do_is_for_other_engines() -> None:
    moving = stage((1, 1, 1), (2, 1), offload=(1, 1, 2))
    elsewhere = "activations may go to peers, through shared links or to scarce host memory, which it does not do"
    assert anneal.unsupported(pipeline(2, 4, 100, moving)) is None
    assert anneal.unsupported(pipeline(2, 4, 100, moving, device={"link": "one"})) == elsewhere
    assert anneal.unsupported(pipeline(2, 4, 100, moving, device={"host_memory_bytes": 2})) == elsewhere
    nothing = pipeline(2, 4, 100, stage((0, 0, 0), (2, 1)))
    assert anneal.unsupported(nothing) == "nothing takes any time"
