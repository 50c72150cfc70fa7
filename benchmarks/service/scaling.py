"""How many jobs a second workers solve together, on one PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from benchmarks.service.http_client import HttpPool
from benchmarks.service.load import expect, problem
from benchmarks.service.processes import Deployment

JOB_S = 1.0  # of each job's search, which does not end before
EACH = 4  # measured jobs of each worker
STAGES, MICROBATCHES = 8, 16


async def scaling(deployment: Deployment, workers: Sequence[int]) -> list[float]:
    """Jobs a second by so many workers. Every search takes its whole second, so n workers solve at most n a second; the
    rest is what the service and the start of solvers take, and, with fewer cores than workers, each other's work.

    Jobs of one round wait in the queue when the first of them starts; one before it for each worker is not measured.
    In the end there are as many workers as in the beginning.
    """
    requests, before = HttpPool(deployment.address, deployment.keys[0]), len(deployment.workers)
    rates = []
    for count in workers:
        while len(deployment.workers) < count:
            await deployment.work()
        await _solved(requests, count, seed=count)
        rates.append(_rate(await _solved(requests, EACH * count, seed=100 * count)))
    while len(deployment.workers) > before:
        await deployment.workers.pop().gone()
    requests.close()
    return rates


async def _solved(requests: HttpPool, jobs: int, seed: int) -> list[dict[str, Any]]:
    """Submit jobs that no bound proves, and return them when all are over."""
    options = {"time_limit_s": JOB_S, "threads": 1, "method": "lns"}
    urls = []
    for number in range(jobs):
        body = {"problem": problem(seed + number, STAGES, MICROBATCHES).to_dict(), **options}
        urls.append((await expect(requests, 201, "POST", "/v1/jobs", body))["url"])
    return [await expect(requests, 200, "GET", f"{url}?wait=60") for url in urls]


def _rate(jobs: Sequence[dict[str, Any]]) -> float:
    start, end = ([datetime.fromisoformat(job[name]) for job in jobs] for name in ("started_at", "ended_at"))
    return len(jobs) / (max(end) - min(start)).total_seconds()
