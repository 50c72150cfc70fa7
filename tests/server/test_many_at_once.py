"""Many jobs and readers at once: nothing is lost, mixed up or left behind."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from support.fakes.service import document
from support.problems.chain import chain, gpipe, one_by_one
from support.service import client_of, events
from support.service.postgres import on_sqlite
from support.until import until

from optpipe_server import Settings, first_schedules
from optpipe_server.http import service

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


@on_sqlite
def test_large_problems_do_not_delay_small_ones(
    settings: Settings, fake_solver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_schedules, "LARGE", 20)
    monkeypatch.setattr(service, "MOST_LARGE", 2)
    monkeypatch.setattr(service, "FIRST_SCHEDULES_AT_ONCE", 3)
    limit_s = 20.0
    with client_of(replace(settings, solves=0, first_schedule_s=limit_s)) as (client, server):

        def one(m: int, method: str, **more: Any) -> Any:
            return client.post("/v1/jobs", json={"problem": chain(m=m).to_dict(), "method": method, **more})

        with ThreadPoolExecutor(8) as pool:
            began = time.monotonic()
            large = [pool.submit(one, 20, "asleep") for _ in range(8)]
            until(lambda: len(server.server_state.tasks) == len(large))
            assert one(2, "plain").json()["best"]
            assert not any(reply.done() for reply in large), "each waits for a schedule, which a search might find"
            assert [reply.result().status_code for reply in large] == [201] * 8
            assert time.monotonic() - began < 6 * limit_s, "they do not wait for each other"
            held = [pool.submit(one, 20, "asleep") for _ in range(2)]
            until(lambda: len(server.server_state.tasks) == len(held))
            refused = one(20, "plain", warm_start=document(one_by_one(chain(m=20))))
            assert (refused.status_code, "the warm start cannot be checked" in refused.json()["detail"]) == (503, True)

        def fail(*_: object) -> None:
            raise TimeoutError("of something else")

        monkeypatch.setattr(server.service.first_schedules, "find", fail)
        assert one(20, "plain").status_code == 500, "it is not taken for too long a wait"
