"""The service under load: how long replies and events take while solvers use all cores."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from benchmarks.problems import GB, pipeline, stage_costs
from benchmarks.service.http_client import HttpConnection, HttpPool
from benchmarks.service.processes import Deployment
from optpipe.errors import OptPipeError
from optpipe.model.problem import Problem

MS = 1e3
LOADING_S = 600.0  # for a new machine to compile what makes first schedules
WARM_UP_S = 2.0  # of load that is not measured
SIZES = ((4, 8), (8, 16), (8, 41), (16, 64), (16, 256), (16, 512))  # stages and micro-batches of first schedules
STARTS_S, LONGEST_S, LOOK_S = 60.0, 120.0, 0.1
BURST, BURST_CLIENTS = 60, 32  # submissions for each problem of a size, and how many wait at a time
GETS_PER_POST = 1
JOBS = 10  # followed ones
RECONNECT_S = 0.05  # after which a disconnected client comes back
ARRIVES_S = 10.0  # for the last events


def problem(seed: int, stages: int = 4, microbatches: int = 8, drift: float = 1.0) -> Problem:
    """Return a pipeline with random costs, all multiplied by `drift`, and memory for two activations, so that most have
    to be offloaded."""
    chance = random.Random(seed)

    def about(value: float) -> float:
        return round(value * chance.uniform(0.8, 1.25) * drift, 3)

    p2p_ms = about(1.0)
    costs = []
    for _ in range(stages):
        stage = stage_costs((about(10.0), about(10.0), about(8.0)), GB, saved=3 * 10**8, transfer_ms=about(12.0))
        costs.append(stage | {"reload_ms": about(12.0)})
    return pipeline(costs, microbatches, 2 * GB, name=f"bench {seed}", p2p_ms=p2p_ms)


@dataclass
class LoadFigures:
    """Times of requests, in ms from the moment they were due, and their statuses."""

    post_ms: list[float] = field(default_factory=list)
    get_ms: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    without_schedule: int = 0  # replies without a schedule


@dataclass
class StreamFigures:
    """What the clients of event streams received."""

    clients: int
    # From the moment an incumbent was stored until a client had it.
    fan_out_ms: list[float] = field(default_factory=list)
    events: int = 0
    reconnects: int = 0
    gaps: int = 0
    duplicates: int = 0


async def saturate(deployment: Deployment) -> str:
    """Start a search that does not end by itself, on all cores; return its URL once it runs."""
    requests = HttpPool(deployment.address, deployment.keys[0])
    body = {"problem": problem(-1, 8, 32).to_dict(), "time_limit_s": 3600.0, "priority": 100}
    url: str = (await expect(requests, 201, "POST", "/v1/jobs", body))["url"]
    await running(requests, url, 0)
    requests.close()
    return url


async def running(requests: HttpPool, url: str, after: int) -> int:
    """Wait until the job runs in an attempt later than `after`; return that attempt."""
    began = time.monotonic()
    while time.monotonic() - began < LONGEST_S:
        job = await expect(requests, 200, "GET", url)
        if job["state"] == "running" and job["attempt"] > after:
            return int(job["attempt"])
        await asyncio.sleep(LOOK_S)
    raise OptPipeError(f"{url}: not running after {LONGEST_S:g} s")


async def first_schedules(deployment: Deployment, each: int) -> list[tuple[int, float]]:
    """Submit so many problems of each size, one after the other; return the compute ops of each, and the s until its
    reply with a schedule."""
    figures = []
    with closing(HttpPool(deployment.address, deployment.keys[0])) as requests:
        await _makes_first_schedules(requests)
        for seed in range(each):
            for stages, microbatches in SIZES:
                body = {"problem": problem(10**7 + seed, stages, microbatches).to_dict(), "time_limit_s": 0.1}
                began = time.perf_counter()
                job = await expect(requests, 201, "POST", "/v1/jobs", body)
                while job["best"] is None:  # not within the service's limit, on a busy machine
                    if time.perf_counter() - began > LONGEST_S:
                        raise OptPipeError(f"{job['url']}: no schedule after {LONGEST_S:g} s")
                    await asyncio.sleep(LOOK_S)
                    job = await expect(requests, 200, "GET", job["url"])
                figures.append((3 * stages * microbatches, time.perf_counter() - began))
                await requests.request("POST", f"{job['url']}/cancel")  # so that the service is idle again
    return figures


async def burst(deployment: Deployment, each: int) -> float:
    """Return how many submissions a second are answered with a schedule to `BURST_CLIENTS` that send one after the
    other. Raises `OptPipeError` for another status than 201."""
    numbers, answered = iter(range(BURST * each)), 0

    async def client(requests: HttpPool) -> None:
        nonlocal answered
        for number in numbers:
            body = {"problem": problem(4 * 10**7 + number).to_dict(), "time_limit_s": 0.1}
            key = deployment.keys[number % len(deployment.keys)]
            reply = await requests.request("POST", "/v1/jobs", body, key)
            if reply.status != 201:
                raise OptPipeError(f"POST /v1/jobs: {reply.status}")
            answered += reply.json()["best"] is not None

    began = time.monotonic()
    with closing(HttpPool(deployment.address, deployment.keys[0])) as requests:
        await asyncio.gather(*(client(requests) for _ in range(BURST_CLIENTS)))
    return answered / (time.monotonic() - began)


async def submissions(deployment: Deployment, rate: float, seconds: float) -> LoadFigures:
    """Submit `rate` jobs a second, each with another problem, and read jobs `GETS_PER_POST` times as often.

    Requests are sent when they are due, whether the former ones were answered or not, and measured from then on. The
    load begins once the service makes first schedules: on a new machine it compiles them for a while.
    """
    load = _Load(deployment)
    await _makes_first_schedules(load.requests)
    begin = time.perf_counter()
    await asyncio.gather(
        _at_rate(load.post, rate, begin, seconds), _at_rate(load.get, rate * GETS_PER_POST, begin, seconds)
    )
    load.requests.close()
    return load.figures


async def _at_rate(
    ask: Callable[[int, float, bool], Coroutine[Any, Any, None]], rate: float, begin: float, seconds: float
) -> None:
    """Ask again and again, each time with a number, the moment that is due, and whether it counts."""
    async with asyncio.TaskGroup() as group:
        for number in range(int((WARM_UP_S + seconds) * rate)):
            due = begin + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(ask(number, due, due >= begin + WARM_UP_S))


class _Load:
    """The clients that submit jobs and read them."""

    def __init__(self, deployment: Deployment) -> None:
        self.figures = LoadFigures()
        self.requests = HttpPool(deployment.address, deployment.keys[0])
        self._deployment = deployment
        self._jobs: list[tuple[str, str]] = []  # URLs of those submitted, with their keys
        self._submitted = asyncio.Event()
        self._chance = random.Random(1)

    async def post(self, number: int, due: float, counts: bool) -> None:
        key = self._deployment.keys[number % len(self._deployment.keys)]
        body = {"problem": problem(number).to_dict(), "time_limit_s": 5.0}
        reply = await self.requests.request("POST", "/v1/jobs", body, key)
        if reply.status == 201:
            job = reply.json()
            self._jobs.append((job["url"], key))
            self._submitted.set()
            self.figures.without_schedule += counts and job["best"] is None
        if counts:
            self.figures.statuses[reply.status] += 1
            self.figures.post_ms.append((time.perf_counter() - due) * MS)

    async def get(self, _number: int, due: float, counts: bool) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._submitted.wait(), LONGEST_S)
        if not self._jobs:
            return
        path, key = self._chance.choice(self._jobs)
        reply = await self.requests.request("GET", path, key=key)
        if counts:
            self.figures.statuses[reply.status] += 1
            self.figures.get_ms.append((time.perf_counter() - due) * MS)


async def _makes_first_schedules(requests: HttpPool) -> None:
    """Wait until a job is answered with a schedule."""
    began, seed = time.monotonic(), 2 * 10**6
    while time.monotonic() - began < LOADING_S:
        job = await expect(requests, 201, "POST", "/v1/jobs", {"problem": problem(seed).to_dict()})
        await requests.request("POST", f"{job['url']}/cancel")
        if job["best"] is not None:
            return
        seed += 1
    raise OptPipeError(f"POST /v1/jobs: no first schedule after {LOADING_S:g} s")


async def streams(deployment: Deployment, clients: int, reconnects: int, seconds: float) -> StreamFigures:
    """Let clients follow a few waiting jobs; each job gets other costs, and so an incumbent, about once a second.

    Some clients are disconnected abruptly and go on after the last event that they had. In the end each must have every
    number exactly once.
    """
    figures = StreamFigures(clients)
    requests = HttpPool(deployment.address, deployment.keys[0])
    jobs, seed = dict[str, int](), 10**6
    while len(jobs) < JOBS:
        job = await expect(requests, 201, "POST", "/v1/jobs", {"problem": problem(seed).to_dict()})
        if job["state"] == "queued":  # others were proven optimal at once
            jobs[job["url"]] = seed
        seed += 1
    followers = [_Follower(figures, deployment, [*jobs][number % JOBS]) for number in range(clients)]
    tasks = [asyncio.create_task(follower.follow()) for follower in followers]
    try:
        await until(lambda: all(follower.last for follower in followers), STARTS_S, "clients did not get a first event")
        figures.fan_out_ms.clear()
        await asyncio.gather(_drift(requests, jobs, seconds), _cut(figures, followers, reconnects, seconds))
        last = {job: (await expect(requests, 200, "GET", job))["best"]["seq"] for job in jobs}
        with suppress(OptPipeError):
            await until(lambda: all(follower.last == last[follower.job] for follower in followers), ARRIVES_S, "")
        figures.gaps += sum(max(0, last[follower.job] - follower.last) for follower in followers)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    requests.close()
    return figures


class _Follower:
    """One client of a stream, which reconnects when it is disconnected."""

    def __init__(self, figures: StreamFigures, deployment: Deployment, job: str) -> None:
        self.job, self.last = job, 0
        self._figures, self._deployment = figures, deployment
        self.connection: HttpConnection | None = None

    async def follow(self) -> None:
        while True:
            connection = self.connection = await HttpConnection.open(self._deployment.address, self._deployment.keys[0])
            since = time.time()
            try:
                with suppress(OSError, EOFError):
                    async for event in connection.events(f"{self.job}/events", self.last):
                        if event.name == "incumbent" and event.number is not None:
                            self._take(event.number, since, datetime.fromisoformat(event.data["found_at"]).timestamp())
            finally:
                connection.abort()
            await asyncio.sleep(RECONNECT_S)

    def _take(self, number: int, since: float, found: float) -> None:
        figures = self._figures
        figures.events += 1
        figures.duplicates += number <= self.last
        figures.gaps += max(0, number - self.last - 1)
        self.last = max(self.last, number)
        if found >= since:  # not the events that were replayed after a reconnect
            figures.fan_out_ms.append((time.time() - found) * MS)


async def _drift(requests: HttpPool, jobs: Mapping[str, int], seconds: float) -> None:
    """Change the costs of one job (URL -> seed) after the other."""
    begin, number = time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        url, seed = [*jobs.items()][number % len(jobs)]
        number += 1
        await expect(
            requests, 200, "POST", f"{url}/problem", {"problem": problem(seed, drift=1 + number / 1000).to_dict()}
        )
        await asyncio.sleep(max(0.0, begin + number / len(jobs) - time.monotonic()))


async def _cut(figures: StreamFigures, followers: Sequence[_Follower], reconnects: int, seconds: float) -> None:
    chance = random.Random(2)
    for _ in range(reconnects):
        await asyncio.sleep(seconds / reconnects)
        connection = chance.choice(followers).connection
        assert connection is not None
        connection.abort()
        figures.reconnects += 1


async def expect(requests: HttpPool, status: int, method: str, path: str, body: Any = None) -> Any:
    """The reply's JSON; raises `OptPipeError` for another status."""
    reply = await requests.request(method, path, body)
    if reply.status != status:
        raise OptPipeError(
            f"{method} {path}: {reply.status} instead of {status}: {reply.body[:500].decode(errors='replace')}"
        )
    return reply.json()


async def until(true: Callable[[], bool], limit_s: float, otherwise: str) -> None:
    """Wait for the condition. Raises `OptPipeError` with that message if it takes too long."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > limit_s:
            raise OptPipeError(otherwise)
        await asyncio.sleep(0.02)
