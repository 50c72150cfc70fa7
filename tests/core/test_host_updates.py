"""`with_host_updates`: G, U and P in any schedule, beside its transfers and in nobody's way."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support.problems import parsed, pipeline, stage
from support.problems.strategies import problems_with_schedules

from optpipe import InputError, Kind, Schedule, certify, check
from optpipe.lift import with_host_updates
from optpipe.model.ops import OPTIMIZER, TRANSFERS
from optpipe.model.program import of_kinds


def starts(schedule: Schedule) -> dict[tuple[Any, ...], float]:
    """When each op starts, by its program and what it is."""
    timeline = schedule.timeline
    ops = np.column_stack([timeline.device, timeline.table[:, :4]]).tolist()
    return dict(zip(map(tuple, ops), timeline.start.tolist(), strict=True))


@given(problems_with_schedules(beyond=True))
def test_any_schedule_takes_them_and_keeps_its_order(case):
    problem, schedule = case
    plain = schedule.with_tables(lambda table: table[~of_kinds(table, *OPTIMIZER)])
    placed = with_host_updates(schedule)
    assert check(problem, placed) == []
    assert with_host_updates(placed) == placed
    assert starts(with_host_updates(schedule, ())) == starts(plain)
    updated = {s for s in range(len(problem.stages)) if problem.stages[s].can_update}
    for kind in OPTIMIZER:
        assert {op.stage for program in placed.programs for op in program.ops() if op.kind is kind} == updated
    for before, after in zip(plain.programs, placed.programs, strict=True):
        stream = (table[~of_kinds(table, *TRANSFERS)] for table in (before.table, after.table))
        np.testing.assert_array_equal(*stream)
    for old, new in zip(certify(problem, plain).device, certify(problem, placed).device, strict=True):
        assert new.bytes <= old.bytes
    then, now = starts(plain), starts(placed)
    ends = {op: now[op] + problem.costs.ms[op[1], op[2], 0] for op in now if op[1] == Kind.P}
    needed = {op: min(at for (_, kind, s, *_), at in then.items() if (kind, s) == (Kind.F, op[2])) for op in ends}
    if all(ends[op] <= needed[op] + 1e-9 for op in ends):
        assert {op: now[op] for op in then} == pytest.approx(then)
    took = sum(problem.costs.ms[[*OPTIMIZER], s, 0].sum() for s in updated)
    assert plain.makespan_ms - 1e-9 <= placed.makespan_ms <= plain.makespan_ms + took + 1e-9


ONE = stage((4, 4, 4), (10, 0), offload=(3, 3, 10), update=(2, 5, 2))


@pytest.mark.parametrize(("mode", "waits"), [("full_duplex", 0), ("half_duplex", 3)])
def test_gradients_wait_for_a_reload_on_their_link(mode, waits):
    """The reload keeps its time, and what is left of the link is theirs. Parameters come before all."""
    problem = pipeline(1, 2, 100, [{"device": 0, **ONE}, {"device": 0, **ONE}], transfer_mode=mode)
    plain = parsed(problem, "0F0 0O0 0F1 1F0 0D0 1BW0 1F1 1BW1 0R0 0BW1 0BW0")
    placed = with_host_updates(plain)
    assert check(problem, placed) == []
    assert placed.programs[0].texts()[:2] == ["0P0", "1P0"]
    at = {name: starts(placed)[0, Kind[name[1]], int(name[0]), 0, 0] for name in ("0R0", "1G0", "1U0", "0G0", "0U0")}
    reload = starts(plain)[0, Kind.R, 0, 0, 0]
    last = plain.makespan_ms
    expected = {"0R0": reload, "1G0": reload + waits, "1U0": reload + waits + 2, "0G0": last, "0U0": last + 2}
    assert {name: now - 2 for name, now in at.items()} == expected  # 0P0 delays all by 2
    assert placed.makespan_ms == 2 + last + 2 + 5


def test_a_stage_without_times_is_refused():
    problem = pipeline(1, 1, 100, stage())
    with pytest.raises(InputError, match=r"^stages\[0\]\.update_ms is missing: its optimizer cannot run on the host$"):
        with_host_updates(parsed(problem, "0F0 0BW0"), [0])
    assert with_host_updates(parsed(problem, "0F0 0BW0")) == parsed(problem, "0F0 0BW0")
