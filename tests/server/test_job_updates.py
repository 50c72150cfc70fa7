"""Many clients follow jobs: each sees every incumbent once, whatever happens to its connection; one query for all."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fakes.solver import together
from support.problems.chain import chain, gpipe
from support.service import client_at, client_of, events, running, settings_in
from support.service.rest import submit

from optpipe.results import Result
from optpipe.schedule import Schedule
from optpipe_server import Settings
from optpipe_server.database import Database
from optpipe_server.database.searches import Searches
from optpipe_server.http.job_updates import POLL_S
from optpipe_server.http.server import Server

M = 12
PROBLEM = chain(m=M, memory=M)

# The more micro-batches together, the shorter.
BETTER = [
    Schedule.parse(PROBLEM, [program.split() for program in together(M, last)], method=f"{last} together")
    for last in range(2, M + 1)
]

Shared = tuple[str, Server]


@pytest.fixture
def api(database_url: str, tmp_path: Path, fake_solver: None) -> Iterator[Shared]:
    """A server whose jobs the test itself works on."""
    with running(replace(settings_in(tmp_path, database_url), solves=0)) as served:
        yield served


def work(database: Database, pause_s: float) -> None:
    """Do what a worker does for one job, step by step."""
    searches = Searches(database, "test")
    job_id = searches.first_open(())
    assert job_id is not None
    claim = searches.begin(job_id)
    assert claim is not None
    for schedule in BETTER:
        time.sleep(pause_s)
        searches.append(claim, Result("feasible", schedule, method=schedule.method))
    searches.finish(claim, "done", Result("feasible", BETTER[-1], method=BETTER[-1].method), 1.0)


async def follow(http: httpx.AsyncClient, job: dict[str, Any], chance: random.Random, breaks: int) -> list[int]:
    """The incumbents that a client sees whose connection breaks several times, and that continues after the last."""
    seen: list[int] = []
    while True:
        left = chance.randrange(1, 6) if breaks else -1
        last = {"Last-Event-ID": str(seen[-1] if seen else 0)}
        async with http.stream("GET", f"{job['url']}/events", headers=last) as response:
            if response.status_code == 204:
                return seen
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "event: end":
                    return seen
                if line.startswith("data: "):
                    seen.append(json.loads(line[6:])["seq"])
                    left -= 1
                if left == 0:
                    break
        breaks -= 1


@pytest.mark.parametrize(("clients", "breaks"), [(40, 2), pytest.param(500, 1, marks=pytest.mark.soak)])
def test_every_client_sees_every_incumbent_once(
    api: Shared, clients: int, breaks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, server = api
    service = server.service
    asked: list[float] = []
    versions = service.jobs.versions
    monkeypatch.setattr(service.jobs, "versions", lambda ids: (asked.append(time.monotonic()), versions(ids))[1])
    chance = random.Random(clients)

    async def all_follow(job: dict[str, Any]) -> list[list[int]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=240, trust_env=False, limits=limits) as http:
            return await asyncio.gather(*(follow(http, job, chance, breaks) for _ in range(clients)))

    with client_at(url) as client:
        job = submit(client, PROBLEM, method="any")
    worker = threading.Thread(target=work, args=(service.database, 0.05))
    worker.start()
    everything = asyncio.run(all_follow(job))
    worker.join()
    assert everything == [list(range(1, len(BETTER) + 2))] * clients
    assert len(asked) <= (asked[-1] - asked[0]) / POLL_S + clients * (breaks + 1) + 10, "one query serves all"


def test_a_subscriber_waits_for_a_topic_that_is_too_old(api: Shared) -> None:
    """A client that has seen the reply to its change must not get an older state."""
    url, _ = api
    with client_at(url) as client:
        job = submit(client, PROBLEM, method="any")
        with client.stream("GET", f"{job['url']}/events") as response:
            lines = response.iter_lines()
            assert next(lines) == "id: 1"
            for time_limit_s in range(100, 110):
                extended = client.patch(
                    job["url"], json={"time_limit_s": time_limit_s}, headers={"If-Match": f'"{job["version"]}"'}
                )
                assert extended.status_code == 200
                job = extended.json()
                known = client.get(
                    job["url"], params={"wait": 0.01}, headers={"If-None-Match": extended.headers["etag"]}
                )
                assert known.status_code == 304


JOBS = 8


def test_every_job_gets_its_own_schedules_and_its_end(settings: Settings, fake_solver: None) -> None:
    problems = [chain(m=1 + n % 3, memory=3, forward=1.0 + n) for n in range(JOBS)]
    with client_of(replace(settings, solves=2, first_schedule_s=60.0)) as (client, server):

        def one(n: int) -> tuple[dict[str, object], list[int]]:
            job = client.post("/v1/jobs", json={"problem": problems[n].to_dict(), "method": "plain"}).json()
            assert job["best"]["schedule"]["problem"] == problems[n].to_dict()
            with client.stream("GET", f"{job['url']}/events") as response:
                *found, end = list(events(response))
            return json.loads(end["data"]), [int(event["id"]) for event in found]

        with ThreadPoolExecutor(JOBS) as pool:
            ends = list(pool.map(one, range(JOBS)))
        for problem, (end, seqs) in zip(problems, ends, strict=True):
            assert end["state"] == "done"
            assert end["problem_sha256"] == problem.sha256
            assert seqs == list(range(1, len(seqs) + 1))
            best = client.get(f"{end['url']}/incumbents/best").json()
            assert best["makespan_ms"] == gpipe(problem).makespan_ms
        assert server.service.job_updates._topics == {}
