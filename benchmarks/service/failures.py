"""How long the service takes to recover from the loss of a worker or its database, and to end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from benchmarks.service.http_client import HttpConnection, HttpPool
from benchmarks.service.load import LONGEST_S, LOOK_S, expect, problem, running
from benchmarks.service.processes import Deployment
from optpipe.errors import OptPipeError


@dataclass
class Outage:
    """A restart of the database as a client sees it that keeps submitting."""

    recovery_s: float = 0.0  # from the moment the database had started again until a submission was taken in
    statuses: Counter[str] = field(default_factory=Counter)  # of the submissions in between
    lost: int = 0  # acknowledged jobs that are not there


async def reclaimed(deployment: Deployment, url: str) -> float:
    """Return the seconds from kill -9 of the job's solver until the job runs again, by another worker or a restarted
    service."""
    requests = HttpPool(deployment.address, deployment.keys[0])
    attempt = await running(requests, url, 0)
    if not deployment.sqlite:
        await deployment.work()  # it has nothing to do until then
    began = time.monotonic()
    if deployment.sqlite:
        await deployment.api.kill()
        await deployment.serve()
        requests.close()
    else:
        await deployment.workers.pop(0).kill()
    await running(requests, url, attempt)
    took = time.monotonic() - began
    requests.close()
    return took


async def outage(deployment: Deployment, restart: Callable[[], Awaitable[None]]) -> Outage:
    """Measure an outage of the database; `restart` stops it and starts it again."""
    seen, acknowledged, over = Outage(), list[str](), asyncio.Event()

    async def submitting() -> float:
        """Until one is taken in after the restart: when that was."""
        number = 3 * 10**6
        while True:
            requests, number = HttpPool(deployment.address, deployment.keys[1]), number + 1
            after = over.is_set()
            try:
                async with asyncio.timeout(30):
                    reply = await requests.request(
                        "POST", "/v1/jobs", {"problem": problem(number).to_dict(), "time_limit_s": 1.0}
                    )
            except (OSError, EOFError) as error:
                seen.statuses[type(error).__name__] += 1
            else:
                seen.statuses[str(reply.status)] += 1
                if reply.status == 201:
                    acknowledged.append(reply.json()["url"])
                    if after:
                        return time.monotonic()
            finally:
                requests.close()
            await asyncio.sleep(LOOK_S)

    submitted = asyncio.create_task(submitting())
    await asyncio.sleep(1.0)
    await restart()
    began = time.monotonic()
    over.set()
    seen.recovery_s = await submitted - began
    requests = HttpPool(deployment.address, deployment.keys[1])
    for url in acknowledged:
        seen.lost += (await requests.request("GET", url)).status != 200
    requests.close()
    return seen


async def shutdown(deployment: Deployment, streams: int) -> float:
    """Return the seconds from SIGTERM until the API's process has ended, with that many open event streams."""
    requests = HttpPool(deployment.address, deployment.keys[0])
    url = (
        await expect(requests, 201, "POST", "/v1/jobs", {"problem": problem(4 * 10**6).to_dict(), "priority": -100})
    )["url"]
    begun = 0

    async def follow() -> None:
        nonlocal begun
        connection = await HttpConnection.open(deployment.address, deployment.keys[0])
        try:
            async for _event in connection.events(f"{url}/events"):
                begun += 1
        finally:
            connection.abort()

    clients = [asyncio.create_task(follow()) for _ in range(streams)]
    while begun < streams:
        if any(client.done() for client in clients):
            raise OptPipeError("an event stream ended before the service did")
        await asyncio.sleep(LOOK_S)
    requests.close()
    began = time.monotonic()
    await deployment.api.end(LONGEST_S)
    took = time.monotonic() - began
    await asyncio.gather(*clients, return_exceptions=True)
    return took
