"""No call of the training waits, neither for the thread of the client nor for the service; the client waits for a
service that asks it to, or requires a key."""

import logging
import threading
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from support.fakes import service as fake
from support.fakes.service import Answer, Answers, Asked, by_path, fake_service, one_after_the_other
from support.problems.chain import chain, gpipe, one_by_one
from support.processes import until
from support.service.following import set_waits, until_ended, warnings
from tenacity import Future

from optpipe.errors import InputError
from optpipe_runtime.service import job as job_module
from optpipe_runtime.service.client import Offer, ScheduleClient
from optpipe_runtime.service.job import wait_s
from optpipe_runtime.service.requests import LONGEST_WAIT_S, RefusedError, UnavailableError, api_key, retry_after_s

LONGEST_S = 0.05
SOME = Offer(1, gpipe(chain()), "a1", 1)


def test_no_call_waits_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands still in the middle of a check to the end of the test: a wait for it would never end."""
    reached, over = threading.Event(), threading.Event()

    def stands(*_: Any) -> None:
        reached.set()
        over.wait(240)

    monkeypatch.setattr(job_module, "verified", stands)
    table = {"/jobs": fake.job(), "/events": fake.open_events(fake.one()), "/1": fake.incumbent(gpipe(chain()))}
    with fake_service(by_path(table)) as (url, _):
        client = ScheduleClient(url, chain())
        try:
            assert reached.wait(120)
            for k in range(1_000):  # more than the loop's pipe takes in
                assert client.poll() is None
                client.update(chain(), None)
                client.adopted(SOME, k, 1.0)
            assert not client.ended
        finally:
            monkeypatch.undo()
            over.set()
            client.close()


FLOOD = {"/jobs": fake.job(), "/events": fake.endless(b": ping\n\n")}
NUMBERS = range(1, 100)
MANY = {"/jobs": fake.job(), "/events": fake.open_events(*map(fake.one, NUMBERS))}
LONG = MANY | dict.fromkeys(map(str, NUMBERS), fake.endless(b"["))
WRONG = MANY | dict.fromkeys(map(str, NUMBERS), Answer(200, b'{"schedule": {"devices": [' + b"{}," * 5_000 + b"{}]}}"))
SOUND = MANY | {f"/incumbents/{k}": fake.incumbent(one_by_one(chain()), k) for k in NUMBERS}


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param(fake.silent, id="hangs"),
        pytest.param(fake.trickling, id="trickles"),
        pytest.param(fake.endless(b"x"), id="sends a gigabyte"),
        pytest.param(by_path(FLOOD), id="sends a gigabyte of events"),
        pytest.param(by_path(LONG), id="sends schedules of a gigabyte"),
        pytest.param(by_path(WRONG), id="sends schedules with thousands of errors"),
        pytest.param(fake.resetting, id="resets"),
        pytest.param(fake.resetting_in_the_middle, id="resets in the middle"),
        pytest.param(by_path(SOUND), id="is sound"),
    ],
)
def test_calls_are_short_whatever_the_service_does(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them by the processor's time. By the clock, which counts other processes, too, none takes as long as the
    service, and most are short."""
    monkeypatch.setattr("optpipe_runtime.service.client.REPORT_S", 0.3)
    set_waits(monkeypatch, 0.01, 0.05, connect_s=2.0, read_s=0.5)
    with fake_service(answers) as (url, asked):
        client = ScheduleClient(url, chain())
        until(lambda: asked)
        calls: list[Callable[[], object]] = [
            client.poll,
            lambda: client.adopted(SOME, 1, 1.0),
            client.poll,
            client.poll,
        ]
        spent, took = [], []
        for k in range(100):
            for call in [*calls, lambda: client.update(chain(), None)] if k % 25 == 24 else calls:
                spent.append(-time.thread_time())
                took.append(-time.perf_counter())
                call()
                took[-1] += time.perf_counter()
                spent[-1] += time.thread_time()
            time.sleep(0.002)
        client.close()
    assert max(spent) < LONGEST_S
    assert median(took) < LONGEST_S
    until_ended(client)


def test_close_waits_for_nothing_if_there_is_nothing_to_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """And may be called twice."""
    set_waits(monkeypatch, read_s=600.0)
    table = {"/jobs": fake.job(), "/events": fake.silent, "/cancel": fake.as_json({})}
    with fake_service(by_path(table)) as (url, asked):
        client = ScheduleClient(url, chain())
        until(lambda: len(asked) == 2)
        client._in_thread(client._closing.set)
        until_ended(client)
        assert not asked[0].over.is_set()
    client.close()
    client.update(chain(scale=2), None)
    client.adopted(SOME, 1)
    assert client.poll() is None


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
