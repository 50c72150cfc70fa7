"""The service's page in a real browser: the list of jobs, and one job as it goes on."""

from __future__ import annotations

import json
from pathlib import Path

from support.browser import browser
from support.problems.chain import chain
from support.service.rest import submit, until_over
from support.service.visitor import MISSING, Service, Visitor, page_of_module, serious, service, visitor

from optpipe.schedule import ScheduleFile, timed_ops
from optpipe_server.database import Database
from optpipe_server.database.keys import Keys

__all__ = ["browser", "page_of_module", "service", "visitor"]  # fixtures

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
    assert sorted(map(tuple, drawn["boxes"])) == sorted(
        (op["start_ms"], op["end_ms"], schedule.problem.stages[op["stage"]].device) for op in timed_ops(schedule)
    )
    listed = service.client.get(f"{job['url']}/incumbents").json()["incumbents"]
    assert visitor.text(".cards td:first-child button") == [f"#{each['seq']}" for each in reversed(listed)]
    lines = service.client.get(f"{job['url']}/log").json()["lines"]
    assert visitor.text(".log li span") == [line["text"] for line in lines]
    assert serious(page) == []
    page.emulate_media(color_scheme="dark")
    assert serious(page) == []
    page.emulate_media(color_scheme="light")

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
    assert sorted(apart) == sorted(
        [f"makespan · {jobs[1]['id'][:8]}", f"span · {jobs[2]['id'][:8]}", jobs[0]["id"][:8]]
    )
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
    visitor.expected(MISSING)


def test_killed_and_back_it_goes_on_without_a_gap_and_asks_for_a_key(service: Service, visitor: Visitor) -> None:
    job = submit(service.client, chain(memory=200, m=200), "steps", time_limit_s=300.0)
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
    assert visitor.text(".log li span") == [
        line["text"] for line in service.client.get(f"{job['url']}/log").json()["lines"]
    ]
    database = Database(f"sqlite:///{service.folder / 'jobs.sqlite'}", secondary=True)
    key = Keys(database).create("somebody", ["read"])
    database.close()
    visitor.go("/", "form")
    page.get_by_label("Key").fill(key)
    page.keyboard.press("Enter")
    page.wait_for_selector(".jobs tbody tr")  # those of the whole team
    visitor.expected(MISSING)
