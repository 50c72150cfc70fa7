"""Times: by hand, against an independent event clock, and what is refused."""

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from support.examples import examples
from support.oracles import clock
from support.problems import pipeline, stage
from support.problems.strategies import AMPLE, problems_with_schedules

from optpipe import DeadlockError, Op, Problem, Schedule, ScheduleError, check, simulate
from optpipe.evaluate import jit
from optpipe.evaluate import timeline as timeline_module
from optpipe.evaluate.jit import ENOUGH, LazyJit
from optpipe.model.ops import COMPUTE, MARKS


def chain(devices: int = 2, microbatches: int = 2, **fields: Any) -> Problem:
    costs = stage((3, 4, 2), (10, 4), offload=(5, 6, 8))
    return pipeline(devices, microbatches, AMPLE, costs, p2p_ms=1.0, **fields)


@given(problems_with_schedules(beyond=True))
def test_the_timeline_agrees_with_an_independent_event_clock(pair):
    problem, schedule = pair
    assert check(problem, schedule) == []
    seen = clock.run(
        problem,
        schedule,
        clock.nominal_ms(problem, schedule),
        lambda op: clock.nominal_message_ms(problem, op),
    )
    timeline = simulate(problem, schedule)
    ops = [op for program in schedule.programs for op in program.ops()]
    assert [seen.start[op] for op in ops] == pytest.approx(list(timeline.start))
    assert [seen.end[op] for op in ops] == pytest.approx(list(timeline.end))
    assert timeline.makespan_ms == pytest.approx(seen.makespan)
    lasting = [[op for op in program.ops() if op.kind not in MARKS] for program in schedule.programs]
    spans = [max(seen.end[op] for op in ops) - min(seen.start[op] for op in ops) for ops in lasting if ops]
    assert timeline.span_ms == pytest.approx(max(spans))
    items = [[item if isinstance(item, Op) else item.first for item in program] for program in schedule.programs]
    busy = [sum(seen.end[op] - seen.start[op] for op in ops if op.kind in COMPUTE) for ops in items]
    assert timeline.busy_ms() == pytest.approx([ms for ms, ops in zip(busy, lasting, strict=True) if ops])


@given(problems_with_schedules(beyond=True))
@settings(max_examples=examples(60))
def test_compiled_and_plain_loops_agree(pair):
    problem, schedule = pair
    plain = simulate(problem, schedule)
    loop = timeline_module._longest_path
    try:
        timeline_module._longest_path = _compiled
        compiled = simulate(problem, schedule)
    finally:
        timeline_module._longest_path = loop
    assert np.array_equal(plain.start, compiled.start)
    assert np.array_equal(plain.end, compiled.end)


_compiled = timeline_module.LazyJit(timeline_module.longest_path)
_compiled._work = 10**9


@given(problems_with_schedules(beyond=True))
@settings(max_examples=examples(60))
def test_in_the_order_by_ends_nothing_comes_before_what_it_waits_for(pair):
    _, schedule = pair
    compiled, end = schedule.compiled, schedule.timeline.end
    places, (waits, _) = compiled.places, compiled.waits
    assert sorted(places) == list(range(len(places)))
    assert (np.diff(end[np.argsort(places)]) >= 0).all()
    for row in np.flatnonzero(~compiled.rows.second):
        assert all(places[needed] < places[row] for needed in waits[row] if needed >= 0)
    first = compiled.rows.first
    assert (places[first] < places[first + 1]).all()


def test_without_numba_a_loop_runs_as_plain_python(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    loop = LazyJit(lambda x: x + 1)
    assert [loop(10**9, x) for x in (1, 2)] == [2, 3]


def test_a_loop_is_compiled_even_where_no_cache_can_be_written():
    here: dict[str, Any] = {}
    # A function without a file: numba finds no folder for its cache.
    exec("def twice(number):\n    return 2 * number", here)
    loop = LazyJit(here["twice"])
    assert loop(ENOUGH + 1, 21) == 42
    assert loop._compiled not in (None, here["twice"])


def test_threads_that_call_a_loop_together_compile_no_compiled_one(monkeypatch):
    """Another thread may come between any two stores: here a call follows each of them."""

    class Interrupted(LazyJit):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name != "_work" and "_work" in self.__dict__:
                assert self(0, 1) == 2

    def plain(x):
        return x + 1

    given_to_numba = []
    monkeypatch.setattr(jit, "compiled", lambda function: given_to_numba.append(function) or (lambda x: x + 1))
    assert Interrupted(plain)(ENOUGH + 1, 1) == 2
    assert given_to_numba == [plain]


def test_a_shared_link_is_one_queue():
    problem, shared = chain(4), chain(4, device={"link": "pcie0"})
    programs = [[f"{s}F0", f"{s}O0", f"{s}D0", f"{s}R0", f"{s}BW0", f"{s}F1", f"{s}BW1"] for s in range(4)]
    order = [f"{s}O0" for s in range(4)] + [f"{s}R0" for s in reversed(range(4))]
    alone = Schedule.parse(problem, programs).makespan_ms
    together = Schedule.parse(shared, programs, {"pcie0": order})
    assert check(shared, together) == []
    assert together.makespan_ms > alone
    for wrong, message in [
        ({}, "is missing"),
        ({"pcie0": order[:-1]}, "has 7 entries"),
        ({"pcie0": [*order[:-1], order[0]]}, "each to be named once"),
        ({"pcie0": [*order[:-1], "0O1"]}, "is in no program"),
        ({"pcie0": ["0R0", *order[:-1]]}, "stands before"),
        ({"pcie0": [*order[:-1], "0F0"]}, "is in no program"),
        ({"pcie0": order, "pcie1": []}, "no two devices share"),
    ]:
        assert any(message in text for text in check(shared, Schedule.parse(shared, programs, wrong))), message


def test_a_deadlock_is_shown_on_the_grid():
    programs = [["0F0", "0F1", "0BW1", "0BW0"], ["1F0", "1BW0", "1F1", "1BW1"]]
    assert check(chain(), Schedule.parse(chain(), programs)) == []
    programs[0] = ["0F0", "0BW0", "0F1", "0BW1"]
    programs[1] = ["1F0", "1F1", "1BW0", "1BW1"]
    with pytest.raises(DeadlockError) as caught:
        simulate(chain(), Schedule.parse(chain(), programs))
    cycle = caught.value.cycle
    assert set(cycle) == {Op.parse(text) for text in ("0BW0", "1BW0", "1F1", "0F1")}
    grid = str(caught.value).splitlines()
    assert grid[0].startswith("deadlock: ")
    assert "waits for" in grid[0]
    assert all(f"[{op}]" in str(caught.value) for op in cycle)
    assert "[0F0]" not in str(caught.value)
    assert sum(line.startswith("device") for line in grid) == 2


def deadlock(problem: Problem, programs: list[list[str]]) -> tuple[list[str], str]:
    """The cycle as texts, and the message."""
    with pytest.raises(DeadlockError) as caught:
        simulate(problem, Schedule.parse(problem, programs))
    return [str(item) for item in caught.value.cycle], str(caught.value)


def test_ops_that_only_queue_are_not_on_the_cycle():
    late_reload = [*(f"0F{j}" for j in range(99)), "0O0", "0D0", *(f"0BW{j}" for j in range(99)), "0R0"]
    cycle, message = deadlock(chain(1, 99), [late_reload])
    assert cycle == ["0BW0", "0R0", "0BW98"]
    assert all(f"[{op}]" in message for op in cycle)


def test_a_deadlock_of_pairs_names_the_pairs():
    programs = [["0F0", "0F1+0BW0", "0F2", "0BW1", "0BW2"], ["1F0", "1F1", "1F2+1BW0", "1BW1", "1BW2"]]
    cycle, message = deadlock(chain(2, 3, overlap_factor=0.9), programs)
    assert cycle == ["0F1+0BW0", "1F2+1BW0", "0F2"]
    assert all(f"[{op}]" in message for op in ("0F1", "0BW0", "1F2", "1BW0", "0F2"))


def test_a_cycle_over_many_devices_says_how_many_are_left_out():
    programs = [[f"{s}F0", f"{s}F1", f"{s}BW1", f"{s}BW0"] for s in range(64)]
    programs[0] = ["0F0", "0BW0", "0F1", "0BW1"]
    cycle, message = deadlock(chain(64), programs)
    assert len(cycle) == 128
    assert message.endswith("and 48 more devices")
    assert len(message) < 3000


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ([["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1BW1"]], "1BW1 in the program of device 1 has no forward"),
        ([["0F0", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]], "0BW1 in the program of device 0 has no forward"),
        ([["0F0", "1F0"], []], "1F0 in the program of device 0: the stage is on another device"),
        ([["2F0"], []], "2F0 in the program of device 0: there are 2 stages"),
        ([["0F2"], []], "0F2 in the program of device 0: there are 2 micro-batches"),
        ([["0F0", "0D0"], []], "0D0 in the program of device 0 has no offload"),
        ([["0F0", "0O0.1"], []], "0O0.1 in the program of device 0: the stage has fewer parts"),
        ([["0F0", "0C0"], []], "0C0 in the program of device 0: the stage has no recompute_ms and no levels"),
        ([["0F0+0BW1"], []], "ops run together only where the problem has overlap_factor"),
        ([[], [], ["0F0"]], "there is a program for device 2, but the problem has 2 devices"),
    ],
)
def test_programs_of_another_problem_are_refused(programs, message):
    with pytest.raises(ScheduleError, match=message.replace(".", r"\.").replace("+", r"\+")):
        simulate(chain(), Schedule.parse(chain(), programs))
