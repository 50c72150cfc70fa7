"""The database goes away and comes back: 503 meanwhile, every acknowledged job is stored, and streams continue."""

from __future__ import annotations

import json
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.problems.chain import chain
from support.service import client_of, events, settings_in
from support.service.postgres import Postgres
from support.service.rest import submit
from support.service.serve_process import serve_process
from support.until import until

ENDS_S = 60.0  # what the end of a service may take
BODY = {"problem": chain().to_dict(), "method": "infeasible"}


@pytest.fixture
def server() -> Any:
    """A PostgreSQL server of this test's own, which it may stop."""
    own = Postgres()
    try:
        own.run("create database service")
        yield own
    finally:
        own.close()


def until_taken(client: httpx.Client) -> str:

    def taken() -> str | None:
        reply = client.post("/v1/jobs", json=BODY)
        assert reply.status_code in (201, 503), reply.text
        return reply.json()["id"] if reply.status_code == 201 else None

    return until(taken)


def is_refusal(reply: httpx.Response) -> None:
    assert (reply.status_code, reply.headers["content-type"]) == (503, "application/problem+json"), reply.text
    assert int(reply.headers["retry-after"]) > 0


def listed(client: httpx.Client) -> set[str]:
    return {job["id"] for job in client.get("/v1/jobs", params={"limit": 200}).json()["jobs"]}


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    taken = set[str]()
    with serve_process(tmp_path) as (process, client):
        taken.add(until_taken(client))
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))  # bytes of a file
        answers = [client.post("/v1/jobs", json=BODY) for _ in range(20)]
        taken |= {reply.json()["id"] for reply in answers if reply.status_code == 201}  # room that a refused one left
        refused = [reply for reply in answers if reply.status_code != 201]
        assert len(refused) > 5
        for reply in (*refused, client.get("/readyz")):
            is_refusal(reply)
        assert listed(client) == taken, "what is there can be read"
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        taken.add(until_taken(client))
        process.kill()
        process.wait(60)
    with serve_process(tmp_path) as (_, client):
        assert listed(client) == taken


def test_a_database_that_is_read_only(server: Postgres, tmp_path: Path, fake_solver: None) -> None:
    with client_of(settings_in(tmp_path, server.url("service"))) as (client, _):
        taken = {until_taken(client)}
        server.run("alter database service set default_transaction_read_only = on")
        server.stop()  # as a server that comes back as the copy of another
        server.start()
        for _ in range(5):
            is_refusal(client.post("/v1/jobs", json=BODY))
        assert listed(client) == taken, "what is there can be read"
        server.run("alter database service reset default_transaction_read_only")
        taken.add(until_taken(client))
        assert listed(client) == taken


def test_a_service_ends_though_its_database_hangs(server: Postgres, tmp_path: Path) -> None:
    with serve_process(tmp_path, server.url("service")) as (process, client):
        job = submit(client, method="hang")
        with client.stream("GET", f"{job['url']}/events") as response:
            assert next(events(response))["id"] == "1"
            with server.hanging():
                time.sleep(1.0)  # until its look for news waits for an answer
                process.terminate()
                assert process.wait(ENDS_S) == -signal.SIGTERM


def test_a_restarted_database(server: Postgres, tmp_path: Path, fake_solver: None) -> None:
    with client_of(settings_in(tmp_path, server.url("service"))) as (client, _):
        job = submit(client, method="hang")
        seen: list[dict[str, Any]] = []

        def follow() -> None:
            with client.stream("GET", f"{job['url']}/events") as response:
                seen.extend(events(response))

        follower = threading.Thread(target=follow)
        follower.start()
        until(lambda: seen)
        server.stop(signal.SIGQUIT)
        body = {"problem": job["best"]["schedule"]["problem"], "method": "infeasible"}
        for method, path, content in (
            ("POST", "/v1/jobs", body),
            ("GET", job["url"], None),
            ("GET", f"{job['url']}?wait=1", None),
            ("GET", "/v1/jobs", None),
            ("GET", f"{job['url']}/events", None),
            ("PUT", f"{job['url']}/adoptions/1", {"step": 1}),
            ("DELETE", job["url"], None),
            ("GET", "/readyz", None),
        ):
            is_refusal(client.request(method, path, json=content))
        assert client.get("/healthz").status_code == 200
        assert follower.is_alive(), "who follows a job need not come again"
        server.start()
        until(lambda: client.get("/readyz").status_code == 200)
        assert listed(client) == {job["id"]}, "what was refused was not stored"
        submit(client, method="infeasible")
        client.post(f"{job['url']}/cancel")
        follower.join(60)
        assert [event["event"] for event in seen] == ["incumbent", "end"]
        assert json.loads(seen[-1]["data"])["state"] == "cancelled"
