"""The service is told, now or later, which schedules the training has swapped in."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from support.fakes import service as fake
from support.fakes.service import Answer, Asked, by_path, fake_service, one_after_the_other
from support.problems.chain import chain, gpipe
from support.service.following import until_ended, warnings
from support.until import until

from optpipe_runtime.service.client import Offer, ScheduleClient

FOUND = {
    "/jobs": fake.job(),
    "/events": fake.events(fake.one(), fake.end()),
    "/incumbents/1": fake.incumbent(gpipe(chain())),
}
HEARD = fake.as_json({})


@pytest.fixture(autouse=True)
def _log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "optpipe.client")


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
    monkeypatch.setattr("optpipe_runtime.service.client.TELL_S", 0.3)
    with fake_service(by_path({**FOUND, "/adoptions/1": fake.silent})) as (url, asked):
        client = ScheduleClient(url, chain())
        client.adopted(until(client.poll), 3)
        until(lambda: told(asked))
        client.close()
        until_ended(client)
