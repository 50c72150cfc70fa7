"""No call of the training waits, neither for the thread of the client nor for the service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
from support.fakes import service as fake
from support.fakes.service import Answer, Answers, by_path, fake_service
from support.problems.chain import chain, gpipe, one_by_one
from support.service.following import set_waits, until_ended
from support.until import until

from optpipe_runtime.service import client as client_module
from optpipe_runtime.service.client import Offer, ScheduleClient

LONGEST_S = 0.05
SOME = Offer(1, gpipe(chain()), "a1", 1)


def test_no_call_waits_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands still from here to the end of the test, in the middle of a check: who waited for it would wait
    forever."""
    reached, over = threading.Event(), threading.Event()

    def stands(*_: Any) -> None:
        reached.set()
        over.wait(240)

    monkeypatch.setattr(client_module, "verified", stands)
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
LONG = {"/jobs": fake.job(), "/events": fake.open_events(*map(fake.one, range(1, 100)))} | dict.fromkeys(
    map(str, range(1, 100)), fake.endless(b"[")
)
WRONG = {"/jobs": fake.job(), "/events": fake.open_events(*map(fake.one, range(1, 100)))} | dict.fromkeys(
    map(str, range(1, 100)), Answer(200, b'{"schedule": {"devices": [' + b"{}," * 5_000 + b"{}]}}")
)
SOUND = {"/jobs": fake.job(), "/events": fake.open_events(*map(fake.one, range(1, 100)))} | {
    f"/incumbents/{k}": fake.incumbent(one_by_one(chain()), k) for k in range(1, 100)
}


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
    with fake_service(fake.silent) as (url, asked):
        client = ScheduleClient(url, chain())
        until(lambda: asked)
        closing = threading.Thread(target=client.close)
        closing.start()
        until_ended(client)
        closing.join()
        assert not asked[0].over.is_set()
    client.close()
    client.update(chain(scale=2), None)
    client.adopted(SOME, 1)
    assert client.poll() is None
