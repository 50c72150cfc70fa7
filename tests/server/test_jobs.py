"""From submission to the last incumbent, over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import httpx
from support.problems.chain import chain, one_by_one
from support.service.postgres import on_sqlite
from support.service.rest import submit, until_cached, until_over, until_running

from optpipe.evaluate.objective import TOLERANCE
from optpipe.schedule import ScheduleFile, check
from optpipe_server import Settings

Serving = Callable[[Settings], httpx.Client]


def test_the_reply_has_a_verified_schedule(client: httpx.Client) -> None:
    job = submit(client, method="hang")
    assert job["state"] in ("queued", "running")
    assert job["status"] == "feasible"
    best = job["best"]
    assert (best["seq"], best["source"], best["method"], best["attempt"]) == (1, "heuristic", "naive", 0)
    file = ScheduleFile.model_validate(best["schedule"])
    assert file.schedule().programs == one_by_one(chain()).programs
    assert check(chain(), file.schedule()) == []
    assert best["makespan_ms"] == file.makespan_ms == one_by_one(chain()).makespan_ms


def test_better_schedules_are_appended(client: httpx.Client) -> None:
    job = until_over(client, submit(client))
    assert (job["state"], job["status"]) == ("done", "feasible")
    assert job["created_at"] <= job["started_at"] <= job["ended_at"]
    found = client.get(f"{job['url']}/incumbents").json()["incumbents"]
    assert [(one["seq"], one["method"], one["source"]) for one in found] == [
        (1, "naive", "heuristic"),
        (2, "gpipe", "solver"),
    ]
    assert found[1]["makespan_ms"] < found[0]["makespan_ms"]
    assert client.get(f"{job['url']}/incumbents", params={"after": 1}).json()["incumbents"] == found[1:]
    best = client.get(f"{job['url']}/incumbents/best").json()
    assert best == job["best"] == client.get(found[1]["url"]).json()
    assert [one["id"] for one in client.get("/v1/jobs").json()["jobs"]] == [job["id"]]


def test_a_first_schedule_may_come_from_the_search(client: httpx.Client) -> None:
    job = submit(client, method="later")
    assert (job["best"]["source"], job["best"]["attempt"]) == ("solver", 1)


@on_sqlite
def test_a_silent_solver_does_not_delay_the_reply(serving: Serving, settings: Settings, fake_solver: None) -> None:
    client = serving(replace(settings, first_schedule_s=0.3))
    began = time.monotonic()
    job = submit(client, method="silent")
    assert time.monotonic() - began < 60
    assert (job["state"] in ("queued", "running"), job["best"]) == (True, None)
    client.post(f"{job['url']}/cancel")
    assert until_over(client, job)["state"] == "cancelled"


@on_sqlite
def test_the_limit_of_open_jobs_refuses(serving: Serving, settings: Settings, fake_solver: None) -> None:
    client = serving(replace(settings, open_jobs=2))
    until_running(client, submit(client, method="hang"))
    submit(client, method="hang")
    reply = client.post("/v1/jobs", json={"problem": chain(forward=2.0).to_dict(), "method": "hang"})
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "10"


def test_solved_schedules_are_found_again(client: httpx.Client) -> None:
    solved = until_cached(client, submit(client))
    again = submit(client, method="auto")
    assert (again["best"]["seq"], again["best"]["source"]) == (1, "cache")
    assert again["best"]["schedule"]["devices"] == solved["best"]["schedule"]["devices"]
    near = submit(client, chain(scale=3.0), method="auto")
    assert near["best"]["source"] == "cache"
    assert near["best"]["makespan_ms"] <= 3 * solved["best"]["makespan_ms"] * (1 + TOLERANCE)
