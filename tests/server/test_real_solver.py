"""The service with the real solver behind it."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest
from support.problems.chain import chain
from support.service import events
from support.service.postgres import on_sqlite

from optpipe_server import Settings

Serving = Callable[[Settings], httpx.Client]


@pytest.fixture
def client(serving: Serving, settings: Settings) -> httpx.Client:
    return serving(settings)


@on_sqlite
def test_an_answer_that_needs_no_worker_is_cached_too(client: httpx.Client) -> None:
    problem = chain(memory=4, m=2)
    job = client.post("/v1/jobs", json={"problem": problem.to_dict()}).json()
    assert (job["state"], job["best"]["source"]) == ("done", "heuristic")
    hit = client.post("/v1/cache/lookup", json={"problem": problem.to_dict()}).json()["hit"]
    assert (hit["exact"], hit["status"]) == (True, "optimal")


@on_sqlite
def test_the_milp_asked_for_by_name_runs_though_the_first_schedule_is_proven(client: httpx.Client) -> None:
    asked = {"problem": chain(memory=4, m=2).to_dict(), "method": "milp", "time_limit_s": 60.0}
    job = client.post("/v1/jobs", json=asked).json()
    assert job["state"] in ("queued", "running")
    assert job["gap"] == 0.0
    with client.stream("GET", f"{job['url']}/events") as response:
        *_, end = [json.loads(event["data"]) for event in events(response)]
    assert (end["state"], end["gap"]) == ("done", 0.0)
    lines = client.get(f"{job['url']}/log").json()["lines"]
    levels = {line["level"] for line in lines if line["text"].startswith("milp: HiGHS: optimal after ")}
    assert levels == {"info"}  # nothing is wrong
