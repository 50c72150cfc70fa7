"""Pictures draw every op of every schedule, memory as the certificate has it, and what two schedules do differently."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import pipeline, stage
from support.problems.strategies import AMPLE, problems, problems_with_schedules, schedules

from optpipe import Schedule, certify
from optpipe.model.ops import MARKS
from optpipe.show.figure import OpChange, changes
from optpipe.show.lanes import blocks, memory_over_time
from optpipe.show.svg import gantt
from optpipe.show.terminal import chart
from optpipe.show.trace import trace


@given(problems_with_schedules(beyond=True))
@settings(max_examples=examples(40))
def test_every_picture_draws_every_schedule(pair):
    _, schedule = pair
    timed = sum(op.kind not in MARKS for program in schedule.programs for op in program.ops())
    svg = ElementTree.fromstring(gantt(schedule, title="<any> & title"))
    assert len(svg.findall(".//{*}title")) == timed
    HTMLParser().feed(schedule._repr_html_())
    events = json.loads(trace(schedule))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == timed
    assert chart(schedule, 60).plain.count("device") == len(schedule.programs)


@given(problems_with_schedules(beyond=True))
@settings(max_examples=examples(40))
def test_the_memory_drawn_stays_within_the_certificate(pair):
    problem, schedule = pair
    for d, peak in enumerate(certify(problem, schedule).device):
        steps = memory_over_time(schedule, d)
        assert max((held for _, held in steps), default=0) <= peak.bytes
        assert [moment for moment, _ in steps] == sorted(moment for moment, _ in steps)
        assert not steps or steps[-1][1] == 0


def test_the_terminal_shows_which_micro_batch_runs_when():
    problem = pipeline(1, 2, 10, stage((2, 1, 1), (3, 1)))
    schedule = Schedule.parse(problem, [["0F0", "0B0", "0W0", "0F1", "0BW1"]])
    width = 12 + 16 + len("  3 B of 10 B")
    lanes = ["device 0    0000000011111111  3 B of 10 B", " " * 12 + "▃▃▃▃▃▃▁▁▃▃▃▃▃▃▃▃"]
    assert chart(schedule, width).plain.splitlines()[:2] == lanes
    assert [line.strip() for line in chart(schedule, width, colours=False).plain.splitlines()[1:]] == [
        "FFFFBBWWFFFFbbbb",
        "F = forward   B = input gradient   W = weight gradient   b = backward",
        "a digit is the last one of the micro-batch's number",
    ]
    assert [str(block.op) for block in blocks(schedule)] == ["0F0", "0B0", "0W0", "0F1", "0BW1"]


def test_stages_of_a_device_differ_in_shade_and_the_ops_of_a_pair_share_the_lane():
    problem = pipeline(1, 2, 10, [stage(device=0)] * 2, overlap_factor=0.8)
    schedule = Schedule.parse(problem, [["0F0", "1F0", "0F1+1BW0", "1F1", "0BW0", "1BW1", "0BW1"]])
    drawn = {str(block.op): block for block in blocks(schedule)}
    assert len({drawn[op].colour for op in ("0F0", "1F0", "0BW0", "1BW0")}) == 4
    assert drawn["0F0"].colour == drawn["0F1"].colour
    assert [drawn[op].half for op in ("0F0", "0F1", "1BW0", "1F1")] == ["", "upper", "lower", ""]
    picture = gantt(schedule)
    assert "the later of a device's stages are darker" in picture
    boxes = re.findall(r'y="(\d+)" width="[\d.]+" height="(\d+)"[^>]*><title>(\w+):', picture)
    tops = {op: (int(top), int(height)) for top, height, op in boxes}
    assert tops["0F1"][1] == tops["1BW0"][1] == tops["0F0"][1] / 2
    assert tops["1BW0"][0] == tops["0F1"][0] + tops["0F1"][1]


def test_the_chart_fits_the_window():
    problem = pipeline(6, 2, 10, stage((2, 1, 1), (3, 1)))
    schedule = Schedule.parse(problem, [[f"{d}F0", f"{d}BW0", f"{d}F1", f"{d}BW1"] for d in range(6)])
    for height, devices, memory in ((None, 6, True), (16, 6, True), (15, 6, False), (10, 6, False), (7, 3, False)):
        lines = chart(schedule, 60, height).plain.splitlines()
        assert max(map(len, lines[:-2])) <= 60
        assert sum(line.startswith("device") for line in lines) == devices
        assert ("▃" in "".join(lines)) is memory
        assert ("one device of 2 is shown" in lines[-1]) is (devices < 6)


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
    assert marked(other, one) == {"0BW0": "MOVED", **dict.fromkeys(("0O1", "0R1", "0B2", "0W2"), "ONLY_HERE")}


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
