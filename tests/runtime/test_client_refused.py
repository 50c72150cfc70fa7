"""The client with a service that asks to wait, or requires a key."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.fakes import service as fake
from support.fakes.service import Answer, Asked, by_path, fake_service, one_after_the_other
from support.problems.chain import chain, gpipe
from support.service.following import set_waits, until_ended, warnings
from support.until import until
from tenacity import Future

from optpipe.errors import InputError
from optpipe_runtime.service.client import Offer, ScheduleClient, wait_s
from optpipe_runtime.service.requests import LONGEST_WAIT_S, RefusedError, UnavailableError, api_key, retry_after_s

JOB = fake.job()
GOOD = fake.incumbent(gpipe(chain()))
ENDS = fake.events(fake.one(), fake.end())
KEY = "op_1a2b3c_s3cr3ts3cr3ts3cr3t"


# Patience


def test_retry_after_is_waited_for() -> None:
    times: list[float] = []

    def full(asked: Asked) -> Answer:
        times.append(time.monotonic())
        return Answer(429, headers={"Retry-After": "1"}) if len(times) == 1 else JOB

    with (
        fake_service(by_path({"/jobs": full, "/events": ENDS, "/1": GOOD})) as (url, _),
        ScheduleClient(url, chain()) as client,
    ):
        until(client.poll)
    assert times[1] - times[0] >= 1.0


def test_waits_are_doubled_up_to_the_longest_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    set_waits(monkeypatch, 0.5, 30.0)

    def waited(attempts: int, error: Exception) -> float:
        outcome = Future(attempts)
        outcome.set_exception(error)
        state: Any = SimpleNamespace(attempt_number=attempts, outcome=outcome)
        return wait_s(state)

    longest = dict(enumerate([0.25, 0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]))
    seen = [(most, waited(attempts, UnavailableError("no"))) for _ in range(20) for attempts, most in longest.items()]
    assert all(most / 2 <= seconds <= most for most, seconds in seen)
    assert len({seconds for _, seconds in seen}) == len(seen), "clients that were sent away together come back apart"
    assert waited(10**6, RefusedError(400, "no")) <= 30
    assert all(40 <= waited(1, UnavailableError("no", 40.0)) <= 48 for _ in range(20))


def test_new_costs_and_close_end_a_wait() -> None:
    table = {
        "/jobs": one_after_the_other(Answer(503, headers={"Retry-After": "3600"}), JOB),
        "/events": ENDS,
        "/1": GOOD,
    }
    with fake_service(by_path(table)) as (url, asked), ScheduleClient(url, chain()) as client:
        until(lambda: asked)
        client.update(chain(), None)
        until(client.poll)
    until_ended(client)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", 0), ("7", 7), ("99999999999", 0), ("1000000", LONGEST_WAIT_S), ("-1", 0), ("soon", 0), ("١", 0), ("1.5", 0)],
)
def test_seconds_to_wait(text: str, seconds: float) -> None:
    assert retry_after_s(text) == seconds


# Keys


def test_the_key_is_sent_and_never_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to a log that takes everything, of a client whose every request fails in another way."""
    caplog.set_level(logging.DEBUG)
    for given in (KEY, None):
        monkeypatch.setenv("OPTPIPE_KEY", "op_other_key" if given else KEY)
        jobs = one_after_the_other(Answer(500), Answer(200, b"{"), fake.resetting, JOB)
        events = one_after_the_other(Answer(200, b"data: x"), fake.events(fake.one()), Answer(401))
        with fake_service(by_path({"/jobs": jobs, "/events": events, "/1": GOOD})) as (url, asked):
            with ScheduleClient(url, chain(), key=given) as client:
                until(lambda: client.ended)
                assert KEY not in repr(client) + repr(client._http)
            assert {request.headers["Authorization"] for request in asked} == {f"Bearer {KEY}"}
    assert "refuses this client: it does not know the API key" in caplog.text
    assert KEY not in caplog.text
    assert "s3cr3t" not in caplog.text


@pytest.mark.parametrize(
    ("answer", "key", "why"),
    [
        (Answer(401), None, "it requires an API key; give one of its own by key= or by OPTPIPE_KEY in the environment"),
        (
            Answer(401),
            KEY,
            "it does not know the API key; give one of its own by key= or by OPTPIPE_KEY in the environment",
        ),
        (fake.as_json({"detail": "The key has not the scope submit."}, 403), KEY, "The key has not the scope submit."),
    ],
)
def test_a_refused_client_logs_it_once(
    answer: Answer, key: str | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_service(lambda _: answer) as (url, asked), ScheduleClient(url, chain(), key=key) as client:
        until(lambda: client.ended)
        client.update(chain(scale=2), None)
        until(lambda: len(asked) == 2 and client.ended)
        client.adopted(Offer(1, gpipe(chain()), "a1", 1), 3)
        until(lambda: len(asked) == 3)
        assert client.poll() is None
    expected = f"the solver service at {url} refuses this client: {why}; training goes on with the schedule it has"
    assert warnings(caplog) == [expected]


@pytest.mark.parametrize("key", ["", "op 1", "op_ü", "op_1\r\nX-Evil: 1", "x" * 201])
def test_an_invalid_key_is_an_error_that_does_not_show_it(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"^key: must be an API key of the service") as refusal:
        api_key(key)
    assert not key or key not in str(refusal.value)
    monkeypatch.setenv("OPTPIPE_KEY", "not one")
    with pytest.raises(InputError, match=r"^OPTPIPE_KEY in the environment: must be an API key"):
        api_key(None)
    monkeypatch.setenv("OPTPIPE_KEY", "")
    assert api_key(None) is None
