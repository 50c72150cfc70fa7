"""What a rank runs: messages match pair by pair, no rank waits for ever, and a schedule that cannot run here is
refused."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.oracles.channels import run_by_hand
from support.oracles.dependence import premature
from support.problems.published import published
from support.problems.strategies import problems_with_schedules, schedules
from support.ranks import cases
from support.ranks.programs import V_SHAPED, programs

from optpipe.errors import ScheduleError
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime.lowering.plan import Action, Plan
from optpipe_runtime.lowering.prepare import prepare, require_kinds
from optpipe_runtime.ranks.layout import Layout

PLACEMENTS = [[0, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 1, 2], [0, 1, 2, 2, 1, 0], [1, 0]]


def plans_of(schedule: Schedule) -> list[Plan]:
    problem = schedule.problem
    return [prepare(schedule, rank, Layout.from_problem(problem)) for rank in range(len(problem.devices))]


@settings(max_examples=examples(100))
@given(problems_with_schedules(beyond=True))
def test_messages_match_and_no_receive_waits_for_a_later_own_op(drawn: tuple[Problem, Schedule]) -> None:
    """With routes, shared links, evictions, optimizers on the host, and ops that take no time. An evaluation also
    where hosts wait for their whole device."""
    _, schedule = drawn
    plans = plans_of(schedule)
    assert premature(schedule, plans) == []
    run_by_hand(plans)
    run_by_hand([replace(plan, actions=plan.forwards) for plan in plans], devices_wait=True)


@settings(max_examples=examples(100))
@given(st.data(), st.sampled_from(PLACEMENTS), st.integers(1, 4))
def test_no_gather_waits_for_ever_whatever_replicas_run(data: Any, placement: list[int], microbatches: int) -> None:
    """Two replicas with schedules of their own, on hosts that wait for their whole device before every op."""
    problem = cases.problem(placement, microbatches)
    ours, theirs = (plans_of(data.draw(schedules(problem))) for _ in range(2))
    run_by_hand(ours, devices_wait=True, replica=theirs)
    for plan in ours:
        own = [s for s, rank in enumerate(placement) if rank == plan.rank]
        assert [s for action in plan.actions for s in action.gathers] == own


def test_gathers_of_two_routes_begin_with_the_step() -> None:
    """One replica begins with the one route, the other with the other one. Gathers before the first forwards would
    wait in a circle."""
    problem = cases.problem([0, 1, 0, 1], 2).replace(routes=[[0, 1], [3, 2]], microbatch_routes=[0, 1])
    first, second = ("0F0 0BW0", "1F0 1BW0"), ("2F1 2BW1", "3F1 3BW1")
    one, other = (
        plans_of(Schedule.parse(problem, [f"{a[k]} {b[k]}".split() for k in range(2)]))
        for a, b in ((first, second), (second, first))
    )
    run_by_hand(one, devices_wait=True, replica=other)
    late = [replace(plan, actions=tuple(_gathered_when_needed(plan))) for plan in one]
    with pytest.raises(AssertionError, match="gather in other orders"):
        run_by_hand(late, replica=[replace(plan, actions=tuple(_gathered_when_needed(plan))) for plan in other])


def _gathered_when_needed(plan: Plan) -> Iterator[Action]:
    seen: set[int] = set()
    for action in plan.actions:
        new = {action.op.stage} - seen if action.op.kind == Kind.F else set()
        seen |= new
        yield action._replace(gathers=tuple(new))


def test_a_stage_is_gathered_where_its_first_input_is_expected() -> None:
    """In a step all are whole in the end. In an evaluation a stage goes behind its last forward."""
    schedule = Schedule.parse(cases.problem([0, 1, 1, 0], 3), V_SHAPED)
    first, last = plans_of(schedule)
    begins = {s: str(action.op) for plan in (first, last) for action in plan.actions for s in action.gathers}
    assert begins == {0: "0F0", 1: "1F0", 2: "2F0", 3: "3F0"}
    assert first.gathered_peak(lambda s: 10 + s, lambda s: 100) == 10 + 13 + 200
    problem = cases.problem([0, 1, 1, 0], 2)
    one_by_one = programs("0F0 0F1 3F0 3F1 3BW0 3BW1 0BW0 0BW1", "1F0 1F1 2F0 2F1 2BW0 2BW1 1BW0 1BW1")
    evaluated = plans_of(Schedule.parse(problem, one_by_one))[0]
    assert evaluated.gathered_peak(lambda s: 10 + s, lambda s: 100, evaluating=True) == 13


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, (8, 9, 12)), (6, (6, 7, 12))])
def test_no_receive_of_a_published_schedule_waits_for_a_later_own_op(ranks: int, microbatches: tuple[int, ...]) -> None:
    for case in published(ranks, microbatches):
        plans = plans_of(case.schedule)
        assert premature(case.schedule, plans) == [], case.name
        run_by_hand(plans, devices_wait=True)
        assert max(run_by_hand(plans).values()) <= 8, case.name


def test_a_message_is_expected_while_another_op_runs() -> None:
    """The receive is posted before the op beside which the message is made, not when it is needed."""
    problem = cases.problem([0, 1], 6)
    forwards = [f"0F{j}" for j in range(6)]
    programs = [forwards + [f"0BW{j}" for j in range(6)], [f"1{kind}{j}" for j in range(6) for kind in ("F", "BW")]]
    plans = plans_of(Schedule.parse(problem, programs))
    posted = [[message.microbatch for message, _ in action.post] for action in plans[1].actions]
    assert posted[:5] == [[0, 1], [2, 3], [4], [5], []]
    assert run_by_hand(plans) == {0: 2, 1: 4}
    assert plans[1].message_peak(lambda message: 1) == 6, "four receives, and two sends"


@pytest.mark.parametrize("backward", ["0BW0", "0B0 0W0"])
def test_the_peak_of_host_memory_is_counted(backward: str) -> None:
    problem = cases.problem([0], 2, offload_parts=2)
    texts = programs(f"0F0 0O0 0O0.1 0D0 0D0.1 0F1 0O1 0D1 0R0 0R0.1 {backward} 0O1.1 0D1.1 0R1 0R1.1 0BW1")
    plan = prepare(Schedule.parse(problem, texts), 0, Layout.from_problem(problem))
    assert plan.host_peak(lambda stage, microbatch, part: (10, 1)[part]) == 21, "both of part 0, one of part 1"


FINE = [["0F0", "0BW0"], ["1F0", "1BW0"]]


@pytest.mark.parametrize(
    ("programs", "placement", "microbatches", "sentence"),
    [
        (FINE, [1, 0], 1, r"places its stages on devices \[0, 1\], this pipeline on \[1, 0\]"),
        (FINE, [0, 1], 2, "is for 1 micro-batches, this pipeline runs 2"),
        ([["0F0", "0BW0"], ["1F0"]], [0, 1], 1, "stage 1, micro-batch 0 has no backward"),
        ([["0F0", "0BW0"], ["1F0", "1O0", "1D0", "1BW0"]], [0, 1], 1, "1O0 has no 1R0"),
    ],
)
def test_a_schedule_that_cannot_run_here_is_refused(
    programs: Any, placement: list[int], microbatches: int, sentence: str
) -> None:
    schedule = Schedule.parse(cases.problem([0, 1], 1), programs)
    with pytest.raises(ScheduleError, match=sentence):
        prepare(schedule, 0, Layout.make(placement, microbatches))


def test_a_schedule_must_fit_the_measured_problem() -> None:
    schedule = Schedule.parse(cases.problem([0, 1], 1), FINE)
    larger = cases.problem([0, 1], 1, activation_bytes=10**10)
    with pytest.raises(ScheduleError, match="device 0 needs 10 GB during 0F0 and has 1 GB"):
        prepare(schedule, 0, Layout.make([0, 1], 1), larger)


def test_an_op_that_the_executor_has_no_code_for_is_refused() -> None:
    schedule = Schedule.parse(cases.problem([0, 1], 1), [["0F0", "0BW0"], ["1F0", "1C0", "1BW0"]])
    with pytest.raises(ScheduleError, match=r"^1C0 in the program of device 1: this executor runs F, BW, not C$"):
        require_kinds(schedule, (Kind.F, Kind.BW))
