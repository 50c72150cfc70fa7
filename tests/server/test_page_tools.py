"""The service's page in a real browser: problems that are submitted, the workbench, and a trace that is diagnosed."""

from __future__ import annotations

import json
from pathlib import Path

from support.browser import browser
from support.problems.chain import chain
from support.service.visitor import MISSING, Service, Visitor, page_of_module, serious, service, visitor

from optpipe.model.problem import Problem
from optpipe_solver import systems

__all__ = ["browser", "page_of_module", "service", "visitor"]  # fixtures


def test_a_problem_is_submitted_from_a_file(service: Service, visitor: Visitor, tmp_path: Path) -> None:
    page = visitor.go("/submit", ".drop")
    assert serious(page) == []
    wrong, right = tmp_path / "wrong.json", tmp_path / "right.json"
    wrong.write_text('{"stages"')
    right.write_text(json.dumps(chain().to_dict() | {"name": "from a file"}))
    page.set_input_files("input[type=file]", str(wrong))
    page.wait_for_selector(".notice.wrong")
    assert visitor.text(".notice.wrong") == ["wrong.json is not JSON; expected a problem file."]
    page.set_input_files("input[type=file]", str(right))
    page.get_by_role("button", name="Submit the file").click()
    page.wait_for_selector("[data-seq]")
    assert visitor.text("h1") == ["from a file"]


SMALL = "p=2&m=4&k=3&mem=100&p2p=0&stages=given"


def test_the_workbench_shows_every_schedule_and_what_a_moved_op_breaks(service: Service, visitor: Visitor) -> None:
    page = visitor.go(f"/workbench?{SMALL}&method=1f1b", ".sketch")
    page.wait_for_selector("[data-method='1f1b'][data-drawn]")
    problem = page.evaluate(
        "async () => { const {problemOf} = await import('/page/sliders.js'); return problemOf("
        "{p: 2, m: 4, v: 1, f: 10, b: 10, w: 8, mem: 100, k: 3, p2p: 0}); }"
    )
    asked = service.client.post("/v1/workbench", json={"problem": problem}).json()
    sketched = dict(zip(visitor.text(".sketch strong"), visitor.text(".sketch b"), strict=True))
    drawn = {
        row["method"]: asked["figure"]["schedules"][row["drawn"]] for row in asked["rows"] if row["drawn"] is not None
    }
    assert sketched == {method: f"{schedule['makespan_ms']:g} ms" for method, schedule in drawn.items()}
    assert drawn["1f1b"]["makespan_ms"] == systems.generate("1f1b", Problem.from_dict(problem)).makespan_ms
    assert serious(page) == []

    # Device 0 runs F0 F1 BW0 ...: BW0 before F1 is longer, before F0 it waits for its own forward.
    page.get_by_role("button", name="Edit").click()
    page.wait_for_selector(".verdict .good")
    box = page.locator(".plot").bounding_box()
    begin, end = page.evaluate("""() => { const {data, layout} = document.querySelector('.plot');
      return [layout.xaxis.range[1], layout.width]; }""")
    scale = (end - 64 - 14) / begin
    at = lambda time: (box["x"] + 64 + scale * time, box["y"] + 26 + 20)  # noqa: E731
    bw0 = 38.0 + 5
    page.mouse.move(*at(bw0))
    page.mouse.down()
    page.mouse.move(*at(12), steps=4)
    page.wait_for_selector(".dragged")
    page.mouse.move(*at(1), steps=4)
    page.wait_for_selector(".verdict .wrong")  # while it is held
    page.mouse.up()
    page.wait_for_selector("[data-edits='1']")
    told = visitor.text(".verdict li")
    assert told
    assert "moves=" in page.url

    shared = visitor.page.context.browser.new_page()
    shared.goto(page.url)
    shared.wait_for_selector("[data-edits='1'] .verdict .wrong")
    assert shared.locator(".verdict li").all_inner_texts() == told
    shared.close()

    page.get_by_role("button", name="Undo").click()
    page.wait_for_selector("[data-edits='0'] .verdict .good")

    finger = page.context.new_cdp_session(page)
    finger.send("Emulation.setTouchEmulationEnabled", {"enabled": True})
    for kind, time in (("touchStart", bw0), ("touchMove", 30), ("touchMove", 1), ("touchEnd", None)):
        points = [] if time is None else [dict(zip("xy", at(time), strict=True))]
        finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    page.wait_for_selector("[data-edits='1'] .verdict .wrong")
    assert visitor.text(".verdict li") == told
    finger.detach()


def test_a_trace_is_diagnosed_in_place(visitor: Visitor) -> None:
    page = visitor.go("/diagnose", ".drop")
    page.get_by_label("Search in s").fill("0")
    page.get_by_label("Layers of a stage").fill("8")
    trace = Path(__file__).parents[2] / "examples/traces/primus-8x16"
    page.set_input_files(".drop input", sorted(trace.iterdir()))  # sent as one archive
    page.wait_for_selector(".diagnosis[data-drawn]")
    assert visitor.text(".diagnosis .tile strong")[0] == "3253 ms"
    page.locator(".loss", has_text="stages that are uneven").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.plot').data.some(({name}) => name === 'marked')")
    assert serious(page) == []
    page.set_viewport_size({"width": 390, "height": 800})
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert serious(page) == []
    page.set_viewport_size({"width": 1400, "height": 950})
    page.emulate_media(color_scheme="light")
    page.set_input_files(".drop input", {"name": "x.txt", "mimeType": "text/plain", "buffer": b"nothing"})
    page.wait_for_selector(".notice.wrong")
    assert visitor.text(".notice")[0].startswith("diagnose: files/x.txt: like no form that is known")
    visitor.expected(MISSING)
