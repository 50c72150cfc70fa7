"""The database goes away and comes back: 503 meanwhile, nothing acknowledged that is not stored, and streams that go on."""

from __future__ import annotations

import json
import signal
import threading
import time
from typing import Any

import httpx
import pytest
from support.postgres import Postgres
from support.rest import submit
from support.service import events, running, settings_in

from optpipe_server.database import Database

BACK_S = 10.0  # the longest that the service may need, once the database answers


@pytest.fixture
def server() -> Any:
    """A PostgreSQL of this test's own, which may be stopped."""
    own = Postgres()
    try:
        own.run("create database service")
        yield own
    finally:
        own.close()


def test_a_restarted_database(server: Postgres, tmp_path: Any, fake_solver: None) -> None:
    url = server.url("service")
    Database(url).close()
    with running(settings_in(tmp_path, url)) as (address, _), httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
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
        assert [one["id"] for one in client.get("/v1/jobs").json()["jobs"]] == [job["id"]], "what was refused was not stored"
        submit(client, method="infeasible")
        client.post(f"{job['url']}/cancel")
        follower.join(30)
        assert [event["event"] for event in seen] == ["incumbent", "end"]
        assert json.loads(seen[-1]["data"])["state"] == "cancelled"
