"""Levels of recomputation, offloads, evictions and optimizers on the host: their times, their memory, and the mistakes
that are found. What schedules do with them is tested wherever `support.problems.strategies` makes problems."""

from dataclasses import replace
from typing import Any

import pytest
from support.problems import parsed, pipeline, stage
from support.problems.chain import chain

from optpipe import DeadlockError, InputError, Kind, Op, Problem, ScheduleError, ScheduleFile, certify, check, simulate
from optpipe.lift import prune
from optpipe.model.placement import rechunk
from optpipe.reuse import repair

MOVED = {"offload_ms": 1.0, "reload_ms": 2.0, "offload_bytes": 6}
CHEAP: dict[str, Any] = {"name": "cheap", "recompute_ms": 0.5, "checkpoint_bytes": 7} | MOVED
FULL: dict[str, Any] = {"name": "full", "recompute_ms": 3.0, "checkpoint_bytes": 1}
TIMES = (2, 2, 1)
EVICTING = stage(TIMES, evict=(1, 3, 8))
FIRST, SECOND = "0F0 0E0 0D0 0F1 0L0 0BW0 0BW1", "0A0 1F0 1BW0 1F1 0V0 1BW1"


def with_levels(levels: list[dict[str, Any]], **fields: Any) -> Problem:
    return pipeline(1, 2, 20, [stage((3, 3, 2), (10, 4), levels=levels, **fields)])


def pair(m: int = 2, first: dict[str, Any] = EVICTING) -> Problem:
    """Two stages on two devices; the first evicts to the second."""
    problem = pipeline(2, m, 100, stage(TIMES))
    devices = [problem.devices[0].model_copy(update={"peer": 1}), problem.devices[1]]
    return problem.replace(devices=devices, stages=[{"device": 0, **first}, problem.stages[1]])


def updating(count: int = 2, m: int = 1, **fields: Any) -> Problem:
    """So many stages in a row on one device."""
    return pipeline(1, m, 100, [stage(TIMES, device=0, update=(4, 6, 3), offload=(5, 5, 8))] * count, **fields)


LEVELS, PAIR, UPDATING = with_levels([CHEAP, FULL]), pair(), updating()
ONE_OF_THEM = "0E0: an activation is offloaded, evicted or recomputed, one of them"
ABLE = pair(first=stage(TIMES, evict=(1, 3, 8), offload=(1, 1, 8), recompute=(1, 1)))


@pytest.mark.parametrize(
    ("levels", "fields", "complaint"),
    [
        ([CHEAP, CHEAP], {}, r"levels\[1\]\.name = 'cheap': the levels of a stage have different names"),
        ([FULL | {"checkpoint_bytes": 11}], {}, r"levels\[0\]\.checkpoint_bytes = 11: must be at most activation_byte"),
        ([CHEAP | {"offload_bytes": 8}], {}, r"levels\[0\]\.offload_bytes = 8: must be at most checkpoint_bytes = 7"),
        (
            [FULL | {"offload_ms": 1.0}],
            {},
            r"levels\[0\]\.reload_ms is missing: a level with offload_ms needs reload_m",
        ),
        ([FULL], {"recompute": (1, 1)}, r"recompute_ms = 1.0: a stage with levels has the time of each of them there"),
        ([FULL | {"recompute_ms": [1.0]}], {}, r"levels\[0\]\.recompute_ms has 1 entries: one number, or one for each"),
        ([FULL], {"offload_parts": 2}, r"offload_parts = 2: only a stage with offload_ms"),
        ([], {}, r"levels"),
    ],
)
def test_what_is_wrong_with_levels_is_one_sentence(levels, fields, complaint) -> None:
    with pytest.raises(InputError, match=complaint):
        with_levels(levels, **fields)


def test_the_pair_of_fields_is_the_one_level_case() -> None:
    one, pair = with_levels([FULL]), pipeline(1, 2, 20, [stage((3, 3, 2), (10, 4), recompute=(3, 1))])
    assert one.stages[0].all_levels == pair.stages[0].all_levels
    assert "levels" not in pair.to_json()
    assert Problem.from_json(one.to_json()) == one
    lengths = {parsed(problem, "0F0 0F1 0C0 0BW0 0C1 0BW1").makespan_ms for problem in (one, pair)}
    assert lengths == {3 + 3 + 2 * (3 + 5)}


def test_a_level_has_its_own_time_checkpoint_and_offload() -> None:
    problem = with_levels([CHEAP | {"recompute_ms": [0.5, 0.25]}, FULL])
    schedule = parsed(problem, "0F0 0O0 0F1 0D0 0C1.1 0BW1 0R0 0C0 0BW0")
    assert check(problem, schedule) == []
    # F1 ends at 6, C1 and BW1 at 14; then the checkpoint comes back for 2 ms, and C0 takes half a ms.
    assert schedule.timeline.start[schedule.programs[0].ops().index(Op(Kind.C, 0, 0))] == 16.0
    assert schedule.makespan_ms == 16.0 + 0.5 + 5.0
    peaks = certify(problem, schedule)
    assert peaks.device[0].bytes == 7 + 10  # during F1, before the drop
    assert peaks.host[0].bytes == 6


def test_a_schedule_takes_the_last_level_and_the_parts_that_there_are() -> None:
    repaired = repair(with_levels([CHEAP]), parsed(LEVELS, "0F0 0C0.1 0BW0 0F1 0BW1"))
    assert repaired.programs[0].texts() == ["0F0", "0C0", "0BW0", "0F1", "0BW1"]
    whole, halves = (pipeline(1, 2, 16, stage(offload=(1, 1, 8), offload_parts=n)) for n in (1, 2))
    repaired = repair(whole, parsed(halves, "0F0 0O0 0O0.1 0D0 0D0.1 0F1 0BW1 0R0 0R0.1 0BW0"))
    assert repaired.programs[0].texts() == ["0F0", "0O0", "0D0", "0F1", "0BW1", "0R0", "0BW0"]


def test_an_offload_goes_where_memory_suffices_to_the_byte_without_it():
    problem = chain(memory=2)
    away = parsed(problem, "0F0 0O0 0D0 0F1 0R0 0BW0 0BW1", "1F0 1BW0 1F1 1BW1")
    assert prune(away).programs[0].texts() == ["0F0", "0F1", "0BW0", "0BW1"]
    less = problem.devices[0].model_copy(update={"activation_budget_bytes": 1999})
    tight = replace(away, problem=problem.replace(devices=[less, problem.devices[1]]))
    assert prune(tight).programs == away.programs


def test_a_part_stays_where_memory_suffices_for_it_alone():
    problem = pipeline(1, 2, 16, stage(offload=(1, 1, 8), offload_parts=2))
    away = parsed(problem, "0F0 0O0 0O0.1 0D0 0D0.1 0F1 0BW1 0R0 0R0.1 0BW0")
    moved = [op for op in prune(away).programs[0].ops() if op.kind in (Kind.O, Kind.D, Kind.R)]
    assert [op.kind for op in moved] == [Kind.O, Kind.D, Kind.R]
    assert len({op.part for op in moved}) == 1


def test_a_deadlock_over_an_accept_is_shown():
    stuck = parsed(PAIR, FIRST, "1F0 1BW0 1F1 1BW1 0A0 0V0")
    with pytest.raises(DeadlockError, match="0A0") as caught:
        simulate(PAIR, stuck)
    assert Op(Kind.E, 0, 0) in caught.value.cycle
    assert len(check(PAIR, stuck)) == 1


def test_a_device_that_only_accepts_has_no_span():
    problem = pair(m=1)
    problem = problem.replace(stages=problem.stages[:1])
    schedule = parsed(problem, "0F0 0E0 0D0 0L0 0BW0", "0A0 0V0")
    assert check(problem, schedule) == []
    assert schedule.span_ms == schedule.makespan_ms == 2 + 1 + 3 + 3
    assert len(schedule.timeline.busy_ms()) == 1


def test_a_stage_evicts_only_where_its_device_has_a_peer():
    both_ways = rechunk(PAIR, 1, "bidirectional")
    assert [stage.can_evict for stage in both_ways.stages] == [True, False, False, False]
    assert [stage.evict_bytes for stage in rechunk(PAIR, 2).stages] == [4, None, 4, None]
    with pytest.raises(InputError, match=r"stages\[0\]\.evict_ms = 1\.0: its device 0 needs a peer"):
        PAIR.replace(devices=[device.model_copy(update={"peer": None}) for device in PAIR.devices])


def test_a_shared_link_orders_the_transfers_of_optimizers_too():
    problem = pipeline(2, 1, 100, stage(TIMES, update=(4, 6, 3)), device={"link": "pcie0"})
    programs = "0P0 0F0 0BW0 0G0 0U0", "1P0 1F0 1BW0 1G0 1U0"
    schedule = parsed(problem, *programs, links={"pcie0": ["1P0", "0P0", "1G0", "0G0"]})
    assert check(problem, schedule) == []
    assert schedule.timeline.start[:2].tolist() == [3.0, 6.0]
    assert [op.kind for op in ScheduleFile.from_schedule(schedule).ops].count("U") == 2
    assert "4 transfers on it" in check(problem, parsed(problem, *programs, links={"pcie0": ["1P0"]}))[0]


@pytest.mark.parametrize(
    ("problem", "program", "op", "start"),
    [
        # Parameters of a later stage come in during a forward.
        (UPDATING, "0F0 1P0 1F0 1BW0 0BW0 1G0 1U0", "1F0", 5.0),
        # Micro-batch 0 does not pass stage 1; its optimizer's ops are written with that number all the same.
        (updating(m=2, routes=[[0], [1]], microbatch_routes=[0, 1]), "1P0 0F0 0BW0 1F1 1BW1 1G0 1U0", "1U0", 14.0),
    ],
)
def test_parameters_and_updates_run_beside_compute(problem: Problem, program: str, op: str, start: float):
    schedule = parsed(problem, program)
    assert check(problem, schedule) == []
    assert schedule.timeline.start[program.split().index(op)] == start


@pytest.mark.parametrize(
    ("problem", "programs", "message"),
    [
        (LEVELS, ("0F0 0C0.2 0BW0 0F1 0BW1",), "0C0.2 in the program of device 0: the stage has fewer levels"),
        (LEVELS, ("0F0 0C0 0C0.1 0BW0 0F1 0BW1",), "0C0 stands 2 times"),
        (LEVELS, ("0F0 0O0 0D0 0C0 0R0 0BW0 0F1 0BW1",), "0R0 stands after 0C0"),
        (
            LEVELS,
            ("0F0 0O0 0D0 0R0 0C0.1 0BW0 0F1 0BW1",),
            "0O0 in the program of device 0: an activation is offloaded or recomputed, not both, where its level has "
            "no offload_ms",
        ),
        (LEVELS, ("0F0 0O0 0D0 0R0 0BW0 0F1 0BW1",), "0O0 in the program of device 0: the stage has no offload_ms"),
        (ABLE, (FIRST.replace("0D0 ", ""), SECOND), "0E0 has no 0D0: its device copy is never let go"),
        (ABLE, (FIRST.replace("0L0 ", ""), SECOND), "0E0 has no 0L0: the backward misses its bytes"),
        (ABLE, (FIRST, SECOND.replace("0A0 ", "")), "0E0 has no 0A0: nothing makes room for it on the peer"),
        (ABLE, (FIRST, SECOND.replace("0V0 ", "")), "0A0 has no 0V0: its room is never let go"),
        (ABLE, ("0F0 0F1 0BW0 0BW1", SECOND), "0A0 has no 0E0: nothing is evicted"),
        (ABLE, ("0F0 0F1 0BW0 0BW1", SECOND), "0V0 has no 0E0: nothing is evicted"),
        (ABLE, (FIRST.replace("0E0 ", ""), SECOND), "0L0 has no 0E0: nothing is evicted"),
        (ABLE, (FIRST.replace("0E0 ", ""), SECOND), "0D0 has no 0O0 or 0E0: nothing has left"),
        (ABLE, (FIRST.replace("0E0", "0E0 0E0"), SECOND), "0E0 stands 2 times"),
        (ABLE, (FIRST.replace("0L0 0BW0", "0BW0 0L0"), SECOND), "0L0 stands after 0BW0"),
        (ABLE, (FIRST.replace("0E0 0D0", "0D0 0E0"), SECOND), "0E0 stands after 0D0"),
        (ABLE, (FIRST.replace("0D0 0F1 0L0", "0L0 0F1 0D0"), SECOND), "0D0 stands after 0L0"),
        (ABLE, (FIRST.replace("0F0 0E0", "0E0 0F0"), SECOND), "0F0 stands after 0E0"),
        (ABLE, (FIRST, "0V0 1F0 1BW0 1F1 1BW1 0A0"), "0A0 stands after 0V0"),
        (ABLE, (FIRST.replace("0F1 0L0", "0C0 0F1 0L0"), SECOND), ONE_OF_THEM),
        (ABLE, (FIRST.replace("0F1", "0O0 0R0 0F1"), SECOND), ONE_OF_THEM),
        (
            ABLE,
            ("0A0 " + FIRST, SECOND.replace("0A0 ", "")),
            "0A0 in the program of device 0: the stage's device has another peer",
        ),
        (
            ABLE,
            (FIRST, SECOND.replace("0A0", "0A0 0E1")),
            "0E1 in the program of device 1: the stage is on another device",
        ),
        (ABLE, (FIRST.replace("0F1", "0F1 1A0"), SECOND), "1A0 in the program of device 0: the stage has no evict_ms"),
        (UPDATING, ("0F0 1F0 1BW0 0BW0 1G0 1U0",), "1U0 has no 1P0: an optimizer on the host is G, U and P"),
        (UPDATING, ("1P0 0F0 1F0 1BW0 0BW0",), "1P0 has no 1U0: an optimizer on the host is G, U and P"),
        (UPDATING, ("0F0 1F0 1P0 1BW0 0BW0 1G0 1U0",), "1P0 stands after 1F0"),
        (UPDATING, ("1P0 0F0 1F0 1G0 1BW0 0BW0 1U0",), "1BW0 stands after 1G0"),
        (UPDATING, ("1P0 0F0 1F0 1B0 1G0 1W0 0BW0 1U0",), "1W0 stands after 1G0"),
        (UPDATING, ("1P0 0F0 1F0 1BW0 1U0 0BW0 1G0",), "1G0 stands after 1U0"),
        (UPDATING, ("1P0 1P0 0F0 1F0 1BW0 1G0 0BW0 1U0",), "1P0 stands 2 times"),
        (UPDATING, ("2P0 0F0 1F0 1BW0 0BW0",), "2P0 in the program of device 0: there are 2 stages"),
    ],
)
def test_each_mistake_is_reported(problem: Problem, programs: tuple[str, ...], message: str):
    assert message in check(problem, parsed(problem, *programs))


@pytest.mark.parametrize(
    ("problem", "programs", "message"),
    [
        (chain(), ("0F0 0F1 0BW0 0BW1", "1F0 1BW0 1BW1"), "1BW1 in the program of device 1 has no forward"),
        (chain(), ("0F0 0BW0 0BW1", "1F0 1BW0 1F1 1BW1"), "0BW1 in the program of device 0 has no forward"),
        (chain(), ("0F0 1F0", ""), "1F0 in the program of device 0: the stage is on another device"),
        (chain(), ("2F0", ""), "2F0 in the program of device 0: there are 2 stages"),
        (chain(), ("0F2", ""), "0F2 in the program of device 0: there are 2 micro-batches"),
        (chain(), ("0F0 0D0", ""), "0D0 in the program of device 0 has no offload"),
        (chain(), ("0F0 0O0.1", ""), "0O0.1 in the program of device 0: the stage has fewer parts"),
        (chain(), ("0F0 0C0", ""), "0C0 in the program of device 0: the stage has no recompute_ms and no levels"),
        (chain(), ("0F0+0BW1", ""), "ops run together only where the problem has overlap_factor"),
        (chain(), ("", "", "0F0"), "there is a program for device 2, but the problem has 2 devices"),
        (PAIR, (FIRST, SECOND.replace("0A0 ", "")), "0E0 in the program of device 0 has no room on the peer"),
        (PAIR, (FIRST.replace("0L0 ", ""), SECOND), "0V0 in the program of device 1 has no load"),
        (UPDATING, ("0F0 1F0 1BW0 0BW0 1U0",), "1U0 in the program of device 0 has no gradients"),
        (UPDATING, ("0F0 1F0 1G0",), "1G0 in the program of device 0 has no weight gradient"),
        (updating(m=2), ("0P1 0F0 1F0",), "0P1 in the program of device 0: what happens once an iteration is written"),
        (PAIR, ("0P0 0F0", ""), "0P0 in the program of device 0: the stage has no parameters_in_ms"),
        (UPDATING, ("0F0 0P0 1F0 1BW0 0BW0 0G0 0U0",), "deadlock: 0F0 waits for 0P0 waits for 0F0"),
    ],
)
def test_simulate_refuses_what_it_cannot_time(problem: Problem, programs: tuple[str, ...], message: str):
    with pytest.raises(ScheduleError, match=message):
        simulate(problem, parsed(problem, *programs))
