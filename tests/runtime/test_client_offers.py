"""What is offered to the training: the newest schedule, once, if it is better than the running one and for the current
costs. And the service gets reports, now or later, of which schedules the training has swapped in."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.fakes import service as fake
from support.fakes.service import Answer, Answers, Asked, by_path, fake_service, one_after_the_other
from support.problems.chain import chain, gpipe, one_by_one
from support.service.following import until_ended, warnings
from support.until import until

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, check
from optpipe_runtime.service.client import Offer, ScheduleClient

SLOWER, TIGHT = chain(scale=1.5), chain(memory=1)


def finding(*schedules: Schedule, then: bytes = fake.end()) -> dict[str, Answer | Answers]:
    """One after the other, then the end."""
    found = {f"/incumbents/{k}": fake.incumbent(schedule, k) for k, schedule in enumerate(schedules, 1)}
    return {
        "/jobs": fake.job(),
        "/events": fake.events(*(fake.one(k) for k in range(1, len(schedules) + 1)), then),
        **found,
    }


@pytest.mark.parametrize(
    ("problem", "running", "found", "offered"),
    [
        pytest.param(chain(), None, [gpipe(chain()), one_by_one(chain())], "gpipe", id="worse than the last offer"),
        pytest.param(chain(), gpipe(chain()), [one_by_one(chain()), gpipe(chain())], None, id="no better than running"),
        pytest.param(TIGHT, gpipe(chain()), [one_by_one(TIGHT)], "naive", id="what runs no longer fits"),
    ],
)
def test_only_what_is_better_is_offered(
    problem: Problem, running: Schedule | None, found: list[Schedule], offered: str | None
) -> None:
    with (
        fake_service(by_path(finding(*found))) as (url, asked),
        ScheduleClient(url, problem, warm_start=running) as client,
    ):
        until(lambda: client.ended)
        offer = client.poll()
    assert (offer and offer.schedule.method) == offered
    if offer:
        assert (offer.version, offer.seq) == (1, 1)
        assert check(problem, offer.schedule) == []
    assert (asked[0].json().get("warm_start") or {}).get("method") == (running and running.method)


def test_an_offer_for_old_costs_is_dropped() -> None:
    answers = by_path({**finding(one_by_one(chain())), "/events": fake.open_events(fake.one())})
    with fake_service(answers) as (url, _), ScheduleClient(url, chain()) as client:
        until(lambda: client._newest)
        client.update(SLOWER, gpipe(chain()))
        assert client.poll() is None


def test_only_the_last_of_many_changes_counts() -> None:
    last = chain(scale=2.0)
    posed = one_after_the_other(fake.silent, fake.job(version=2))  # whoever waits for an answer is called away
    table = {
        **finding(one_by_one(chain()), then=b""),
        "/problem": posed,
        "/incumbents/2": fake.incumbent(gpipe(last), 2),
    }
    table["/events"] = one_after_the_other(
        fake.open_events(fake.one()), fake.events(fake.one(2, version=2), fake.end())
    )
    with fake_service(by_path(table)) as (url, asked), ScheduleClient(url, chain()) as client:
        until(client.poll)
        client.update(chain(scale=1.25), None)
        until(lambda: any(request.path.endswith("/problem") for request in asked))
        given = threading.Event()
        client._loop.call_soon_threadsafe(given.wait)  # its thread looks when all are given
        for scale in (1.5, 1.75, 2.0):
            client.update(chain(scale=scale), None)
        given.set()
        assert until(client.poll).schedule.problem == last
        until(lambda: client.ended)
    told = [Problem.from_dict(request.json()["problem"]) for request in asked if request.path.endswith("/problem")]
    assert told == [chain(scale=1.25), last]


def test_a_service_that_was_unavailable_gets_the_newest_costs() -> None:
    table = {**finding(gpipe(SLOWER)), "/jobs": one_after_the_other(fake.silent, fake.job())}
    with fake_service(by_path(table)) as (url, asked), ScheduleClient(url, chain()) as client:
        until(lambda: asked)
        client.update(SLOWER, None)
        assert until(client.poll).schedule.problem == SLOWER
    first, second = [request for request in asked if request.path == "/v1/jobs"]
    assert Problem.from_dict(second.json()["problem"]) == SLOWER
    assert first.headers["Idempotency-Key"] != second.headers["Idempotency-Key"]


# Adoptions

FOUND = {
    "/jobs": fake.job(),
    "/events": fake.events(fake.one(), fake.end()),
    "/incumbents/1": fake.incumbent(gpipe(chain())),
}
HEARD = fake.as_json({})


def told(asked: list[Asked]) -> list[tuple[str, Any]]:
    return [(request.path, request.json()) for request in asked if request.method == "PUT"]


def test_an_unavailable_service_is_told_the_last_state_later() -> None:
    heard = one_after_the_other(
        fake.resetting, Answer(503, headers={"Retry-After": "0"}), fake.resetting_in_the_middle, HEARD
    )
    with (
        fake_service(by_path({**FOUND, "/adoptions/1": heard})) as (url, asked),
        ScheduleClient(url, chain()) as client,
    ):
        offer = until(client.poll)
        client.adopted(offer, 3)
        until(lambda: told(asked))
        client.adopted(offer, 3, 8.0)
        client.adopted(offer, np.int64(3), np.float32(9.0))  # type: ignore[arg-type]
        until(lambda: not client._adoptions)
    contents = [content for _, content in told(asked)]
    assert len(contents) == 4
    assert contents[0] == {"step": 3}
    assert contents[-1] == {"step": 3, "measured_iteration_ms": 9.0}


def test_a_change_during_a_request_is_told_again() -> None:
    waits: list[Asked] = []

    def slow(asked: Asked) -> Answer:
        waits.append(asked)
        until(lambda: len(waits) > 1 or client._adoptions[("a1", 1)] != {"step": 3})
        return HEARD

    with (
        fake_service(by_path({**FOUND, "/adoptions/1": slow})) as (url, asked),
        ScheduleClient(url, chain()) as client,
    ):
        offer = until(client.poll)
        client.adopted(offer, 3)
        until(lambda: waits)
        client.adopted(offer, 3, 9.0)
        until(lambda: len(waits) == 2 and not client._adoptions)
    assert [content for _, content in told(asked)] == [{"step": 3}, {"step": 3, "measured_iteration_ms": 9.0}]


@pytest.mark.parametrize("answer", [Answer(404), Answer(422), Answer(302)])
def test_a_refused_adoption_is_given_up(answer: Answer, caplog: pytest.LogCaptureFixture) -> None:
    table = {**FOUND, "/adoptions/1": answer, "/adoptions/2": HEARD}
    with fake_service(by_path(table)) as (url, asked), ScheduleClient(url, chain()) as client:
        until(lambda: client.ended)
        client.adopted(Offer(1, gpipe(chain()), "a1", 1), 3)
        client.adopted(Offer(2, gpipe(chain()), "a1", 2), 4)
        until(lambda: len(told(asked)) == 2 and not client._adoptions)
    assert [path for path, _ in told(asked)] == ["/v1/jobs/a1/adoptions/1", "/v1/jobs/a1/adoptions/2"]
    [line] = warnings(caplog)
    assert line.startswith("the adoption of schedule 1 of job a1 was not taken: ")


def test_close_does_not_wait_for_an_unavailable_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optpipe_runtime.service.client.REPORT_S", 0.3)
    with fake_service(by_path({**FOUND, "/adoptions/1": fake.silent})) as (url, asked):
        client = ScheduleClient(url, chain())
        client.adopted(until(client.poll), 3)
        until(lambda: told(asked))
        client.close()
        until_ended(client)
