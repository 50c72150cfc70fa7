"""What tests do with jobs over HTTP."""

from __future__ import annotations

from typing import Any

import httpx

from optpipe.model.problem import Problem
from optpipe_server.database.tables import OPEN
from support.problems.chain import chain
from support.until import until


def submit(client: httpx.Client, problem: Problem | None = None, method: str = "plain", **more: Any) -> dict[str, Any]:
    """Submit a job; return the reply."""
    reply = client.post("/v1/jobs", json={"problem": (problem or chain()).to_dict(), "method": method, **more})
    assert reply.status_code == 201, reply.text
    job: dict[str, Any] = reply.json()
    assert reply.headers["location"] == job["url"]
    assert reply.headers["etag"] == f'"{job["version"]}"'
    return job


def until_over(client: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    """Wait until the job is over; return it."""
    shown: dict[str, Any] = client.get(job["url"], params={"wait": 60}).json()
    assert shown["state"] not in OPEN, shown
    return shown


def until_running(client: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    """Wait until a worker has the job; return it."""
    reply = client.get(job["url"])
    while reply.json()["state"] == "queued":
        reply = client.get(job["url"], params={"wait": 60}, headers={"If-None-Match": reply.headers["etag"]})
        assert reply.status_code == 200, "nothing changed for long"
    shown: dict[str, Any] = reply.json()
    return shown


def until_cached(client: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    """Wait until the job's schedule is in the cache, which is moments after its end; return the job."""
    over = until_over(client, job)
    body = {"problem": over["best"]["schedule"]["problem"], "objective": over["options"]["objective"]}
    until(lambda: (hit := client.post("/v1/cache/lookup", json=body).json()["hit"]) and hit["exact"])
    return over
