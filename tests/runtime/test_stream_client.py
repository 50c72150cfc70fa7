"""The client of a training that schedules each step itself, with a service that is away, forgets or is wrong."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.fakes import service as fake
from support.fakes.service import Answer, Asked, by_path, fake_service, one_after_the_other
from support.problems.chain import chain
from support.service.following import until_ended, warnings
from support.until import until

from optpipe.schedule import Schedule
from optpipe.steps import StepScheduler
from optpipe_runtime.service import stream
from optpipe_runtime.service.stream import FIRST_STEP, StreamClient
from optpipe_server.http.examples import RULES


@pytest.fixture(autouse=True)
def _quick(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "optpipe.client")
    monkeypatch.setattr(stream, "TELL_S", 120.0)


def told(rules: dict[str, Any] | None = None, **more: Any) -> Answer:
    entry = None if rules is None else {"rules": rules, "step": 3}
    return fake.as_json({"problem": chain().to_dict(), "told": entry, **more})


def scheduled() -> Schedule:
    return StepScheduler(chain()).plan(chain(), improve=False).first


def test_a_stream_that_the_service_lost_is_opened_again(caplog: pytest.LogCaptureFixture) -> None:
    taken: list[Any] = []

    def take(asked: Asked) -> Answer:
        taken.append((asked.path, asked.json()))
        return told()

    def rules(asked: Asked) -> Answer:
        return tell(asked) if asked.method == "PUT" else told(RULES["rules"])

    tell = one_after_the_other(Answer(404), take)
    opened = one_after_the_other(Answer(503), fake.job("a1"), fake.job("a2"))
    with fake_service(by_path({"/jobs": opened, "/rules": rules})) as (url, _):
        client = StreamClient(url, chain(scale=2.0))
        start = until(lambda: client.rules)
        assert start.step == chain(scale=2.0)
        client.ran(FIRST_STEP, scheduled(), 5.0)
        until(lambda: taken)
        client.ran(FIRST_STEP + 1, scheduled(), 7.0)
        client.close()
        until_ended(client)
    assert [(path, put["step"], put["measured_ms"]) for path, put in taken] == [
        ("/v1/jobs/a2/rules", FIRST_STEP, 5.0),
        ("/v1/jobs/a2/rules", FIRST_STEP + 1, 7.0),
    ]
    assert ["is unavailable: HTTP status 503" in text for text in warnings(caplog)] == [True, False]


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, b"no JSON"),
        told({**RULES["rules"], "order": [0, 0]}),
        told({**RULES["rules"], "leaves": [[0], [0]], "order": [0]}),
        told(RULES["rules"], problem={**chain().to_dict(), "stages": []}),
        Answer(422, b'{"detail": "no"}'),
        Answer(401),
    ],
    ids=["text", "order", "microbatches", "problem", "refused", "key"],
)
def test_wrong_rules_are_not_used(answer: Answer, caplog: pytest.LogCaptureFixture) -> None:
    with fake_service(by_path({"/jobs": fake.job(), "/rules": answer})) as (url, _):
        client = StreamClient(url, chain())
        until_ended(client)
        client.ran(FIRST_STEP, scheduled(), 5.0)
        client.close()
    assert client.rules is None
    [warning] = warnings(caplog)
    assert "\n" not in warning


def test_a_training_ends_while_the_service_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "TELL_S", 0.01)
    client = StreamClient("http://127.0.0.1:1", chain())
    client.ran(FIRST_STEP, scheduled(), 5.0)
    client.close()
    until_ended(client)
