"""Incumbents as server-sent events."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.chain import chain
from support.service import events, running

from optpipe_server import Settings
from optpipe_server.serve import GRACE_S

Serving = Callable[[Settings], httpx.Client]


def submit(client: httpx.Client, method: str) -> str:
    url: str = client.post("/v1/jobs", json={"problem": chain().to_dict(), "method": method}).json()["url"]
    return url


def follow(client: httpx.Client, job: str, last: str | None = None) -> list[dict[str, Any]]:
    with client.stream("GET", f"{job}/events", headers={} if last is None else {"Last-Event-ID": last}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response))


def test_incumbents_come_as_they_are_found_and_end_is_last(client: httpx.Client) -> None:
    job = submit(client, "slow")
    seen = follow(client, job)
    assert [(event["event"], event.get("id")) for event in seen] == [("incumbent", "1"), ("incumbent", "2"), ("end", None)]
    first, second, end = (json.loads(event["data"]) for event in seen)
    assert client.get(second["url"]).json()["schedule"]["makespan_ms"] == second["makespan_ms"] < first["makespan_ms"]
    assert "schedule" not in second, "an event is small"
    assert (end["state"], end["best"]) == ("done", second)


def test_replay_starts_behind_the_last_event(client: httpx.Client) -> None:
    job = submit(client, "slow")
    whole = follow(client, job)
    assert follow(client, job) == whole
    assert follow(client, job, "1") == whole[1:]
    assert follow(client, job, "2") == whole[2:]
    assert follow(client, job, "999999999999999") == whole[2:]


@pytest.mark.parametrize("last", ["x", "-1", "1e3", "1" * 16, "\u0661".encode()])
def test_an_event_id_that_is_none_is_refused(client: httpx.Client, last: Any) -> None:
    reply = client.get(f"{submit(client, 'hang')}/events", headers={"Last-Event-ID": last})
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/problem+json"


def test_pings_while_nothing_happens(client: httpx.Client) -> None:
    job = submit(client, "hang")
    with client.stream("GET", f"{job}/events") as response:
        lines = response.iter_lines()
        pings = [line for line, _ in zip(lines, range(12), strict=False) if line.startswith(": ping")]
    assert len(pings) >= 2


def test_an_infeasible_job_ends_its_stream(client: httpx.Client) -> None:
    [end] = follow(client, submit(client, "infeasible"))
    assert json.loads(end["data"])["state"] == "infeasible"


def test_cancel_ends_the_streams(client: httpx.Client) -> None:
    job = submit(client, "hang")
    seen: list[list[dict[str, Any]]] = []
    readers = [threading.Thread(target=lambda: seen.append(follow(client, job))) for _ in range(5)]
    for reader in readers:
        reader.start()
    time.sleep(0.2)
    client.post(f"{job}/cancel")
    for reader in readers:
        reader.join(5)
    assert [[event["event"] for event in one] for one in seen] == [["incumbent", "end"]] * 5
    assert json.loads(seen[0][-1]["data"])["state"] == "cancelled"


def test_an_ending_service_does_not_wait_for_open_streams(settings: Settings, fake_solver: None) -> None:
    with running(replace(settings, ping_s=60.0)) as (url, server), httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
        job = submit(client, "hang")
        with client.stream("GET", f"{job}/events") as response:
            stream = events(response)
            assert next(stream)["id"] == "1"
            began = time.monotonic()
            server.should_exit = True
            assert list(stream) == [], "no `end`: the job is not over because the service is"
            assert time.monotonic() - began < GRACE_S


def test_a_restart_keeps_the_best_and_says_that_the_job_was_stopped(settings: Settings, fake_solver: None) -> None:
    with running(settings) as (url, _), httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
        jobs = [submit(client, "hang"), submit(client, "hang")]
    with running(settings) as (url, _), httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
        for job in jobs:
            incumbent, end = follow(client, job)
            assert incumbent["id"] == "1"
            shown = json.loads(end["data"])
            assert (shown["state"], shown["best"]["seq"]) == ("stopped", 1)
            assert shown["reason"] == "the service ended while the job was not over"
            assert client.get(f"{job}/incumbents/best").json()["method"] == "naive"
