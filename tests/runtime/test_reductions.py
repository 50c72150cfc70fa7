"""Gradients are reduced over the replicas while backwards run, and come out as if that had been done after the step."""

from __future__ import annotations

import numpy as np
import pytest
from support.close import require_close
from support.ranks import cases, reductions
from support.ranks.cases import Gradients
from support.ranks.programs import V_SHAPED, programs
from support.ranks.reductions import Ran, Turn
from support.ranks.worker import Ranks

from optpipe.schedule import Schedule

# The deeper stage of each rank is complete last.
LATE = programs(
    "0F0 0F1 0O1 3F0 0D1 3B0 0F2 3F1 3W0 3B1 0B0 0R1 3W1 3F2 0W0 0B1 3B2 0W1 0BW2 3W2",
    "1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2W0 2B1 1W0 1B1 2W1 1W1 2B2 1BW2 2W2",
)


# Each rank's last backward waits for the reduction of its deeper stage.
ENDED, STARTS = ([("0B2", f"{event} 3"), ("1B2", f"{event} 2")] for event in ("ended", "starts"))


def schedules(*programs: list[list[str]]) -> list[Schedule]:
    problem = cases.problem([0, 1, 1, 0], 3)
    return [Schedule.parse(problem, program) for program in programs]


def before_the_last_op(ran: Ran, step: int) -> list[int]:
    """The stages whose reductions start before it."""
    last = max(place for place, event in enumerate(ran.events[step]) if " " not in event)
    return ran._replace(events=[ran.events[step][:last]]).reduced(0)


def require_steps(results: list[Ran], expected: list[Gradients]) -> None:
    """On both replicas the gradients of each step."""
    for first, last in (results[:2], results[2:]):
        for step, plain in enumerate(expected):
            require_close(first.gradients[step] | last.gradients[step], plain)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_reduction_ends_before_the_last_op_of_the_step(four_ranks: Ranks, how: str) -> None:
    """The last op waits for it: would it start at the end, this never ended. In the first step by a schedule, which may
    have to be undone, it does."""
    turns = [Turn(load=0), Turn(awaits=ENDED), Turn(awaits=ENDED)]
    results = four_ranks(reductions.trained, schedules=[schedules(V_SHAPED)] * 2, turns=turns, how=how)
    for rank, ran in enumerate(results):
        deeper, shallower = 3 - rank % 2, rank % 2
        for step in range(3):
            assert ran.reduced(step) == [deeper, shallower]
        assert not before_the_last_op(ran, 0)
    assert all(before_the_last_op(ran, step) == ran.reduced(step)[:1] for ran in results[:2] for step in (1, 2))
    require_steps(results, cases.plain(4, 6, 3)[1])


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_replicas_start_in_one_order_whatever_they_run(four_ranks: Ranks, how: str) -> None:
    """On the second replica the deeper stage is complete last; the other stage waits for its turn."""
    turns, own = [Turn(load=0), Turn(awaits=STARTS)], [schedules(V_SHAPED), schedules(LATE)]
    results = four_ranks(reductions.trained, schedules=own, turns=turns, how=how)
    for rank, ran in enumerate(results):
        assert ran.reduced(1) == [3 - rank % 2, rank % 2]
    for rank in (2, 3):
        assert not before_the_last_op(results[rank], 1)
        np.testing.assert_equal(results[rank].parameters, results[rank - 2].parameters)
    _, expected = cases.plain(4, 6, 2)
    require_close(results[0].gradients[1] | results[1].gradients[1], expected[1])


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_whatever_happens_the_numbers_are_those_of_reductions_after_the_step(four_ranks: Ranks, how: str) -> None:
    """With a tie, clipping, a swap, a schedule that runs out of memory on one replica, and one whose batch changes its
    shape, so that a step that has begun is undone there and not on the other."""
    turns = [
        Turn(load=0),
        Turn(awaits=STARTS),
        Turn(length=cases.LENGTH // 2),
        Turn(length=cases.LENGTH // 2, awaits=STARTS),
        Turn(),
        Turn(load=1, memory=True),
        Turn(awaits=STARTS),
        Turn(load=1),
        Turn(),
    ]
    own = [schedules(V_SHAPED, LATE), schedules(LATE, V_SHAPED)]
    found, late = (
        four_ranks(reductions.trained, schedules=own, turns=turns, how=how, late=late, max_norm=0.5, tied=True)
        for late in (False, True)
    )
    for rank, (ran, expected) in enumerate(zip(found, late, strict=True)):
        assert ran.losses == expected.losses
        assert ran.norms == expected.norms
        assert ran.versions == expected.versions == ([1] * 5 + [3, 3, 4, 4] if rank < 2 else [1] * 5 + [2, 2, 3, 3])
        np.testing.assert_equal(ran.gradients, expected.gradients)
        np.testing.assert_equal(ran.parameters, expected.parameters)
        assert not any(before_the_last_op(expected, step) for step in range(len(turns)))
        assert all(len(ran.reduced(step)) == 2 for step in range(len(turns))), "an undone run reduces nothing"
    assert all(before_the_last_op(ran, step) for ran in found[:2] for step in (1, 3, 6))


def test_a_shared_parameter_is_reduced_when_all_its_stages_are_complete(four_ranks: Ranks) -> None:
    turns = [Turn(load=0), Turn(), Turn()]
    results = four_ranks(reductions.trained, schedules=[schedules(V_SHAPED)] * 2, turns=turns, how="ddp", shared=True)
    assert not any(before_the_last_op(results[first], step) for first in (0, 2) for step in range(3))
    require_steps(results, reductions.plain_shared(6, 3))


def whole_bytes(s: int) -> int:
    return sum(parameter.nbytes for parameter in cases.make_stages(4)[s].parameters())


@pytest.mark.parametrize("own", [[V_SHAPED, V_SHAPED], [V_SHAPED, LATE]])
def test_a_stage_is_gathered_before_its_own_first_forward(four_ranks: Ranks, own: list[list[list[str]]]) -> None:
    """And not when the step begins, unless that was where its stages were learned. What is held is certified."""
    turns = [Turn(load=0), Turn(), Turn()]
    results = four_ranks(
        reductions.trained, schedules=[schedules(own[0]), schedules(own[1])], turns=turns, how="fsdp", trace=True
    )
    for rank, ran in enumerate(results):
        shallow, deep = rank % 2, 3 - rank % 2
        for step in (1, 2):
            events = ran.events[step]
            gathers = [event for event in events if event.startswith("gathers")]
            assert gathers == [f"gathers {shallow}", f"gathers {deep}"]
            assert events.index(f"{shallow}F0") < events.index(f"gathers {deep}") < events.index(f"{deep}F0")
            assert ran.held[step][f"{shallow}F0"] == whole_bytes(shallow)
            assert ran.held[step][f"{deep}F0"] == whole_bytes(shallow) + whole_bytes(deep)
        for peak, certified in ran.gathered:
            assert peak == certified == 2 * (whole_bytes(shallow) + whole_bytes(deep)), "with whole gradients"
    require_steps(results, cases.plain(4, 6, 3)[1])
