"""Many jobs and readers at once: nothing is lost, mixed up or left behind."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from support.problems.chain import chain, gpipe
from support.service import client_of, events

from optpipe_server import Settings

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
