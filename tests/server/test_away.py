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

from optpipe_server.database import Database

BACK_S = 60.0  # the longest that the service may need, once the database answers
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
    """Wait until a job is accepted; return its id."""
    until = time.monotonic() + BACK_S
    while (reply := client.post("/v1/jobs", json=BODY)).status_code != 201:
        assert reply.status_code == 503, reply.text
        assert time.monotonic() < until, reply.text
        time.sleep(0.05)
    job: str = reply.json()["id"]
    return job


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
    url = server.url("service")
    Database(url).close()
    with client_of(settings_in(tmp_path, url)) as (client, _):
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
    url = server.url("service")
    Database(url).close()
    with serve_process(tmp_path, url) as (process, client):
        job = submit(client, method="hang")
        with client.stream("GET", f"{job['url']}/events") as response:
            assert next(events(response))["id"] == "1"
            with server.hanging():
                time.sleep(1.0)  # until its look for news waits for an answer
                process.terminate()
                assert process.wait(ENDS_S) == -signal.SIGTERM


def test_a_restarted_database(server: Postgres, tmp_path: Path, fake_solver: None) -> None:
    url = server.url("service")
    Database(url).close()
    with client_of(settings_in(tmp_path, url)) as (client, _):
        job = submit(client, method="hang")
        seen: list[dict[str, Any]] = []

        def follow() -> None:
            with client.stream("GET", f"{job['url']}/events") as response:
                seen.extend(events(response))

        follower = threading.Thread(target=follow)
        follower.start()
        while not seen:
            time.sleep(0.01)
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
            reply = client.request(method, path, json=content)
            assert reply.status_code == 503, (method, path, reply.text)
            assert reply.headers["content-type"] == "application/problem+json"
            assert int(reply.headers["retry-after"]) > 0
        assert client.get("/healthz").status_code == 200
        assert follower.is_alive(), "who follows a job need not come again"
        server.start()
        until = time.monotonic() + BACK_S
        while (reply := client.get("/readyz")).status_code != 200:
            assert time.monotonic() < until, reply.text
            time.sleep(0.05)
        assert [one["id"] for one in client.get("/v1/jobs").json()["jobs"]] == [job["id"]], (
            "what was refused was not stored"
        )
        submit(client, method="infeasible")
        client.post(f"{job['url']}/cancel")
        follower.join(60)
        assert [event["event"] for event in seen] == ["incumbent", "end"]
        assert json.loads(seen[-1]["data"])["state"] == "cancelled"
