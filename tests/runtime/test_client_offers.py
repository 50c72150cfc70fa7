"""What is offered to the training: the newest schedule, once, if it is better than the running one and for the current
costs."""

from __future__ import annotations

import threading

from support.fakes import service as fake
from support.fakes.service import Answer, Answers, by_path, fake_service, one_after_the_other
from support.problems.chain import chain, gpipe, one_by_one
from support.until import until

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, check
from optpipe_runtime.service.client import ScheduleClient

SLOWER = chain(scale=1.5)


def finding(*schedules: Schedule, then: bytes = fake.end()) -> dict[str, Answer | Answers]:
    """One after the other, then the end."""
    found = {f"/incumbents/{k}": fake.incumbent(schedule, k) for k, schedule in enumerate(schedules, 1)}
    return {
        "/jobs": fake.job(),
        "/events": fake.events(*(fake.one(k) for k in range(1, len(schedules) + 1)), then),
        **found,
    }


def test_a_schedule_worse_than_the_last_offer_is_not_offered() -> None:
    answers = by_path(finding(gpipe(chain()), one_by_one(chain())))
    with fake_service(answers) as (url, _), ScheduleClient(url, chain()) as client:
        until(lambda: client.ended)
        offer = client.poll()
        assert offer is not None
        assert (offer.version, offer.seq) == (1, 1)


def test_a_schedule_no_better_than_the_running_one_is_not_offered() -> None:
    answers = by_path(finding(one_by_one(chain()), gpipe(chain())))
    with (
        fake_service(answers) as (url, asked),
        ScheduleClient(url, chain(), warm_start=gpipe(chain())) as client,
    ):
        until(lambda: client.ended)
        assert client.poll() is None
    assert asked[0].json()["warm_start"]["method"] == "gpipe"


def test_a_running_schedule_that_no_longer_fits_is_not_compared_with() -> None:
    tight = chain(memory=1)
    answers = by_path(finding(one_by_one(tight)))
    with fake_service(answers) as (url, _), ScheduleClient(url, tight, warm_start=gpipe(chain())) as client:
        offer = until(client.poll)
        assert offer.schedule.method == "naive"
        assert check(tight, offer.schedule) == []


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
