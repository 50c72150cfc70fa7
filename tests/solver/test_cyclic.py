"""The cyclic engine: patterns, what they unroll to, and the engine as a whole; windows of what it finds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from optpipe.lift import lift
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.records import Device, Stage
from optpipe.process.protocol import Bound, Frame, Incumbent, Programs, Ready, Request
from optpipe.prune import prune
from optpipe.schedule import Schedule, certify, check
from optpipe_solver import cyclic
from optpipe_solver.budget import Budget
from optpipe_solver.cpsat.grid import Grid
from optpipe_solver.cpsat.grid_schedule import is_expressible, place_on_grid, split_dispensable
from optpipe_solver.cpsat.model import Starts, WindowModel
from optpipe_solver.cpsat.variables import Window
from optpipe_solver.cyclic.pattern import Pattern, PatternModel, least_period, sequential_period
from optpipe_solver.cyclic.unroll import unroll
from optpipe_solver.lns.improve import improvements

GB = 10**9


def pipeline(devices: int, microbatches: int, memory: float, p2p: float = 1.0, **stage: float) -> Problem:
    """F 10, B 10, W 8, activations of 5 GB that take 12 ms each way."""
    costs = {
        "forward_ms": 10.0,
        "backward_input_ms": 10.0,
        "backward_weight_ms": 8.0,
        "activation_bytes": 5 * GB,
        "saved_for_weight_bytes": 2 * GB,
        "offload_ms": 12.0,
        "reload_ms": 12.0,
        "offload_bytes": 5 * GB,
    }
    return Problem.from_dict(
        {
            "microbatches": microbatches,
            "p2p_ms": p2p,
            "devices": [{"activation_budget_bytes": int(memory * GB)}] * devices,
            "stages": [{"device": d, **costs, **stage} for d in range(devices)],
        }
    )


@st.composite
def problems(draw: st.DrawFn, least_ms: int = 0) -> Problem:
    """Small ones of every sort: chunks, looped and V-shaped, uneven, in parts, recompute, full duplex, shared links,
    greater weight gradients."""
    devices = draw(st.integers(1, 3))
    chunks = draw(st.integers(1, 2))
    v_shape = draw(st.booleans())
    shared, odd = draw(st.booleans()), draw(st.sampled_from([1.0, 1.15, 1 / 3]))
    stages = []
    for s in range(devices * chunks):
        turn, place = divmod(s, devices)
        offload = draw(st.sampled_from([None, 1, 2, 3]))
        recompute = draw(st.booleans())
        activation = draw(st.integers(1, 6))
        stages.append(
            Stage(
                device=devices - 1 - place if v_shape and turn % 2 else place,
                forward_ms=odd * draw(st.integers(least_ms, 6)),
                backward_input_ms=odd * draw(st.integers(1, 6)),
                backward_weight_ms=float(draw(st.integers(least_ms, 6))),
                activation_bytes=activation,
                saved_for_weight_bytes=draw(st.integers(0, activation + 2)),
                offload_ms=None if offload is None else float(draw(st.integers(0, 9))),
                reload_ms=None if offload is None else float(draw(st.integers(1, 9))),
                offload_bytes=None if offload is None else draw(st.integers(0, activation)),
                offload_parts=offload or 1,
                recompute_ms=float(draw(st.integers(least_ms, 6))) if recompute else None,
                checkpoint_bytes=draw(st.integers(0, activation)) if recompute else None,
            )
        )
    least = max(
        sum(max(s.activation_bytes, s.saved_for_weight_bytes) for s in stages if s.device == d) for d in range(devices)
    )
    memory = least + draw(st.integers(0, 8))
    return Problem(
        microbatches=draw(st.integers(2, 5)),
        p2p_ms=draw(st.sampled_from([0.0, 0.5, 2.0])),
        transfer_mode=draw(st.sampled_from(["half_duplex", "full_duplex"])),
        devices=tuple(Device(activation_budget_bytes=memory, link="pcie0" if shared else None) for _ in range(devices)),
        stages=tuple(stages),
    )


def solve(grid: Grid, K: int, T: int, seconds: float = 60.0) -> Pattern | None:
    return PatternModel(grid, K, T).solve(Budget(seconds, 1), 0).pattern


def answers(problem: Problem, seconds: float, engine: ModuleType = cyclic, **request: object) -> list[Frame]:
    frames: list[Frame] = []
    engine.ENGINE.run(Request.model_validate({"problem": problem, "time_limit_s": seconds, **request}), frames.append)
    return frames


def best(problem: Problem, frames: list[Frame]) -> Schedule:
    return [frame.schedule.schedule(problem, frame.method) for frame in frames if isinstance(frame, Incumbent)][-1]


def test_eight_devices_with_memory_for_three_lose_no_time_in_the_steady_state() -> None:
    grid = Grid.of(pipeline(8, 16, memory=15))
    outcome = PatternModel(grid, 1, least_period(grid, 1)).solve(Budget(60.0, 2), 0)
    assert outcome.pattern is not None
    assert outcome.proven
    assert (grid.ms(outcome.pattern.period), grid.ms(outcome.pattern.latency)) == (28.0, 224.0)
    schedule = unroll(grid, outcome.pattern, "cyclic")
    assert check(grid.problem, schedule) == []
    assert schedule.makespan_ms <= 224.0 + 15 * 28.0


def test_without_offload_memory_sets_the_period() -> None:
    """Memory for one: device 0 runs F 10, waits for F and B of device 1, 20, then B 10 and W 8, which frees the last of
    it."""
    alone = pipeline(2, 8, memory=5, p2p=0.0, offload_ms=None, reload_ms=None, offload_bytes=None)
    grid = Grid.of(alone)
    assert solve(grid, 1, round(46 / grid.tick)) is None
    pattern = solve(grid, 1, round(48 / grid.tick))
    assert pattern is not None
    assert grid.ms(pattern.latency) == 48.0


def test_recompute_shortens_the_period() -> None:
    """Memory for one activation and checkpoints: device 0 runs F 10, B 10, W 8 and C 10 again and again, instead of
    waiting for device 1 with its memory full."""
    again = pipeline(2, 8, memory=6.5, p2p=0.0, offload_ms=None, reload_ms=None, offload_bytes=None, recompute_ms=10.0,
                     checkpoint_bytes=5 * GB // 10)  # fmt: skip
    grid = Grid.of(again)
    assert solve(grid, 1, round(37 / grid.tick)) is None
    pattern = solve(grid, 1, round(38 / grid.tick))
    assert pattern is not None
    assert Op(Kind.C, 0, 0) in pattern.starts
    assert check(again, unroll(grid, pattern, "cyclic")) == []


@pytest.mark.parametrize(("parts", "period"), [(1, 76), (4, 50)])
def test_slow_links_need_parts(parts: int, period: int) -> None:
    slow = pipeline(
        8,
        16,
        38,
        forward_ms=12.0,
        backward_input_ms=12.0,
        backward_weight_ms=11.0,
        activation_bytes=10 * GB,
        saved_for_weight_bytes=4 * GB,
        offload_bytes=10 * GB,
        offload_ms=40.0,
        reload_ms=40.0,
        offload_parts=parts,
    )
    grid = Grid.of(slow)
    assert solve(grid, 1, round((period - 1) / grid.tick)) is None
    assert solve(grid, 1, round(period / grid.tick)) is not None


@settings(max_examples=examples(25), deadline=None)
@given(problems(), st.integers(1, 2))
def test_a_pattern_unrolled_is_valid_and_no_later_than_the_circle_says(problem: Problem, K: int) -> None:
    grid = Grid.of(problem)
    T = sequential_period(grid, K)
    pattern = next(
        filter(None, (solve(grid, K, t, 0.15) for t in (least_period(grid, K), (least_period(grid, K) + T) // 2, T))),
        None,
    )
    if pattern is None:
        return
    schedule = unroll(grid, pattern, "cyclic")
    assert check(problem, schedule) == []
    assert schedule.makespan_ms <= grid.ms(pattern.latency + (problem.microbatches - 1) // K * pattern.period) + 1e-6
    pruned = prune(schedule)
    assert check(problem, pruned) == []
    assert pruned.makespan_ms <= schedule.makespan_ms + 1e-9


def finish(grid: Grid, starts: Starts) -> Schedule:
    return prune(lift(grid.problem, grid.starts_ms(starts)))


def level(grid: Grid, pattern: Pattern, device: int) -> int:
    """The most grains that the pattern needs on a device in its steady state: counted op by op over many periods."""
    problem, T, K = grid.problem, pattern.period, pattern.microbatches
    periods = 4 + 2 * max(pattern.starts.values()) // T
    many = problem.model_copy(update={"microbatches": K * periods})
    return certify(many, unroll(Grid(many, grid.tick, grid.exact), pattern, "cyclic")).device[device].bytes


@settings(max_examples=examples(25), deadline=None)
@given(problems(least_ms=1))
def test_memory_on_the_circle_is_that_of_a_long_run(problem: Problem) -> None:
    """With the memory that a long run needs, the pattern's period can be had; with a byte less, this pattern's starts
    cannot."""
    grid = Grid.of(problem)
    T = sequential_period(grid, 1)
    pattern = solve(grid, 1, T, 0.3)
    if pattern is None:
        return
    for d in range(len(problem.devices)):
        needed = level(grid, pattern, d)
        for memory, possible in ((needed, True), (needed - 1, False)):
            devices = tuple(
                device.model_copy(update={"activation_budget_bytes": memory if e == d else 1000})
                for e, device in enumerate(problem.devices)
            )
            model = PatternModel(Grid(problem.model_copy(update={"devices": devices}), grid.tick, grid.exact), 1, T)
            for op, at in pattern.starts.items():
                model.model.add(model.start[op] == at)
            for (s, k, p), leaves in model.offloaded.items():
                model.model.add(leaves == (Op(Kind.O, s, k, p) in pattern.starts))
            for (s, k), again in model.recomputed.items():
                model.model.add(again == (Op(Kind.C, s, k) in pattern.starts))
            assert (model.solve(Budget(60.0, 1), 0).pattern is not None) == possible


@settings(max_examples=examples(15), deadline=None)
@given(problems())
def test_every_schedule_emitted_holds_and_beats_the_one_before(problem: Problem) -> None:
    frames = answers(problem, 0.4)
    schedules = [frame.schedule.schedule(problem, frame.method) for frame in frames if isinstance(frame, Incumbent)]
    assert all(check(problem, schedule) == [] for schedule in schedules)
    assert [s.makespan_ms for s in schedules] == sorted((s.makespan_ms for s in schedules), reverse=True)
    bounds = [frame.lower_bound_ms for frame in frames if isinstance(frame, Bound)]
    assert all(bound <= schedule.makespan_ms + 1e-6 for bound, schedule in product(bounds, schedules))


@settings(max_examples=examples(25), deadline=None)
@given(problems(), st.data())
def test_a_window_keeps_what_is_outside_and_never_gets_longer(problem: Problem, data: st.DataObject) -> None:
    grid = Grid.of(problem)
    pattern = solve(grid, 1, sequential_period(grid, 1), 0.15)
    if pattern is None:
        return
    schedule = prune(unroll(grid, pattern, "cyclic"))
    known = place_on_grid(grid, schedule)
    begin = data.draw(st.integers(0, known.end))
    window = Window(begin, data.draw(st.integers(begin, known.end + 1)))
    answer = WindowModel(grid, known, window, "stages").solve(Budget(0.15, 1), 0)
    if answer.starts is None:
        assert not answer.proven  # the incumbent itself is a solution
        return
    assert answer.value <= known.end
    assert all(answer.starts[x] == at for x, at in known.start.items() if at < begin and x.kind != Kind.D)
    better = finish(grid, answer.starts)
    assert check(problem, better) == []
    assert better.makespan_ms <= grid.ms(answer.value) + 1e-6


def test_small_windows_lead_to_the_optimum_of_the_whole() -> None:
    grid = Grid.of(pipeline(2, 4, memory=15))
    pattern = solve(grid, 1, sequential_period(grid, 1))
    assert pattern is not None
    schedule = unroll(grid, pattern, "cyclic")
    known = place_on_grid(grid, schedule)
    whole = WindowModel(grid, known, Window.of_all(known), "entry").solve(Budget(30.0, 1), 0)
    assert whole.proven
    assert whole.starts
    # F, p2p, F, B, p2p, and on device 0 four times F + B + W = 28 with the first B after 10 + 1 + 20 + 1: nothing can
    # be shorter
    *_, last = schedule, *improvements(grid, schedule, Budget(60.0, 2), 0)  # the pattern may be the optimum already
    assert finish(grid, whole.starts).makespan_ms == grid.ms(whole.bound) == last.makespan_ms


def test_the_optimum_is_that_of_trying_every_order() -> None:
    """One device, two micro-batches, memory for one activation and a transfer's worth of gain: brute force over all
    programs."""
    problem = pipeline(1, 2, memory=7, offload_ms=3.0, reload_ms=2.0)
    found = min(s.makespan_ms for s in every_schedule(problem))
    frames = answers(problem, 30.0)  # it ends by itself
    assert best(problem, frames).makespan_ms == found


def every_schedule(problem: Problem) -> Iterator[Schedule]:
    """Of one device and two micro-batches: each one's ops in order, with offload or without, and every way to merge the
    two lists."""
    for leaving in product(["", "ODR"], repeat=2):
        mine, other = ([f"0{kind}{j}" for kind in f"F{way}BW"] for j, way in enumerate(leaving))
        for places in combinations(range(len(mine) + len(other)), len(mine)):
            first, second = iter(mine), iter(other)
            program = [next(first if i in places else second) for i in range(len(mine) + len(other))]
            schedule = Schedule.parse(problem, [program])
            if not check(problem, schedule):
                yield schedule


def test_a_warm_start_is_what_is_to_be_beaten() -> None:
    problem = pipeline(2, 4, memory=15)
    first = best(problem, answers(problem, 30.0))  # it ends by itself, with the optimum
    assert not any(isinstance(frame, Incumbent) for frame in answers(problem, 2.0, warm_start=Programs.of(first)))


def test_fused_backwards_are_taken_apart() -> None:
    problem = pipeline(1, 2, memory=15)
    fused = Schedule.parse(problem, [["0F0", "0BW0", "0F1", "0BW1"]])
    assert not is_expressible(fused)
    apart = split_dispensable(fused)
    assert is_expressible(apart)
    assert check(problem, apart) == []
    assert apart.programs[0].texts() == ["0F0", "0B0", "0W0", "0F1", "0B1", "0W1"]


def test_where_memory_admits_nothing_it_ends_without_a_word() -> None:
    assert answers(pipeline(2, 4, memory=4), 5.0) == [Ready()]


def test_one_route_only() -> None:
    def unsupported(problem: Problem) -> str | None:
        return cyclic.ENGINE.unsupported(problem, alone=True)

    assert unsupported(pipeline(2, 4, memory=15)) is None
    assert unsupported(pipeline(2, 1, memory=15)) == "there are too few micro-batches to repeat"
    both_ways = Problem.from_dict(
        {**pipeline(2, 2, memory=15).to_dict(), "routes": [[0, 1], [1, 0]], "microbatch_routes": [0, 1]}
    )
    assert unsupported(both_ways) == "the micro-batches take several routes, so they do not repeat"


def test_many_micro_batches_are_made_of_few() -> None:
    """What is found for so few that a period stands in the middle holds for all, a period each longer."""
    problem = pipeline(4, 40, memory=15)
    frames = answers(problem, 3.0)
    schedules = [frame.schedule.schedule(problem, frame.method) for frame in frames if isinstance(frame, Incumbent)]
    assert len(schedules) > 1
    assert all(check(problem, schedule) == [] for schedule in schedules)
    assert schedules[-1].makespan_ms < schedules[0].makespan_ms
