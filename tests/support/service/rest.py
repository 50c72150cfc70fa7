"""One valid request for every route of the service, and what tests do with jobs over HTTP."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Mount

from optpipe import Problem, ScheduleFile
from optpipe_server.database.tables import OPEN
from optpipe_server.http.tools import UPLOADED
from support.problems.chain import chain, gpipe
from support.processes import until

PROBLEM = chain().to_dict()
DRIFTED = chain(scale=2.0).to_dict()
SCHEDULE = json.loads(ScheduleFile.from_schedule(gpipe(chain())).to_json())
IF_MATCH = "<the job's>"


@dataclass(frozen=True)
class Call:
    """A request to a job that has incumbent 1, and the status of its reply."""

    method: str
    path: str
    scope: str | None
    status: int
    body: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def ask(
        self, client: httpx.Client, job_id: str, headers: dict[str, str] | None = None, content: Any = None
    ) -> httpx.Response:
        """Send it, with other content if given."""
        path = self.path.replace("{job_id}", job_id).replace("{seq}", "1")
        if content is None and self.body is not None:
            content = json.dumps(self.body)
        kind = {"Content-Type": "application/json"} if content is not None else {}
        return client.request(self.method, path, headers={**kind, **self.headers, **(headers or {})}, content=content)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


CALLS = [
    Call("GET", "/healthz", None, 200),
    Call("GET", "/readyz", None, 200),
    Call("GET", "/metrics", "admin", 200),
    Call("GET", "/openapi.json", "read", 200),
    Call("GET", "/", None, 200),
    Call("GET", "/v1/queue", "read", 200),
    Call("GET", "/v1/jobs", "read", 200),
    Call("POST", "/v1/jobs", "submit", 201, {"problem": PROBLEM, "method": "prove"}),
    Call("GET", "/v1/jobs/{job_id}", "read", 200),
    Call("GET", "/v1/jobs/{job_id}/incumbents", "read", 200),
    Call("GET", "/v1/jobs/{job_id}/incumbents/best", "read", 200),
    Call("GET", "/v1/jobs/{job_id}/bounds", "read", 200),
    Call("GET", "/v1/jobs/{job_id}/incumbents/{seq}", "read", 200),
    Call("GET", "/v1/jobs/{job_id}/events", "read", 200),
    Call("GET", "/v1/jobs/{job_id}/log", "read", 200),
    Call("GET", "/v1/jobs/{job_id}/trace", "read", 200),
    Call("GET", "/v1/jobs/{job_id}/figure", "read", 200),
    Call("GET", "/v1/jobs/{job_id}/export", "read", 200),
    Call("GET", "/v1/jobs/{job_id}/adoptions", "read", 200),
    Call("PUT", "/v1/jobs/{job_id}/adoptions/{seq}", "submit", 200, {"step": 5, "measured_iteration_ms": 9.5}),
    Call("PUT", "/v1/jobs/{job_id}/lease", "submit", 204),
    Call("POST", "/v1/jobs/{job_id}/cancel", "submit", 202),
    Call("PATCH", "/v1/jobs/{job_id}", "submit", 409, {"time_limit_s": 3000.0}, {"If-Match": IF_MATCH}),  # it is over
    Call("POST", "/v1/jobs/{job_id}/problem", "submit", 200, {"problem": DRIFTED}),
    Call("POST", "/v1/workbench", "read", 200, {"problem": PROBLEM, "methods": ["gpipe"]}),
    Call("POST", "/v1/diagnose", "read", 422, {"no": "trace"}, {"Content-Type": UPLOADED}),
    Call("POST", "/v1/cache/lookup", "read", 200, {"problem": PROBLEM}),
    Call("DELETE", "/v1/jobs/{job_id}", "submit", 204),
]


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Yield method and path of all routes of the app, without the page's files."""
    for route in app.routes:
        if isinstance(route, Mount):
            continue
        for one in route.effective_candidates() if hasattr(route, "effective_candidates") else [route]:
            yield from ((method, one.path) for method in one.methods if (method, one.path) != ("HEAD", "/openapi.json"))


def submit(client: httpx.Client, problem: Problem | None = None, method: str = "plain", **more: Any) -> dict[str, Any]:
    reply = client.post("/v1/jobs", json={"problem": (problem or chain()).to_dict(), "method": method, **more})
    assert reply.status_code == 201, reply.text
    job = reply.json()
    assert reply.headers["location"] == job["url"]
    assert reply.headers["etag"] == f'"{job["version"]}"'
    return job


def until_over(client: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = client.get(job["url"], params={"wait": 60}).json()
    assert shown["state"] not in OPEN, shown
    return shown


def until_running(client: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    """Wait until a worker has the job; return it."""
    reply = client.get(job["url"])
    while reply.json()["state"] == "queued":
        reply = client.get(job["url"], params={"wait": 60}, headers={"If-None-Match": reply.headers["etag"]})
        assert reply.status_code == 200, "nothing changed for long"
    return reply.json()


def until_cached(client: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    """Wait until the job's schedule is in the cache, which is moments after its end; return the job."""
    over = until_over(client, job)
    body = {"problem": over["best"]["schedule"]["problem"], "objective": over["options"]["objective"]}
    until(lambda: (hit := client.post("/v1/cache/lookup", json=body).json()["hit"]) and hit["exact"])
    return over


def sound(reply: httpx.Response, slow: bool = False) -> None:
    """Check that the reply is an answer, or one sentence why there is none: also 503 from a route that is `slow`."""
    assert reply.status_code < 500 or (slow and reply.status_code == 503), reply.text[:1000]
    if reply.status_code >= 400:
        assert reply.headers["content-type"] == "application/problem+json"
        assert len(reply.content) < 2000
        document = reply.json()
        assert set(document) == {"type", "title", "status", "detail"}
        assert document["status"] == reply.status_code
        assert document["detail"].strip()
        assert "\n" not in document["detail"]
    elif reply.headers.get("content-type") == "application/json":
        json.loads(reply.content, parse_constant=pytest.fail)
