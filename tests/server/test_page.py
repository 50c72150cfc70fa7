"""The service's page in a real browser: all of its parts."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from support.browser import browser, new_page, watched
from support.problems.chain import chain
from support.processes import free_port
from support.service import client_at
from support.service.rest import submit, until_over
from support.service.serve_process import serve_process

from optpipe import Problem, ScheduleFile
from optpipe.schedule import timed_ops
from optpipe_server.database import Database
from optpipe_server.database.keys import Keys
from optpipe_solver import systems

__all__ = ["browser"]  # a fixture


class Service:
    """A server on a port that it keeps when it is started again."""

    def __init__(self, folder: Path) -> None:
        self.port, self.folder = free_port(), folder
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = client_at(self.url)
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        self._stack.enter_context(serve_process(self.folder, port=self.port))

    def kill(self) -> None:
        self._stack.close()


class Visitor:
    """A page of the service in a browser. `problems` are what its console says, and requests to others."""

    def __init__(self, browser: Any, service: Service) -> None:
        self.service = service
        self.page = new_page(browser, viewport={"width": 1400, "height": 950})
        self.problems = watched(self.page, service.url, "blob:")

    def go(self, path: str, drawn: str) -> Any:
        """Open a part of the page; return it once something is there."""
        self.page.goto(f"{self.service.url}/#{path}")
        self.page.wait_for_selector(drawn)
        return self.page

    def text(self, selector: str) -> list[str]:
        return list(self.page.locator(selector).all_inner_texts())

    def provoked_errors(self) -> None:
        """Forget what the console said of replies that are errors."""
        self.problems[:] = [each for each in self.problems if "Failed to load resource" not in each]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("service"))
    yield service
    service.client.close()
    service.kill()


@pytest.fixture
def visitor(browser: Any, service: Service) -> Iterator[Visitor]:
    visitor = Visitor(browser, service)
    yield visitor
    visitor.page.close()
    assert visitor.problems == []


def serious(page: Any) -> list[tuple[str, str]]:
    """What axe finds that keeps people out."""
    found = Axe().run(page).response["violations"]
    return [
        (each["id"], node["html"][:200])
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


HOSTILE = "<img src=x onerror=alert(1)> \u202e& co"
DRAWN = """() => {
  const page = document.querySelector('.page'), plot = document.querySelector('.plot');
  const boxes = plot.data.filter((trace) => trace.name && trace.name.startsWith('ops')).flatMap(({x, y}) =>
    Array.from({length: x.length / 6}, (_, i) => [x[6 * i], x[6 * i + 1], Math.floor(-y[6 * i])]));
  return {seq: page.dataset.seq, boxes};
}"""


def test_without_jobs_it_says_what_to_do(service: Service, visitor: Visitor) -> None:
    page = visitor.go("/", ".empty")
    assert visitor.text(".empty h2") == ["No jobs yet"]
    assert serious(page) == []
    reply = service.client.get("/")
    assert "default-src 'none'; script-src 'self';" in reply.headers["content-security-policy"]
    known = service.client.get("/", headers={"If-None-Match": reply.headers["etag"]})
    assert known.status_code == 304


def test_incumbents_are_painted_as_they_come_and_bars_are_the_apis(service: Service, visitor: Visitor) -> None:
    job = submit(service.client, chain(memory=12, m=12), "steps")
    page = visitor.go(f"/jobs/{job['id']}", "[data-seq]")
    over = until_over(service.client, job)
    last = over["best"]["seq"]
    assert last > 3
    page.wait_for_selector(f"[data-seq='{last}'][data-state='{over['state']}']")
    drawn = page.evaluate(DRAWN)
    schedule = ScheduleFile.model_validate(over["best"]["schedule"]).schedule()
    assert drawn["seq"] == str(last)
    stages = schedule.problem.stages
    boxes = [(op["start_ms"], op["end_ms"], stages[op["stage"]].device) for op in timed_ops(schedule)]
    assert sorted(map(tuple, drawn["boxes"])) == sorted(boxes)
    listed = service.client.get(f"{job['url']}/incumbents").json()["incumbents"]
    assert visitor.text(".cards td:first-child button") == [f"#{each['seq']}" for each in reversed(listed)]
    lines = service.client.get(f"{job['url']}/log").json()["lines"]
    assert visitor.text(".log li span") == [line["text"] for line in lines]
    assert serious(page) == []
    page.emulate_media(color_scheme="dark")
    assert serious(page) == []

    page.select_option(".wide .controls select >> nth=1", "1")
    page.wait_for_selector("[data-before='1']")
    names = page.evaluate("() => document.querySelector('.plot').layout.annotations.map(({text}) => text)")
    assert [name.split(" · ")[0].split(": ")[0] for name in names[:2]] == ["Before", "After"]

    reply = service.client.put(f"{job['url']}/adoptions/2", json={"step": 7, "measured_iteration_ms": 100.0})
    page.wait_for_selector(".adoptions tbody td")
    *told, measured = visitor.text(".adoptions tbody td")
    assert told == ["#2", "since step 7", f"{reply.json()['predicted_ms']:g} ms"]
    assert measured.startswith("100 ms (+")

    visitor.go("/", ".jobs tbody tr")
    assert visitor.text(".jobs tbody td:nth-child(3)") == [f"{over['value_ms']:g} ms"]


def test_the_list_is_filtered_and_sorted_and_two_jobs_stand_side_by_side(service: Service, visitor: Visitor) -> None:
    small, large = ({**chain(m=m).to_dict(), "name": f"of {m}"} for m in (3, 9))
    jobs = [
        service.client.post("/v1/jobs", json={"problem": problem, "method": "steps", "objective": objective}).json()
        for problem, objective in ((large, "makespan"), (small, "makespan"), (small, "span"))
    ]
    overs = [until_over(service.client, job) for job in jobs]
    page = visitor.go("/", ".jobs tbody tr")
    page.get_by_label("Filter").fill("OF done")
    page.get_by_label("Order").select_option("best")
    page.wait_for_function("() => document.querySelectorAll('table.jobs a.job').length === 3")
    assert visitor.text("a.job") == ["of 3", "of 3", "of 9"]
    apart = visitor.text("table.jobs small")
    ids = [job["id"][:8] for job in jobs]
    assert sorted(apart) == sorted([ids[0], f"makespan · {ids[1]}", f"span · {ids[2]}"])
    assert serious(page) == []
    page.get_by_label("Choose of 9").check()
    page.get_by_label("Choose of 3").first.check()
    page.get_by_role("button", name="Side by side").click()
    page.wait_for_selector("[data-before][data-seq]")
    page.wait_for_function("() => document.querySelector('.plot').layout.annotations.length === 3")
    names = page.evaluate("() => document.querySelector('.plot').layout.annotations.map(({text}) => text)")
    assert [name.split(":")[0] for name in names[:2]] == ["of 3", "of 9"]
    assert f"{overs[0]['best']['makespan_ms']:g} ms" in names[1]


def test_a_job_is_given_more_time_cancelled_and_deleted_and_its_name_stays_text(
    service: Service, visitor: Visitor
) -> None:
    problem = {**chain().to_dict(), "name": HOSTILE}
    job = service.client.post("/v1/jobs", json={"problem": problem, "method": "hang"}).json()
    page = visitor.go("/", "table.jobs")
    page.wait_for_function("(name) => document.querySelector('a.job')?.textContent === name", arg=HOSTILE)
    assert serious(page) == []
    page.locator("a.job").first.click()
    page.wait_for_selector("[data-state=running][data-seq]")
    assert page.locator("h1").text_content() == HOSTILE
    page.get_by_role("button", name="Give more time").click()
    page.get_by_label("Time limit").fill("77")
    page.get_by_role("button", name="Extend").click()
    page.wait_for_selector("dialog", state="detached")
    assert service.client.get(job["url"]).json()["options"]["time_limit_s"] == 77
    page.get_by_role("button", name="Cancel").click()
    page.wait_for_selector("[data-state=cancelled]")
    assert visitor.text(".notice") == ["the job was cancelled"]
    with page.expect_download() as saved:
        page.get_by_text("Download").click()
        page.get_by_role("button", name="Problem", exact=True).click()
    assert json.loads(Path(saved.value.path()).read_text())["name"] == HOSTILE
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.wait_for_selector("table.jobs, .empty")
    assert service.client.get(job["url"]).status_code == 404
    visitor.go(f"/jobs/{job['id']}", ".empty h2:text-is('There is no such job')")
    visitor.provoked_errors()


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
    asked = service.client.post("/v1/workbench", json={"problem": problem, "placements": "keep"}).json()
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

    shared = new_page(visitor.page.context.browser)
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
    page.set_input_files(".drop input", {"name": "x.txt", "mimeType": "text/plain", "buffer": b"nothing"})
    page.wait_for_selector(".notice.wrong")
    assert visitor.text(".notice")[0].startswith("diagnose: files/x.txt: like no form that is known")
    visitor.provoked_errors()


CUT = """const whole = fetch;
window.fetch = async (...request) => {
  const reply = await whole(...request);
  if (window.cut || !String(request[0]).includes('/incumbents')) return reply;
  window.cut = true;
  return new Response(new ReadableStream({ start: (body) => body.error(new TypeError('cut off')) }), reply);
};"""


def test_a_reply_that_breaks_off_is_asked_for_again(service: Service, visitor: Visitor) -> None:
    job = submit(service.client, chain(m=4, memory=4), "steps")
    visitor.page.add_init_script(CUT)
    page = visitor.go(f"/jobs/{job['id']}", "[data-seq]")
    assert page.evaluate("() => cut")
    page.wait_for_selector("body[data-connection=there]")


def test_killed_and_back_it_goes_on_without_a_gap_and_asks_for_a_key(service: Service, visitor: Visitor) -> None:
    job = submit(service.client, chain(memory=200, m=200), "slow steps", time_limit_s=600.0)
    page = visitor.go(f"/jobs/{job['id']}", "[data-seq]")
    page.wait_for_function("() => Number(document.querySelector('.page').dataset.known) > 3")
    service.kill()
    page.wait_for_selector("body[data-connection=away] #offline")
    assert page.locator(".plot").is_visible()
    service.start()
    page.wait_for_selector("body[data-connection=there]")
    page.wait_for_function(
        "(known) => Number(document.querySelector('.page').dataset.known) > known",
        arg=int(page.locator(".page").get_attribute("data-known")),
    )
    service.client.post(f"{job['url']}/cancel")
    page.wait_for_selector("[data-state=cancelled]")
    listed = service.client.get(f"{job['url']}/incumbents").json()["incumbents"]
    assert visitor.text(".cards td:first-child button") == [f"#{each['seq']}" for each in reversed(listed)]
    lines = service.client.get(f"{job['url']}/log").json()["lines"]
    assert visitor.text(".log li span") == [line["text"] for line in lines]
    database = Database(f"sqlite:///{service.folder / 'jobs.sqlite'}", secondary=True)
    key = Keys(database).create("somebody", ["read"])
    database.close()
    visitor.go("/", "form")
    page.get_by_label("Key").fill(key)
    page.keyboard.press("Enter")
    page.wait_for_selector(".jobs tbody tr")  # those of the whole team
    visitor.provoked_errors()
