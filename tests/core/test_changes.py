"""What two schedules do differently."""

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import pipeline, stage
from support.problems.strategies import AMPLE, problems, schedules

from optpipe import Schedule
from optpipe.model.ops import MARKS
from optpipe.show.figure import OpChange, changes


def marked(schedule, other):
    return {
        str(schedule.compiled.rows.op(row)): OpChange(change).name
        for row, change in enumerate(changes(schedule, other).tolist())
        if change
    }


def test_as_few_ops_as_possible_are_called_moved():
    problem = pipeline(1, 3, AMPLE, stage(offload=(1, 1, 10)))
    one = Schedule.parse(problem, [["0F0", "0F1", "0F2", "0BW0", "0BW1", "0BW2"]])
    other = Schedule.parse(problem, [["0F0", "0BW0", "0F1", "0F2", "0O1", "0D1", "0B2", "0W2", "0R1", "0BW1"]])
    assert marked(one, one) == {}
    assert marked(one, other) == {"0BW0": "MOVED", "0BW2": "ONLY_HERE"}
    assert marked(other, one) == {
        "0BW0": "MOVED",
        **dict.fromkeys(("0O1", "0R1", "0B2", "0W2"), "ONLY_HERE"),
    }


@given(st.data())
@settings(max_examples=examples(40))
def test_what_did_not_move_keeps_its_order(data):
    problem = data.draw(problems())
    one, other = data.draw(schedules(problem)), data.draw(schedules(problem))

    def stayed(schedule, reference):
        found = changes(schedule, reference)
        rows = schedule.compiled.rows
        return [
            (int(rows.device[row]), rows.op(row))
            for row in range(len(rows))
            if rows.op(row).kind not in MARKS and found[row] == OpChange.NONE
        ]

    one_stayed, other_stayed = stayed(one, other), stayed(other, one)
    assert len(one_stayed) == len(other_stayed)
    common = set(one_stayed) & set(other_stayed)
    assert [op for op in one_stayed if op in common] == [op for op in other_stayed if op in common]
