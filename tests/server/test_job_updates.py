"""Many clients follow a job: each sees every incumbent once, whatever happens to its connection, and one query serves
all."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.chain import chain
from support.fake_solver import together
from support.rest import submit
from support.service import running, settings_in

from optpipe.results import Result
from optpipe.schedule import Schedule
from optpipe_server.database import Database, Leases
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
    with running(replace(settings_in(tmp_path, database_url), solves=0, lease_s=60.0)) as served:
        yield served


def work(database: Database, pause_s: float) -> None:
    """Do what a worker does for one job, step by step."""
    leases = Leases(database, "test", 60.0)
    claim = leases.claim()
    assert claim is not None
    for schedule in BETTER:
        time.sleep(pause_s)
        leases.append(claim, Result("feasible", schedule, method=schedule.method))
    leases.finish(claim, "done", Result("feasible", BETTER[-1], method=BETTER[-1].method), 1.0)


class Watching:
    """How many clients watch, and how often nobody did after one had gone."""

    def __init__(self) -> None:
        self.open = self.unwatched = 0

    def gone(self) -> None:
        self.unwatched += self.open == 0

    @contextmanager
    def one(self) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1
            self.gone()


async def follow(
    http: httpx.AsyncClient, job: dict[str, Any], chance: random.Random, breaks: int, watching: Watching
) -> list[tuple[str, int]]:
    """The events of a client whose connection breaks several times and that continues after the last event."""
    seen: list[tuple[str, int]] = []
    last = 0
    while True:
        left = chance.randrange(1, 6) if breaks else -1
        async with http.stream("GET", f"{job['url']}/events", headers={"Last-Event-ID": str(last)}) as response:
            if response.status_code == 204:
                watching.gone()
                return seen
            assert response.status_code == 200, await response.aread()
            name = ""
            with watching.one():  # within the time that the server knows of
                async for line in response.aiter_lines():
                    if line.startswith("event: "):
                        name = line[7:]
                    elif line.startswith("data: ") and name == "incumbent":
                        last = json.loads(line[6:])["seq"]
                        seen.append((name, last))
                        left -= 1
                    elif line.startswith("data: "):
                        return [*seen, (name, json.loads(line[6:])["best"]["seq"])]
                    if left == 0:
                        break
        breaks -= 1


@pytest.mark.parametrize(("clients", "breaks"), [(40, 2), pytest.param(500, 1, marks=pytest.mark.soak)])
def test_every_client_sees_every_incumbent_once(
    api: Shared, clients: int, breaks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, server = api
    service = server.service
    asked: list[str] = []
    news, versions = service.jobs.updates, service.jobs.versions
    monkeypatch.setattr(service.jobs, "updates", lambda job_id, after: (asked.append("news"), news(job_id, after))[1])
    monkeypatch.setattr(service.jobs, "versions", lambda job_ids: (asked.append("versions"), versions(job_ids))[1])
    chance, watching = random.Random(clients), Watching()

    async def all_follow(job: dict[str, Any]) -> list[list[tuple[str, int]]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=240, trust_env=False, limits=limits) as http:
            return await asyncio.gather(*(follow(http, job, chance, breaks, watching) for _ in range(clients)))

    with httpx.Client(base_url=url, timeout=240, trust_env=False) as client:
        job = submit(client, PROBLEM, method="any")
    worker = threading.Thread(target=work, args=(service.database, 0.05))
    worker.start()
    began = time.monotonic()
    everything = asyncio.run(all_follow(job))
    took = time.monotonic() - began
    worker.join()
    incumbents = [("incumbent", seq) for seq in range(1, len(BETTER) + 2)]
    for seen in everything:
        assert seen in (incumbents, [*incumbents, ("end", len(incumbents))]), (
            "who comes back after the last one finds nothing more"
        )
    changes = len(BETTER) + 3  # begun, taken, ended
    assert asked.count("news") <= changes + 1 + watching.unwatched, "a topic that nobody watched is read anew"
    assert asked.count("versions") <= took / 0.05 + clients * (breaks + 1) + 10


def test_a_subscriber_waits_for_a_topic_that_is_too_old(api: Shared) -> None:
    """A client that has seen the reply to its change must not get an older state."""
    url, _ = api
    with httpx.Client(base_url=url, timeout=240, trust_env=False) as client:
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
