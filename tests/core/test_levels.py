"""Levels of recomputation: how a problem says them, and what an op of one does. What schedules do with them is tested
wherever `support.problems.strategies` makes problems."""

from __future__ import annotations

from typing import Any

import pytest
from support.problems import pipeline, stage

from optpipe import InputError, Kind, Op, Problem, Schedule, certify, check, simulate
from optpipe.reuse import repair

MOVED = {"offload_ms": 1.0, "reload_ms": 2.0, "offload_bytes": 6}
CHEAP: dict[str, Any] = {"name": "cheap", "recompute_ms": 0.5, "checkpoint_bytes": 7} | MOVED
FULL: dict[str, Any] = {"name": "full", "recompute_ms": 3.0, "checkpoint_bytes": 1}


def problem_of(levels: list[dict[str, Any]], **fields: Any) -> Problem:
    return pipeline(1, 2, 20, [stage((3, 3, 2), (10, 4), levels=levels, **fields)])


@pytest.mark.parametrize(
    ("levels", "fields", "complaint"),
    [
        ([CHEAP, CHEAP], {}, r"levels\[1\]\.name = 'cheap': the levels of a stage have different names"),
        (
            [FULL | {"checkpoint_bytes": 11}],
            {},
            r"levels\[0\]\.checkpoint_bytes = 11: must be at most activation_bytes",
        ),
        ([CHEAP | {"offload_bytes": 8}], {}, r"levels\[0\]\.offload_bytes = 8: must be at most checkpoint_bytes = 7"),
        (
            [FULL | {"offload_ms": 1.0}],
            {},
            r"levels\[0\]\.reload_ms is missing: a level with offload_ms needs reload_ms",
        ),
        ([FULL], {"recompute": (1, 1)}, r"recompute_ms = 1.0: a stage with levels has the time of each of them there"),
        ([FULL | {"recompute_ms": [1.0]}], {}, r"levels\[0\]\.recompute_ms has 1 entries: one number, or one for each"),
        ([FULL], {"offload_parts": 2}, r"offload_parts = 2: only a stage with offload_ms"),
        ([], {}, r"levels"),
    ],
)
def test_what_is_wrong_with_levels_is_one_sentence(levels, fields, complaint) -> None:
    with pytest.raises(InputError, match=complaint):
        problem_of(levels, **fields)


def test_the_pair_of_fields_is_the_one_level_case() -> None:
    one, pair = problem_of([FULL]), pipeline(1, 2, 20, [stage((3, 3, 2), (10, 4), recompute=(3, 1))])
    assert one.stages[0].all_levels == pair.stages[0].all_levels
    assert "levels" not in pair.to_json()
    assert Problem.from_json(one.to_json()) == one
    programs = [["0F0", "0F1", "0C0", "0BW0", "0C1", "0BW1"]]
    lengths = {Schedule.parse(problem, programs).makespan_ms for problem in (one, pair)}
    assert lengths == {3 + 3 + 2 * (3 + 5)}


def test_a_level_has_its_own_time_checkpoint_and_offload() -> None:
    problem = problem_of([CHEAP | {"recompute_ms": [0.5, 0.25]}, FULL])
    schedule = Schedule.parse(problem, [["0F0", "0O0", "0F1", "0D0", "0C1.1", "0BW1", "0R0", "0C0", "0BW0"]])
    assert check(problem, schedule) == []
    starts = dict(zip(schedule.programs[0].ops(), simulate(problem, schedule).start.tolist(), strict=True))
    # F1 ends at 6, C1 and BW1 at 14; then the checkpoint comes back for 2 ms, and C0 takes half a ms.
    assert starts[Op(Kind.C, 0, 0)] == 16.0
    assert schedule.makespan_ms == 16.0 + 0.5 + 5.0
    peaks = certify(problem, schedule)
    assert peaks.device[0].bytes == 7 + 10  # during F1, before the drop
    assert peaks.host[0].bytes == 6


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("0F0 0C0.2 0BW0 0F1 0BW1", "0C0.2 in the program of device 0: the stage has fewer levels"),
        ("0F0 0C0 0C0.1 0BW0 0F1 0BW1", "stands 2 times"),
        ("0F0 0O0 0D0 0C0 0R0 0BW0 0F1 0BW1", "0R0 stands after 0C0"),
        ("0F0 0O0 0D0 0R0 0C0.1 0BW0 0F1 0BW1", "offloaded or recomputed, not both"),
        ("0F0 0O0 0D0 0R0 0BW0 0F1 0BW1", "the stage has no offload_ms"),
    ],
)
def test_what_a_level_cannot_do_is_found(program: str, complaint: str) -> None:
    problem = problem_of([CHEAP, FULL])
    assert complaint in " ".join(check(problem, Schedule.parse(problem, [program.split()])))


def test_a_schedule_takes_the_last_level_where_there_are_fewer() -> None:
    problem, fewer = problem_of([CHEAP, FULL]), problem_of([CHEAP])
    schedule = Schedule.parse(problem, [["0F0", "0C0.1", "0BW0", "0F1", "0BW1"]])
    repaired = repair(fewer, schedule)
    assert repaired is not None
    assert repaired.programs[0].texts() == ["0F0", "0C0", "0BW0", "0F1", "0BW1"]
