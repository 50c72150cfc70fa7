"""Large-neighbourhood search: where its windows lie, and what it makes of a schedule."""

from dataclasses import replace

import numpy as np
import pytest
from support.frames import schedules
from support.oracles.enumeration import problem_of, stage

from optpipe import Problem, Schedule, check
from optpipe.lift import lift
from optpipe.process.protocol import Frame, Programs, Request
from optpipe_solver import lns
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.clock import Clock
from optpipe_solver.cpsat.grid import Grid, is_expressible, place_on_grid, split_dispensable
from optpipe_solver.cpsat.model import WindowModel
from optpipe_solver.cpsat.variables import Window
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.lns.improve import FEWEST_OPS, FIRST_OPS, QUICK_S, Breadth, WindowChoice, choice_for, improvements
from optpipe_solver.schedule_facts import deliveries, tails
from optpipe_solver.systems import generate


def offloading(devices: int, microbatches: int) -> Problem:
    """F 5, B 5, W 4, an activation of 5 that takes 6 ms each way, and memory for three of them."""
    stages = [stage(d, (5, 5, 4), 5, 2, (6, 6, 5)) for d in range(devices)]
    return problem_of(stages, [15] * devices, microbatches, p2p_ms=0.5)


def naive(problem: Problem) -> Schedule:
    return split_dispensable(next(STREAMS["naive"](problem, "makespan")))


def found(problem: Problem, seconds: float, **asked: object) -> list[Schedule]:
    frames: list[Frame] = []
    lns.run(Request.model_validate({"problem": problem, "time_limit_s": seconds, **asked}), frames.append)
    return schedules(frames, problem)


def test_windows_of_any_schedule_make_it_shorter_and_shorter() -> None:
    problem = offloading(3, 4)
    each = found(problem, 20.0, warm_start=Programs.from_schedule(naive(problem)))
    assert all(check(problem, schedule) == [] for schedule in each)
    values = [schedule.makespan_ms for schedule in each]
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.7 * naive(problem).makespan_ms


def test_a_window_of_a_part_ends_no_search() -> None:
    problem = offloading(4, 12)
    each = improvements(WindowChoice(Grid.for_problem(problem)), naive(problem), Clock(60.0), threads=1, seed=0)
    assert next(each).makespan_ms > next(each).makespan_ms


def test_windows_minimize_the_span_where_it_is_asked_for() -> None:
    """From ZB-H1, which takes 94 ms. Windows that minimize the makespan end at 88."""
    problem = problem_of([stage(d, (5, 5, 4), 5, 2) for d in range(4)], [99] * 4, 5, p2p_ms=0.5)
    start = generate("zb-h1", problem)
    *_, last = found(problem, 20.0, objective="span", warm_start=Programs.from_schedule(start))
    assert last.span_ms == trivial_bound(problem, "span") == 87.0


@pytest.mark.parametrize("name", ["zb-h1", "gpipe", "zb-h2"])
def test_a_span_is_a_makespan_with_delivery_times(name: str) -> None:
    problem = problem_of([stage(d, (3, 5, 4), 5, 2) for d in range(4)], [99] * 4, 8, p2p_ms=0.5)
    schedule = generate(name, problem)
    delivery = deliveries(schedule, "span")
    assert delivery.max() == 4 * 3 - 3 + 3 * 0.5  # device 0 starts that long before device 3
    assert max(tails(schedule, delivery)) - delivery.max() == pytest.approx(schedule.span_ms)
    assert not deliveries(schedule, "makespan").any()


def test_fused_backwards_are_taken_apart() -> None:
    problem = problem_of([stage(0, (5, 5, 4), 5, 2)], [15], 2)
    fused = Schedule.parse(problem, [["0F0", "0BW0", "0F1", "0BW1"]])
    assert not is_expressible(fused)
    apart = split_dispensable(fused)
    assert is_expressible(apart)
    assert check(problem, apart) == []
    assert apart.programs[0].texts() == ["0F0", "0B0", "0W0", "0F1", "0B1", "0W1"]


def test_without_a_warm_start_it_begins_with_a_heuristic() -> None:
    problem = offloading(2, 3)
    assert found(problem, 5.0)[0].method in ("adaoffload", "naive")


def test_one_thread_finds_the_same_again() -> None:
    problem = offloading(4, 6)
    start, runs = Programs.from_schedule(naive(problem)), []
    for seed in (1, 1, 2):
        choice_for.cache_clear()
        runs.append(found(problem, 0.6, warm_start=start, seed=seed))
    first, again, other = ([Programs.from_schedule(schedule) for schedule in run] for run in runs)
    assert first == again != other


def test_a_run_goes_on_with_what_the_one_before_has_learnt() -> None:
    problem = offloading(4, 6)
    choice_for.cache_clear()
    found(problem, 0.6, warm_start=Programs.from_schedule(naive(problem)))
    learnt = [replace(breadth) for breadth in choice_for(problem).breadths]
    assert any(breadth.ops != FIRST_OPS for breadth in learnt)
    found(problem, 0.01, warm_start=Programs.from_schedule(naive(problem)))  # one window
    assert sum(a != b for a, b in zip(learnt, choice_for(problem).breadths, strict=True)) == 1


def test_a_window_is_around_a_time_at_which_a_free_device_is_idle() -> None:
    grid = Grid.for_problem(offloading(8, 6))
    schedule = naive(grid.problem)
    known, choice = place_on_grid(grid, schedule), WindowChoice(grid)
    seen = set()
    for _ in range(50):
        breadth, window = choice.window(known)
        devices = window.devices if window.devices is not None else frozenset(range(8))
        assert len(devices) == breadth.devices
        assert max(devices) - min(devices) == breadth.devices - 1
        inside = [
            x
            for x, at in known.start.items()
            if window.begin <= at < window.end and grid.problem.stages[x.stage].device in devices
        ]
        assert inside
        seen.add(breadth.devices)
    assert seen == {2, 4, 8}


def test_windows_grow_while_they_are_solved_at_once_and_shrink_where_they_are_not() -> None:
    breadth = Breadth(2, most_ops=100)
    for _ in range(20):
        breadth.learn(0.0, QUICK_S / 10, True, QUICK_S)
    assert breadth.ops == 100
    for _ in range(40):
        breadth.learn(0.0, QUICK_S, False, QUICK_S)
    assert breadth.ops == FEWEST_OPS
    breadth.learn(5.0, QUICK_S, True, QUICK_S)
    assert breadth.score > 0.0


def test_a_model_has_what_its_window_touches_however_long_the_schedule_is() -> None:
    def sizes(microbatches: int) -> tuple[int, int]:
        problem = offloading(4, microbatches)
        schedule = split_dispensable(next(STREAMS["adaoffload"](problem, "makespan")))
        grid, middle = Grid.for_problem(problem), schedule.makespan_ms / 2
        incumbent = place_on_grid(grid, schedule)
        begin = round(middle / float(grid.tick))
        model = WindowModel(grid, incumbent, Window(begin, begin + round(30 / float(grid.tick))), objective="ends")
        answer = model.solve(Clock(20.0, counts=True), 1, 0)
        assert answer.starts
        assert check(problem, lift(problem, grid.starts_ms(answer.starts))) == []
        return len(model.model.proto.variables), len(model.model.proto.constraints)

    assert np.array(sizes(120)) == pytest.approx(np.array(sizes(30)), rel=0.3)
