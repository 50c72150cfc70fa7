"""Why ops start when they do: by hand, and against what the times themselves say."""

import numpy as np
from hypothesis import given, settings
from support.examples import examples
from support.oracles.clock import nominal_message_ms
from support.problems import pipeline, stage
from support.problems.strategies import AMPLE, problems_with_schedules

from optpipe import Schedule
from optpipe.evaluate.causes import Cause, Causes, Hindrance
from optpipe.evaluate.effects import held_during
from optpipe.model.arrays import NONE
from optpipe.model.ops import COMPUTE


def ops(schedule, rows):
    return [str(schedule.compiled.rows.op(int(row))) for row in rows]


def named(schedule, gap):
    causes = Causes(schedule.compiled)
    return ops(schedule, causes.chain(int(causes.gaps.row[gap]), causes.gaps.begin_ms[gap]))


@given(problems_with_schedules(beyond=True))
@settings(max_examples=examples(60))
def test_every_start_is_the_end_of_its_cause(pair):
    """From any op back; so along the critical path, and in the chain behind each gap."""
    problem, schedule = pair
    timeline, rows, causes = schedule.timeline, schedule.compiled.rows, Causes(schedule.compiled)
    lasts, late = timeline.end - timeline.start, np.zeros(len(rows))
    for row, (cause, why) in enumerate(zip(causes.row.tolist(), causes.why.tolist(), strict=True)):
        if cause == NONE:
            assert (why, timeline.start[row]) == (Cause.BEGIN, 0.0)
            continue
        first = row - int(rows.second[row])  # a pair starts as one
        ops = [rows.op(each) for each in (first, first + 1)[: 1 + (first in rows.first)]]
        messages = {nominal_message_ms(problem, op) for op in ops if why == Cause.ACROSS and op.kind in COMPUTE}
        late[row] = timeline.start[row] - timeline.end[cause]
        assert any(np.isclose(late[row], each) for each in {0.0, *messages})
    path = causes.critical_path
    assert (timeline.start[path[0]], timeline.end[path[-1]]) == (0, timeline.makespan_ms)
    assert np.isclose(lasts[path].sum() + late[path].sum(), timeline.makespan_ms)

    gaps, computing = causes.gaps, rows.of_kinds(*COMPUTE) & ~rows.second
    devices = len(np.unique(rows.device[computing]))
    waits = (gaps.end_ms - gaps.begin_ms).sum()
    assert np.isclose(lasts[computing].sum() + waits, devices * timeline.makespan_ms)
    for gap in range(len(gaps)):
        chain = causes.chain(int(gaps.row[gap]), gaps.begin_ms[gap])
        assert timeline.start[chain[-1]] <= gaps.begin_ms[gap] + 1e-6


@given(problems_with_schedules())
@settings(max_examples=examples(60))
def test_what_stood_ready_holds_what_the_certificate_of_the_moved_op_says(pair):
    _, schedule = pair
    compiled, causes = schedule.compiled, Causes(schedule.compiled)
    rows, effects = compiled.rows, compiled.effects
    for gap, row, since, held in zip(
        causes.ready.gap, causes.ready.row, causes.ready.since_ms, causes.ready.held_bytes, strict=True
    ):
        place, own = int(causes.gaps.place[gap]), rows.of_device(int(rows.device[row]))
        order = np.r_[own.start : place, row, place:row, row + 1 : own.stop]
        during = held_during(effects.takes[order], effects.frees[order], np.array([0, len(order)]))
        assert held == during[place - own.start : row - own.start + 1].max()
        assert causes.gaps.begin_ms[gap] <= since < causes.gaps.end_ms[gap]


def test_a_gap_tells_the_chain_that_made_it():
    problem = pipeline(2, 2, AMPLE, [stage((1, 1, 1)), stage((3, 3, 3))], p2p_ms=0.5)
    schedule = Schedule.parse(problem, [["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]])
    gaps = Causes(schedule.compiled).gaps
    seen = [
        (int(d), float(begin), float(end), named(schedule, i))
        for i, (d, begin, end) in enumerate(zip(gaps.device, gaps.begin_ms, gaps.end_ms, strict=True))
    ]
    assert seen == [
        (0, 2.0, 11.0, ["0BW0", "1BW0", "1F0"]),
        (0, 13.0, 20.0, ["0BW1", "1BW1", "1F1"]),
        (1, 0.0, 1.5, ["1F0", "0F0"]),
        (1, 19.5, 22.0, ["0BW1", "1BW1"]),
    ]
    assert gaps.last.tolist() == [False, False, False, True]
    assert ops(schedule, Causes(schedule.compiled).critical_path) == ["0F0", "1F0", "1BW0", "1F1", "1BW1", "0BW1"]


def test_a_gap_tells_what_stood_ready_and_what_spoke_against_it():
    costs = [stage((1, 1, 1), (10, 4)), stage((4, 1, 1), (10, 4))]
    programs = [["0F0", "0B0", "0F1", "0W0", "0B1", "0W1"], ["1F0", "1BW0", "1F1", "1BW1"]]
    for budget, hindrance in ((20, Hindrance.ORDER), (19, Hindrance.MEMORY)):
        schedule = Schedule.parse(pipeline(2, 2, budget, costs), programs)
        ready = Causes(schedule.compiled).ready
        first = list(np.flatnonzero(ready.gap == 0))
        assert ops(schedule, ready.row[first]) == ["0F1"]
        assert (ready.since_ms[first], ready.held_bytes[first], ready.hindrance[first]) == (1.0, 20, hindrance)
    long = Schedule.parse(pipeline(2, 2, 20, [stage((9, 1, 1), (10, 4)), stage((1, 1, 1), (10, 4))]), programs)
    assert Causes(long.compiled).ready.hindrance[0] == Hindrance.LENGTH


def test_a_drop_that_waits_for_its_offload_is_a_cause():
    costs = stage((1, 1, 1), (10, 4), offload=(5, 2, 10))
    schedule = Schedule.parse(pipeline(1, 2, 10, costs), [["0F0", "0O0", "0D0", "0F1", "0BW1", "0R0", "0BW0"]])
    causes = Causes(schedule.compiled)
    assert named(schedule, 0) == ["0F1", "0D0", "0O0"]
    assert [Cause(causes.why[row]) for row in (3, 2, 1)] == [Cause.STREAM, Cause.OWN, Cause.OWN]
    assert ops(schedule, causes.ready.row[:1]) == ["0F1"]
    assert (causes.ready.held_bytes[0], causes.ready.hindrance[0]) == (20, Hindrance.MEMORY)
    assert named(schedule, 1) == ["0BW0", "0R0"]
    assert Cause(causes.why[6]) == Cause.RESTORED
