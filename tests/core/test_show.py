"""Pictures draw every op of every schedule, memory as the certificate has it, and what two schedules do differently.
In a real browser the interactive one tells what Python tells. Text of others is one line that a terminal only shows."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.browser import Opened, browser
from support.examples import examples
from support.problems import parsed, pipeline, stage
from support.problems.strategies import AMPLE, problems, problems_with_schedules, schedules
from support.problems.units import units

from optpipe import Schedule, certify
from optpipe.evaluate.causes import Causes
from optpipe.model.ops import MARKS
from optpipe.show.figure import OpChange, changes
from optpipe.show.lanes import blocks, memory_over_time
from optpipe.show.page import plot
from optpipe.show.svg import gantt
from optpipe.show.terminal import chart
from optpipe.show.trace import trace
from optpipe.text import bytes_text, distinct_sizes, printable
from optpipe_solver.heuristics import generate

__all__ = ["browser"]  # a fixture


def assert_threads_run_one_op_at_a_time(events):
    """In whole ns, as readers count. No thread has the number of a process, which would make it the main one, or 0."""
    lanes = {}
    for event in (event for event in events if event["ph"] == "X"):
        lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"] * 1e3, event["dur"] * 1e3))
    assert {tid for _, tid in lanes}.isdisjoint({0} | {event["pid"] for event in events})
    assert len({tid for _, tid in lanes}) == len(lanes)
    for spans in lanes.values():
        assert all(number == pytest.approx(round(number), abs=1e-3) for span in spans for number in span)
        spans = sorted((round(begin), round(ns)) for begin, ns in spans)
        assert all(begin + ns <= later for (begin, ns), (later, _) in pairwise(spans))


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
    assert_threads_run_one_op_at_a_time(events)
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


BOXES = """(name) => document.querySelector('.plot').data.filter((trace) => trace.name && trace.name.startsWith(name))
  .flatMap(({x, y, fillcolor}) => Array.from({length: x.length / 6}, (_, i) =>
    [x[6 * i], x[6 * i + 1], Math.floor(-y[6 * i]), fillcolor]))"""
LEFT, RIGHT, TOP = 64, 14, 26  # of the first panel, in pixels (web/layout.js)


# Device 0 waits for offloads, for a reload, and for device 1.
OFFLOADING = parsed(
    pipeline(2, 3, 30, stage((2, 1, 1), (10, 4), offload=(5, 4, 10)), p2p_ms=0.5, name="two devices"),
    "0F0 0O0 0D0 0F1 0F2 0R0 0BW0 0B1 0BW2 0W1",
    "1F0 1BW0 1F1 1BW1 1F2 1BW2",
    method="by hand",
)
CAUSES = Causes(OFFLOADING.compiled)
LARGE = generate("naive", units(32, 64))


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """Opens a schedule's page."""
    pages = []

    def open_page(schedule, *others, **options):
        path = tmp_path_factory.mktemp("page") / "picture.html"
        plot(schedule, *others).save(path)
        pages.append(Opened(browser, path, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()


@pytest.fixture(scope="module")
def small(opened):
    return opened(OFFLOADING, color_scheme="dark")


def point(page, schedule, device, ms):
    """The pixel of a device's compute lane at a time."""
    box = page.page.locator(".plot").bounding_box()
    rows = page.page.evaluate("() => document.querySelector('.plot').layout.yaxis2.domain")
    height = page.page.evaluate("() => document.querySelector('.plot').layout.height - 40")
    row = (rows[1] - rows[0]) * height / len(schedule.programs)
    return box["x"] + LEFT + ms / schedule.makespan_ms * (box["width"] - LEFT - RIGHT), box["y"] + TOP + row * (
        device + 0.3
    )


def test_the_bars_are_the_timeline(small):
    drawn = sorted(tuple(box) for box in small.page.evaluate(BOXES, "ops"))
    assert drawn == sorted((block.start, block.end, block.device, block.colour) for block in blocks(OFFLOADING))
    gaps = CAUSES.gaps
    waits = [box for name in ("start", "end", "device", "transfer") for box in small.page.evaluate(BOXES, name)]
    expected = zip(gaps.begin_ms.tolist(), gaps.end_ms.tolist(), gaps.device.tolist(), strict=True)
    assert sorted(tuple(box[:3]) for box in waits) == sorted(expected)
    labels = small.page.evaluate("() => document.querySelector('.plot').data.flatMap((trace) => trace.text || [])")
    assert {"F0", "W1", "O0", "R0", "BW2"} <= set(labels)


def test_a_click_on_a_gap_tells_the_chain_that_made_it(small):
    gaps, rows = CAUSES.gaps, OFFLOADING.compiled.rows
    for gap in range(len(gaps)):
        middle = (gaps.begin_ms[gap] + gaps.end_ms[gap]) / 2
        small.page.mouse.click(*point(small, OFFLOADING, int(gaps.device[gap]), middle))
        names = [str(rows.op(row)) for row in CAUSES.chain(int(gaps.row[gap]), gaps.begin_ms[gap])]
        small.page.wait_for_function(
            "(names) => { const steps = Array.from(document.querySelectorAll('.chain button'), (b) => b.textContent);"
            "return steps.length === names.length && steps.every((step, i) => step.startsWith(names[i] + ' ')) }",
            arg=names,
        )
        told = [text for text in small.text("aside ul li") if "could run" in text]
        ready = CAUSES.ready.row[CAUSES.ready.gap == gap]
        assert [text.split()[0] for text in told] == [str(rows.op(int(row))) for row in ready]


def test_the_pointer_tells_what_an_op_waited_for_and_what_it_starts(small):
    small.page.mouse.move(*point(small, OFFLOADING, 1, 3.5))
    small.page.wait_for_selector(".tip:not([hidden])")
    assert small.text(".tip div") == [
        "1F0 on device 1",
        "2.5 – 4.5 ms (2 ms)",
        "1F0 needs the message of 0F0, 0.5 ms after its end on device 0",
        "its end starts 1BW0",
    ]


def test_the_keyboard_reaches_ops_and_gaps(small):
    small.page.locator(".plot").focus()
    small.page.keyboard.press("Escape")
    titles = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "Escape"):
        small.page.keyboard.press(key)
        titles.append(small.text("aside h2")[0])
    assert titles == [
        "0F0 on device 0",
        "Why device 0 waits 5 ms",
        "0F1 on device 0",
        "Why device 1 waits 3 ms",
        "Where devices wait",
    ]


def test_two_schedules_have_one_time_scale_and_marks_where_they_differ(opened):
    after = OFFLOADING
    before = parsed(after.problem, "0F0 0F1 0BW0 0F2 0B1 0BW2 0W1", "1F0 1BW0 1F1 1F2 1BW1 1BW2", method="before")
    page = opened(after, before)
    range_ = page.page.evaluate("() => document.querySelector('.plot').layout.xaxis.range")
    assert range_ == [0, max(before.makespan_ms, after.makespan_ms)]
    drawn = page.page.evaluate(BOXES, "ops")
    assert len(drawn) == sum(len(list(blocks(each))) for each in (before, after))
    for name, change in (("moved", OpChange.MOVED), ("only", OpChange.ONLY_HERE)):
        marks = sorted(tuple(box[:2]) for box in page.page.evaluate(BOXES, name))
        times = []
        for one, other in ((before, after), (after, before)):
            rows = np.flatnonzero(changes(one, other) == change)
            times += zip(one.timeline.start[rows].tolist(), one.timeline.end[rows].tolist(), strict=True)
        assert marks == sorted(times)
        assert marks


def test_a_large_schedule_is_one_image_until_the_zoom_shows_few_ops(opened):
    page = opened(LARGE)
    images = "() => document.querySelector('.plot').layout.images.length"
    assert page.page.evaluate(images) == 1
    assert page.page.evaluate(BOXES, "ops") == []
    middle = (LARGE.timeline.start[7] + LARGE.timeline.end[7]) / 2
    page.page.mouse.click(*point(page, LARGE, 0, middle))
    page.page.wait_for_function("() => document.querySelector('aside h2').textContent === '0BW3 on device 0'")
    page.page.locator(".plot").focus()
    for _ in range(4):
        page.page.keyboard.press("+")
    page.page.wait_for_function(f"() => ({images})() === 0")
    # one question: a zoom may still be drawn between two
    both = f"() => [document.querySelector('.plot').layout.xaxis.range, ({BOXES})('ops')]"
    (begin, end), boxes = page.page.evaluate(both)
    drawn = sorted(tuple(box[:3]) for box in boxes)
    assert drawn == sorted((b.start, b.end, b.device) for b in blocks(LARGE) if b.end > begin and b.start < end)


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&lt;b&gt;"


def test_hostile_names_stay_text(opened):
    schedule = Schedule(OFFLOADING.problem.replace(name=HOSTILE), OFFLOADING.programs, method=f"<b>{HOSTILE}")
    page = opened(schedule, schedule)
    assert page.text("h1") == [HOSTILE]
    assert page.page.title() == f"{HOSTILE} · <b>{HOSTILE}"
    assert f"<b>{HOSTILE}" in page.text("header p")[0]
    assert page.page.locator("img, body > script:not([id]) + script:not([type])").count() == 0
    assert any(f"<b>{HOSTILE}" in text for text in page.page.locator(".annotation-text").all_text_contents())


def test_the_page_may_run_nothing_but_its_own_code():
    html = plot(OFFLOADING).html
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split("style-src")[0]
    assert not re.search(r"\son[a-z]+=", re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL))
    document = re.search(r'id="document">(.*?)</script>', html, re.DOTALL)[1]
    assert json.loads(document)["title"] == "two devices"


def test_a_notebook_shows_the_picture_in_a_frame_of_its_own():
    frame = plot(OFFLOADING)._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert 'sandbox="allow-scripts' in frame
    assert "64 micro-batches" in LARGE._repr_html_()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("4 × 8, naïve → 12 µs", "4 × 8, naïve → 12 µs"),
        ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
        ("good\nvalid: it runs\r\x85\u2028", r"good\nvalid: it runs\r\x85\u2028"),
        ("\u202efdp.exe\u2066\x9b2J\x00\x7f\ud800", r"\u202efdp.exe\u2066\x9b2J\x00\x7f\ud800"),
        (InterruptedError("a\tb"), r"a\tb"),
    ],
)
def test_what_a_terminal_would_obey_is_made_visible(text: object, line: str) -> None:
    assert printable(text) == line


def test_a_long_text_is_cut() -> None:
    assert printable("\n" * 200_000, longest=3) == r"\n\n\n..."
    assert printable("abc", longest=3) == "abc"


def test_bytes_are_readable() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1 kB", 1.5e6: "1.5 MB", 15e9: "15 GB", 2e12: "2 TB", 2**62: "4610000 TB"}
    sizes |= {999.7: "1 kB", 999_700_000: "1 GB"}
    assert {size: bytes_text(size) for size in sizes} == sizes
    assert distinct_sizes(40 * 10**9, 30 * 10**9) == ["40 GB", "30 GB"]
    assert distinct_sizes(30 * 10**9 + 1, 30 * 10**9) == ["30.000000001 GB", "30 GB"]
