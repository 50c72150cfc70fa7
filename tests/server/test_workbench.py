"""The page's own routes: all schedules of a problem, an edited schedule, the queue, figures, lookup in the cache."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.problems.chain import chain, gpipe, one_by_one
from support.service.postgres import shared_on_sqlite
from support.service.rest import submit, until_running

from optpipe import compare
from optpipe.model.problem import Problem
from optpipe.schedule import ScheduleFile, check
from optpipe_server.http.server import Server
from optpipe_server.pool import pool
from optpipe_solver.systems import generate

pytestmark = [shared_on_sqlite]
PROBLEM = chain(m=4)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SLOW_S", 200.0)  # on a busy machine


def workbench(client: httpx.Client, **more: Any) -> httpx.Response:
    return client.post("/v1/workbench", json={"problem": PROBLEM.to_dict(), **more})


def test_it_has_the_rows_of_a_comparison(client: httpx.Client) -> None:
    reply = workbench(client, placements="all").json()
    shown = [row for row in reply["rows"] if row["drawn"] is not None]
    drawn = {row["method"]: reply["figure"]["schedules"][row["drawn"]]["makespan_ms"] for row in shown}
    rows = compare(PROBLEM, [row["method"] for row in reply["rows"]]).rows
    assert {row.method: row.makespan_ms for row in rows if row.schedule} == drawn
    assert {row.method: row.fits for row in rows} == {row["method"]: row["fits"] for row in reply["rows"]}
    makespans = [drawn[row["method"]] for row in reply["rows"] if row["fits"]]
    assert makespans == sorted(makespans)


def test_what_is_wrong_or_too_large_is_refused_and_the_next_is_answered(client: httpx.Client) -> None:
    unknown = workbench(client, methods=["nope"])
    assert (unknown.status_code, "nope" in unknown.json()["detail"]) == (422, True)
    large = workbench(client, problem=chain(m=300).to_dict())
    assert (large.status_code, "600 forwards" in large.json()["detail"]) == (422, True)
    assert workbench(client, methods=["gpipe"]).status_code == 200


@pytest.mark.parametrize(
    ("programs", "wrong", "drawn"),
    [
        (["0F0 0BW0 0F1 0BW1", "1F0 1BW0 1F1 1BW1"], None, True),
        (["0F0 0BW0 0F1 0BW1", "1F1 1BW1 1F0 1BW0"], "deadlock: 0BW0 waits for 1BW0", False),
        (["0BW0 0F0 0F1 0BW1", "1F0 1BW0 1F1 1BW1"], "0F0 stands after 0BW0", False),
        (["0F0 0F1 0BW0", "1F0 1BW0 1F1 1BW1"], "stage 0, micro-batch 1 has no backward", True),
        (["", ""], "0F0 is missing", False),
    ],
)
def test_an_edited_schedule_is_judged_and_drawn(
    client: httpx.Client, programs: list[str], wrong: str | None, drawn: bool
) -> None:
    problem = chain().to_dict()
    devices = [{"program": program.split()} for program in programs]
    asked = {"problem": problem, "schedule": {"problem": problem, "devices": devices}}
    reply = client.post("/v1/workbench", json=asked).json()
    (row,) = reply["rows"]
    assert row["wrong"] == check(chain(), ScheduleFile.model_validate(asked["schedule"]).schedule())
    assert row["wrong"] == [] if wrong is None else row["wrong"][0].startswith(wrong)
    assert row["fits"] == (wrong is None)
    assert (reply["figure"] is not None) == (row["drawn"] == 0) == drawn


def test_an_edited_schedule_is_placed_and_its_faults_are_few(client: httpx.Client) -> None:
    problem = chain(m=4, memory=20)
    interleaved = generate("interleaved", problem, "all")
    document = json.loads(ScheduleFile.from_schedule(interleaved).to_json())
    reply = workbench(client, problem=problem.to_dict(), schedule=document).json()
    assert (reply["rows"][0]["fits"], reply["rows"][0]["placement"]) == (True, document["placement"])
    assert reply["figure"]["schedules"][0]["makespan_ms"] == interleaved.makespan_ms
    long = json.loads(ScheduleFile.from_schedule(one_by_one(chain(m=200))).to_json())
    reply = workbench(client, problem=chain(m=4000).to_dict(), schedule=long).json()
    assert 1 < len(reply["rows"][0]["wrong"]) < 100


def test_a_known_schedule_is_found(client: httpx.Client, shared: tuple[str, Server]) -> None:
    problem, near = chain(memory=2), chain(memory=2, forward=1.2)

    def lookup(asked: Problem, **more: str) -> Any:
        reply = client.post("/v1/cache/lookup", json={"problem": asked.to_dict(), **more})
        assert reply.status_code == 200, reply.text
        return reply.json()["hit"]

    best = gpipe(problem)
    assert lookup(problem) is None
    shared[1].service.cache.open().add(best, "optimal", best.makespan_ms)
    hit = lookup(problem)
    assert (hit["exact"], hit["source"], hit["distance"], hit["status"]) == (True, "cache", 0.0, "optimal")
    assert hit["makespan_ms"] == hit["lower_bound_ms"] == best.makespan_ms
    assert hit["gap"] == 0.0
    assert ScheduleFile.model_validate(hit["schedule"]).schedule().programs == best.programs
    hit = lookup(near)
    assert (hit["exact"], hit["status"], hit["lower_bound_ms"], hit["gap"]) == (False, "feasible", None, None)
    assert hit["makespan_ms"] <= gpipe(near).makespan_ms
    assert hit["distance"] > 0
    assert hit["distance"] == pytest.approx(sum(hit["terms"].values()))
    assert lookup(problem, objective="span") is None


def test_the_queue_tells_who_runs_and_who_waits(client: httpx.Client) -> None:
    running = [submit(client, method="hang") for _ in range(4)]
    for job in running:
        until_running(client, job)
    waiting = submit(client, method="hang")
    queue = client.get("/v1/queue").json()
    assert [queue[name] for name in ("running", "waiting", "solves")] == [4, 1, 4]
    assert sorted(job for worker in queue["workers"] for job in worker["jobs"]) == sorted(job["id"] for job in running)
    assert waiting["state"] == "queued"


def test_a_figure_of_two_incumbents_marks_what_changed(client: httpx.Client) -> None:
    job = submit(client, chain(m=4, memory=4), "steps")
    client.get(job["url"], params={"wait": 60})
    both = client.get(f"{job['url']}/figure", params={"seq": 2, "before": 1}).json()
    listed = client.get(f"{job['url']}/incumbents").json()["incumbents"]
    assert [each["makespan_ms"] for each in both["schedules"]] == [each["makespan_ms"] for each in listed[:2]]
    assert all(each["ops"]["changed"] for each in both["schedules"])
    alone = client.get(f"{job['url']}/figure").json()
    assert [each["ops"]["changed"] for each in alone["schedules"]] == [None]
    assert client.get(f"{job['url']}/figure", params={"seq": 99}).status_code == 404
