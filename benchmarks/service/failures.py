"""How long the service takes to begin, to recover from the loss of a worker, and to end."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from benchmarks.service.http_client import HttpConnection, HttpPool
from benchmarks.service.load import LONGEST_S, LOOK_S, expect, problem, running
from benchmarks.service.processes import Deployment, Process
from optpipe.errors import OptPipeError


async def cold_start(folder: Path, busy: int) -> float:
    """Return the seconds from the start of a service, where nothing is compiled, to a first schedule in a reply, beside
    so many processes that compute."""
    others = [await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass") for _ in range(busy)]
    nothing = {"NUMBA_CACHE_DIR": str(folder / "compiled"), "XDG_CACHE_HOME": str(folder / "users")}
    began = time.monotonic()
    serve = ("serve", "--database", f"sqlite:///{folder / 'cold.sqlite'}", "--port", "0")
    service = await Process.start(folder, "cold", *serve, **nothing)
    try:
        requests = HttpPool(("127.0.0.1", int((await service.says()).rsplit(":", 1)[1])), None)
        while (await requests.request("GET", "/readyz")).status != 200:
            await asyncio.sleep(LOOK_S)
        job = await expect(requests, 201, "POST", "/v1/jobs", {"problem": problem(3 * 10**7).to_dict()})
        if job["best"] is None:
            raise OptPipeError("a service that was ready answered without a schedule")
        return time.monotonic() - began
    finally:
        for process in others:
            process.kill()
        requests.close()
        await service.gone()


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
