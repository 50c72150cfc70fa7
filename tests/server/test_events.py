"""Incumbents as server-sent events: each client sees every one once, whatever happens to its connection."""

import asyncio
import json
import random
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.problems.chain import chain
from support.processes import until
from support.service import client_of, events
from support.service.postgres import on_sqlite, shared_on_sqlite
from support.service.rest import submit, until_over, until_running

from optpipe_server import Settings
from optpipe_server.http.job_updates import POLL_S, Topic, events_of
from optpipe_server.http.server import Server


def follow(client: httpx.Client, job: dict[str, Any], last: str | None = None) -> list[dict[str, Any]]:
    headers = {} if last is None else {"Last-Event-ID": last}
    with client.stream("GET", f"{job['url']}/events", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response))


def test_incumbents_come_as_they_are_found_and_end_is_last(client: httpx.Client) -> None:
    job = submit(client, method="slow")
    seen = follow(client, job)
    assert [(each["event"], each["id"]) for each in seen] == [("incumbent", "1"), ("incumbent", "2"), ("end", "2")]
    first, second, end = (json.loads(event["data"]) for event in seen)
    assert client.get(second["url"]).json()["schedule"]["makespan_ms"] == second["makespan_ms"] < first["makespan_ms"]
    assert "schedule" not in second, "an event is small"
    assert (end["state"], end["best"]) == ("done", second)


def test_replay_starts_after_the_last_event(client: httpx.Client) -> None:
    job = until_over(client, submit(client))
    whole = follow(client, job)
    assert follow(client, job) == whole == follow(client, job, "0")
    assert follow(client, job, "1") == whole[1:]
    for last in ("2", "999999999999999"):
        reply = client.get(f"{job['url']}/events", headers={"Last-Event-ID": last})
        assert (reply.status_code, reply.content) == (204, b""), "a browser does not come back after that"


@pytest.mark.parametrize("last", ["x", "-1", "1e3", "1" * 16, "\u0661".encode()])
@shared_on_sqlite
def test_a_wrong_event_id_is_refused(client: httpx.Client, last: Any) -> None:
    reply = client.get(f"{submit(client, method='hang')['url']}/events", headers={"Last-Event-ID": last})
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/problem+json"


def test_cancel_ends_the_streams(client: httpx.Client) -> None:
    job = submit(client, method="hang")
    with ExitStack() as stack:
        streams = [events(stack.enter_context(client.stream("GET", f"{job['url']}/events"))) for _ in range(5)]
        assert {next(stream)["event"] for stream in streams} == {"incumbent"}
        client.post(f"{job['url']}/cancel")
        for stream in streams:
            [end] = stream
            assert (end["event"], json.loads(end["data"])["state"]) == ("end", "cancelled")


def test_a_purged_job_ends_the_streams(client: httpx.Client) -> None:
    job = submit(client, method="hang")
    with client.stream("GET", f"{job['url']}/events") as response:
        stream = events(response)
        assert next(stream)["id"] == "1"
        assert client.delete(job["url"]).status_code == 204
        assert list(stream) == [], "no `end`: nobody knows the job any more"
    assert client.get(f"{job['url']}/events").status_code == 404


@on_sqlite
def test_an_ending_service_does_not_wait_for_open_streams(settings: Settings, fake_solver: None) -> None:
    with client_of(replace(settings, ping_s=600.0)) as (client, server):
        job = submit(client, method="hang")
        with client.stream("GET", f"{job['url']}/events") as response:
            stream = events(response)
            assert next(stream)["id"] == "1"
            server.config.timeout_graceful_shutdown = 600
            server.should_exit = True
            assert list(stream) == [], "no `end`: the job is not over because the service is"


@on_sqlite
def test_an_ending_service_does_not_wait_for_first_schedules(settings: Settings, fake_solver: None) -> None:
    replies: list[httpx.Response] = []
    slow = replace(settings, first_schedule_s=600.0)
    with client_of(slow) as (client, server):
        server.config.timeout_graceful_shutdown = 600
        body = {"problem": chain().to_dict(), "method": "asleep"}
        waiting = threading.Thread(target=lambda: replies.append(client.post("/v1/jobs", json=body)))
        waiting.start()
        until(lambda: server.server_state.tasks)
        time.sleep(0.2)
        server.should_exit = True
        waiting.join(60)
        assert not waiting.is_alive()
    assert (replies[0].status_code, replies[0].json()["best"]) == (201, None)
    with client_of(settings) as (client, _):  # it is stored, and searched when the service is back
        assert until_over(client, replies[0].json())["best"]["method"] == "gpipe"


class Interrupted(list[bytes]):
    """A list of events that gets its last one, and the job's end, at the moment when it is read."""

    def __init__(self, topic: Topic, job: Any) -> None:
        self._topic, self._job = topic, job

    def __getitem__(self, what: Any) -> Any:
        known = list(self)[what]
        if not self:
            self._topic.events.append(b"the last incumbent\n\n")
            self._topic.end, self._topic.job = b"end\n\n", self._job
            asyncio.get_running_loop().call_soon(self._topic.notify)
        return known


def test_an_incumbent_that_comes_with_the_end_is_sent_before_it() -> None:
    """A thread updates a topic while the loop reads it."""
    topic = Topic()
    topic.events = Interrupted(topic, SimpleNamespace(state="done"))

    async def sent() -> bytes:
        return b"".join([chunk async for chunk in events_of(topic, 0)])

    assert asyncio.run(sent()) == b"the last incumbent\n\nend\n\n"


def test_pings_while_nothing_happens(client: httpx.Client) -> None:
    job = submit(client, method="hang")
    with client.stream("GET", f"{job['url']}/events") as response:
        lines = response.iter_lines()
        pings = [line for line, _ in zip(lines, range(12), strict=False) if line.startswith(": ping")]
    assert len(pings) >= 2


async def resume(http: httpx.AsyncClient, job: dict[str, Any], chance: random.Random, breaks: int) -> list[int]:
    """The incumbents that a client sees whose connection breaks several times, and that continues after the last."""
    seen: list[int] = []
    while True:
        left = chance.randrange(1, 6) if breaks else -1
        last = {"Last-Event-ID": str(seen[-1] if seen else 0)}
        async with http.stream("GET", f"{job['url']}/events", headers=last) as response:
            if response.status_code == 204:
                return seen
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line == "event: end":
                    return seen
                if line.startswith("data: "):
                    seen.append(json.loads(line[6:])["seq"])
                    left -= 1
                if left == 0:
                    break
        breaks -= 1


@pytest.mark.parametrize(("clients", "breaks"), [(40, 2), pytest.param(500, 1, marks=pytest.mark.soak)])
def test_every_client_sees_every_incumbent_once(
    shared: tuple[str, Server], client: httpx.Client, clients: int, breaks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, asked, chance = shared[1].service, list[float](), random.Random(clients)
    versions = service.jobs.versions
    monkeypatch.setattr(service.jobs, "versions", lambda ids: (asked.append(time.monotonic()), versions(ids))[1])

    async def all_follow(job: dict[str, Any]) -> list[list[int]]:
        many = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=client.base_url, headers=client.headers, timeout=240, trust_env=False, limits=many
        ) as http:
            return await asyncio.gather(*(resume(http, job, chance, breaks) for _ in range(clients)))

    job = submit(client, chain(m=12, memory=12), method="steps")
    everything = asyncio.run(all_follow(job))
    assert everything == [list(range(1, 13))] * clients
    assert len(asked) <= (asked[-1] - asked[0]) / POLL_S + clients * (breaks + 1) + 10, "one query serves all"
    until(lambda: service.job_updates._topics == {})


def test_a_subscriber_waits_for_a_topic_that_is_too_old(client: httpx.Client) -> None:
    """A client that has seen the reply to its change must not get an older state."""
    job = until_running(client, submit(client, method="hang"))
    with client.stream("GET", f"{job['url']}/events") as response:
        assert next(line for line in response.iter_lines() if not line.startswith(":")) == "id: 1"  # no ping
        for time_limit_s in range(100, 110):
            version = {"If-Match": f'"{job["version"]}"'}
            extended = client.patch(job["url"], json={"time_limit_s": time_limit_s}, headers=version)
            assert extended.status_code == 200
            job, version = extended.json(), {"If-None-Match": extended.headers["etag"]}
            assert client.get(job["url"], params={"wait": 0.01}, headers=version).status_code == 304
