"""The client of the service: schedules arrive, and nothing that the service does or fails to do reaches the training."""

from __future__ import annotations

import json
import logging
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import httpx
import pytest
from support.chain import chain, gpipe, one_by_one
from support.service import running, settings_in, use_fake_solver

from optpipe.errors import InputError
from optpipe.files import ScheduleFile
from optpipe.validity import check
from optpipe_runtime.client import Offer, ScheduleClient
from optpipe_server import Settings
from optpipe_server.store import OPEN

QUICK: dict[str, Any] = {"backoff_s": (0.02, 0.1), "read_timeout_s": 2.0}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    use_fake_solver(monkeypatch)
    return settings_in(tmp_path)


@pytest.fixture(autouse=True)
def _log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "optpipe.client")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "optpipe.client" and record.levelno >= logging.WARNING]


def news(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "optpipe.client" and record.levelno == logging.INFO]


T = TypeVar("T")


def until(look: Callable[[], T | None], within_s: float = 10.0) -> T:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.01)
    raise AssertionError("it did not happen in time")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_better_schedules_are_offered_once(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with running(settings) as (url, _), ScheduleClient(url, chain(), method="slow", **QUICK) as client:
        first = until(client.poll)
        assert (first.version, first.seq, first.schedule.method) == (1, 1, "naive")
        second = until(client.poll)
        assert (second.version, second.seq, second.schedule.method) == (2, 2, "gpipe")
        assert second.makespan_ms == gpipe(chain()).makespan_ms < first.makespan_ms
        assert second.schedule.problem == chain()
        assert client.poll() is None
        until(lambda: news(caplog))
    assert news(caplog) == [f"the solver service at {url} has finished its search"]
    assert warnings(caplog) == []


def test_only_the_newest_is_offered(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with running(settings) as (url, _), ScheduleClient(url, chain(), method="steps", **QUICK) as client:
        until(lambda: news(caplog))
        offer = client.poll()
        assert offer is not None
        assert (offer.version, offer.schedule.method) == (2, "gpipe")
        assert client.poll() is None


def test_what_is_no_better_than_what_runs_is_not_offered(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with running(settings) as (url, _), ScheduleClient(url, chain(), method="steps", warm_start=gpipe(chain()), **QUICK) as client:
        until(lambda: news(caplog))
        assert client.poll() is None


def test_what_runs_but_no_longer_fits_sets_no_mark(settings: Settings) -> None:
    tight = chain(memory=1)
    with running(settings) as (url, _), ScheduleClient(url, tight, method="hang", warm_start=gpipe(chain()), **QUICK) as client:
        offer = until(client.poll)
        assert offer.schedule.method == "naive"
        assert check(tight, offer.schedule) == []


def test_a_service_that_comes_later_is_found(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with ScheduleClient(f"http://127.0.0.1:{port}/", chain(), method="hang", **QUICK) as client:
        until(lambda: warnings(caplog))
        time.sleep(0.5)
        assert client.poll() is None
        with running(settings, port):
            assert until(client.poll).version == 1
            until(lambda: news(caplog))
            assert [" is away: " in line for line in warnings(caplog)] == [True], "one warning an outage, however many attempts"
            assert [line.rpartition(" is ")[2] for line in news(caplog)] == ["there again"]


def test_a_service_that_is_restarted_is_asked_again(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """The new one has let the old job go: the client submits again, from the best it has."""
    port = free_port()
    with ScheduleClient(f"http://127.0.0.1:{port}", chain(), method="hang", **QUICK) as client:
        with running(settings, port):
            first = until(client.poll)
            until(lambda: not client._outages)
            caplog.clear()
        until(lambda: warnings(caplog))
        assert client.poll() is None
        with running(settings, port) as (url, _):
            until(lambda: news(caplog))
            assert len(warnings(caplog)) == len(news(caplog)) == 1
            jobs = until(lambda: (found := httpx.get(f"{url}/v1/jobs", trust_env=False).json()["jobs"])[1:] and found)
            newest = httpx.get(url + jobs[0]["url"], trust_env=False).json()
    assert [job["state"] in OPEN for job in jobs] == [True, False]
    assert jobs[1]["state"] == "stopped"
    assert jobs[1]["id"] == first.job
    assert newest["best"]["source"] in ("warm_start", "cache")


def test_a_service_that_has_lost_its_database_is_asked_again(settings: Settings, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "other").mkdir()
    with ScheduleClient(f"http://127.0.0.1:{port}", chain(), method="hang", **QUICK) as client:
        with running(settings, port):
            until(client.poll)
        with running(settings_in(tmp_path / "other"), port) as (url, _):
            [job] = until(lambda: httpx.get(f"{url}/v1/jobs", trust_env=False).json()["jobs"])
    assert job["state"] in OPEN


def test_an_infeasible_problem_is_said_once(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with running(settings) as (url, _), ScheduleClient(url, chain(), method="infeasible", **QUICK) as client:
        until(lambda: warnings(caplog))
        assert client.poll() is None
    assert warnings(caplog) == [f"the solver service at {url} ended its search as infeasible: device 0 needs 2000 bytes and has 1000"]


def test_a_refused_problem_is_not_sent_again(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with running(settings) as (url, _), ScheduleClient(url, chain(), method="x" * 101, **QUICK) as client:
        until(lambda: warnings(caplog))
        time.sleep(0.3)
        assert client.poll() is None
        assert httpx.get(f"{url}/v1/jobs", trust_env=False).json()["jobs"] == []
    assert len(warnings(caplog)) == 1
    assert "refuses this problem: job: method" in warnings(caplog)[0]


def test_poll_takes_microseconds_and_close_a_moment(settings: Settings) -> None:
    """Against a service that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = ScheduleClient(f"http://127.0.0.1:{silent.getsockname()[1]}", chain(), read_timeout_s=60.0)
        time.sleep(0.1)
        took = []
        for _ in range(1_000):
            began = time.perf_counter()
            assert client.poll() is None
            took.append(time.perf_counter() - began)
        assert statistics.median(took) < 50e-6
        began = time.perf_counter()
        client.close()
        assert time.perf_counter() - began < 1.0
        assert not client._thread.is_alive()


def test_a_slow_service_is_away(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with ScheduleClient(f"http://127.0.0.1:{port}", chain(), **{**QUICK, "read_timeout_s": 0.1}) as client:
            until(lambda: warnings(caplog))
            time.sleep(0.5)
            assert client.poll() is None
    [line] = warnings(caplog)
    assert "is away" in line


def test_close_at_once_and_twice() -> None:
    client = ScheduleClient("http://127.0.0.1:1", chain())
    client.close()
    client.close()
    assert not client._thread.is_alive()


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://host:x", "/v1"])
def test_a_url_that_is_none_is_a_sentence(url: str) -> None:
    with pytest.raises(InputError, match="must be http://HOST:PORT"):
        ScheduleClient(url, chain())


# The costs change

SLOWER = chain(scale=1.5)


def jobs_at(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/v1/jobs", trust_env=False).json()["jobs"]  # the newest first
    return found


def test_a_search_goes_on_with_other_costs_from_what_runs(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with running(settings) as (url, _), ScheduleClient(url, chain(), method="hang", **QUICK) as client:
        first = until(client.poll)
        assert not client.ended
        client.update(SLOWER, first.schedule)
        until(lambda: len(jobs_at(url)) == 2 and jobs_at(url)[1]["state"] not in OPEN)
        new, old = (httpx.get(url + job["url"], trust_env=False).json() for job in jobs_at(url))
        assert client.poll() is None, "what runs is the best that is known for it, too"
    assert (old["id"], old["state"]) == (first.job, "cancelled")
    assert new["best"]["source"] in ("warm_start", "cache")
    assert new["best"]["makespan_ms"] == one_by_one(SLOWER).makespan_ms
    assert warnings(caplog) == []


def test_after_the_end_of_a_search_another_begins(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with running(settings) as (url, _), ScheduleClient(url, chain(), method="steps", **QUICK) as client:
        until(lambda: client.ended)
        offer = until(client.poll)
        assert (offer.schedule.method, offer.schedule.problem) == ("gpipe", chain())
        client.update(SLOWER, one_by_one(chain()))
        assert not client.ended
        better = until(client.poll)
        assert (better.schedule.method, better.schedule.problem, better.makespan_ms) == ("gpipe", SLOWER, gpipe(SLOWER).makespan_ms)
        assert better.version > offer.version
        until(lambda: client.ended)
    assert warnings(caplog) == []


def test_an_offer_for_costs_that_have_changed_is_none(settings: Settings) -> None:
    with running(settings) as (url, _), ScheduleClient(url, chain(), method="hang", **QUICK) as client:
        until(lambda: client._newest)
        client.update(SLOWER, gpipe(chain()))
        assert client.poll() is None


def test_of_many_changes_the_last_counts(settings: Settings) -> None:
    scales = [1.0 + k / 8 for k in range(9)]
    with running(settings) as (url, _), ScheduleClient(url, chain(), method="steps", **QUICK) as client:
        for scale in scales:
            client.update(chain(scale=scale), None)
        offer = until(client.poll)
        assert offer.schedule.problem == chain(scale=scales[-1])
        until(lambda: client.ended)
        assert len(jobs_at(url)) < len(scales)


def test_a_service_that_is_away_hears_of_the_newest_costs(settings: Settings) -> None:
    port = free_port()
    with ScheduleClient(f"http://127.0.0.1:{port}", chain(), method="steps", **QUICK) as client:
        time.sleep(0.1)
        client.update(SLOWER, None)
        time.sleep(0.1)
        with running(settings, port) as (url, _):
            assert until(client.poll).schedule.problem == SLOWER
            assert len(jobs_at(url)) == 1


def test_a_change_after_the_end_of_the_client_is_no_error() -> None:
    client = ScheduleClient("http://127.0.0.1:1", chain())
    client.close()
    client.update(SLOWER, None)
    assert client.poll() is None


# A service that lies


class Liar(BaseHTTPRequestHandler):
    """Answers as told: `answers[path ending]` is (status, content type, body)."""

    answers: ClassVar[dict[str, tuple[int, str, bytes]]]
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        for ending, (status, kind, body) in self.answers.items():
            if self.path.endswith(ending):
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body)
                return
        self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


def incumbent(schedule_file: dict[str, Any], seq: int = 1) -> bytes:
    return json.dumps({"seq": seq, "schedule": schedule_file}).encode()


def told(file: ScheduleFile) -> dict[str, Any]:
    content: dict[str, Any] = file.model_dump(mode="json", exclude_none=True)
    return content


GOOD_FILE = told(ScheduleFile.of(gpipe(chain())))
TOO_BIG = told(ScheduleFile.of(gpipe(chain())))  # for two activations; the problem asked has memory for one
OTHER = told(ScheduleFile.of(gpipe(chain(m=3, memory=3))))
JOB = (201, "application/json", b'{"id": "a1"}')
ONE = b'event: incumbent\nid: 1\ndata: {"seq": 1}\n\n'
EVENTS = (200, "text/event-stream", ONE + b'event: end\ndata: {"state": "done"}\n\n')


@contextmanager
def lying(answers: dict[str, tuple[int, str, bytes]]) -> Iterator[str]:
    handler = type("Told", (Liar,), {"answers": answers})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (incumbent(TOO_BIG), "needs 2000 bytes"),
        (incumbent(OTHER), "there are 2 micro-batches"),
        (incumbent({**GOOD_FILE, "devices": []}), "0 programs"),
        (incumbent({**GOOD_FILE, "devices": [{"program": ["rm -rf"]}] * 2}), "op 'rm -rf'"),
        (b"<html>", "its answer"),
        (b"", "its answer"),
        (b"[" * 100_000, "its answer"),
        (b'{"seq": 1}', "schedule is missing"),
    ],
)
def test_a_lie_is_not_offered(body: bytes, why: str, caplog: pytest.LogCaptureFixture) -> None:
    answers = {"/jobs": JOB, "/events": EVENTS, "/incumbents/1": (200, "application/json", body)}
    with lying(answers) as url, ScheduleClient(url, chain(memory=1), **QUICK) as client:
        until(lambda: news(caplog))
        assert client.poll() is None
    [line] = warnings(caplog)
    assert "is wrong" in line
    assert why in line


@pytest.mark.parametrize(
    ("answers", "word"),
    [
        ({"/jobs": (500, "text/html", b"oops")}, "away"),
        ({"/jobs": (200, "text/html", b"<html>hello")}, "wrong"),
        ({"/jobs": (201, "application/json", b"[]")}, "wrong"),
        ({"/jobs": (201, "application/json", b'{"id": "../../admin"}')}, "wrong"),
        ({"/jobs": (302, "text/html", b"elsewhere")}, "wrong"),
        ({"/jobs": JOB}, "away"),
        ({"/jobs": JOB, "/events": (200, "text/event-stream", b"")}, "away"),
        ({"/jobs": JOB, "/events": (200, "text/event-stream", b": ping\n\n")}, "away"),
        ({"/jobs": JOB, "/events": (200, "text/event-stream", b"event: incumbent\ndata: {\n\n")}, "wrong"),
        ({"/jobs": JOB, "/events": (200, "text/event-stream", b"event: incumbent\ndata: " + b"x" * 2**21)}, "wrong"),
        ({"/jobs": JOB, "/events": (200, "text/event-stream", b"event: end\ndata: []\n\n")}, "wrong"),
        ({"/jobs": JOB, "/events": EVENTS, "/incumbents/1": (500, "text/html", b"")}, "away"),
    ],
)
def test_garbage_is_one_warning(answers: dict[str, tuple[int, str, bytes]], word: str, caplog: pytest.LogCaptureFixture) -> None:
    with lying(answers) as url, ScheduleClient(url, chain(), **QUICK) as client:
        until(lambda: warnings(caplog))
        time.sleep(0.4)
        assert client.poll() is None
        assert client._failures >= 2, "it tries again"
    assert [f" is {word}: " in line for line in warnings(caplog)] == [True]


def test_a_service_that_mends_its_ways_is_believed(caplog: pytest.LogCaptureFixture) -> None:
    both = ONE + ONE.replace(b"1", b"2") + b'event: end\ndata: {"state": "done"}\n\n'
    answers = {
        "/jobs": JOB,
        "/events": (200, "text/event-stream", both),
        "/incumbents/1": (200, "application/json", b"{}"),
        "/incumbents/2": (200, "application/json", incumbent(GOOD_FILE, 2)),
    }
    with lying(answers) as url, ScheduleClient(url, chain(), **QUICK) as client:
        offer: Offer = until(client.poll)
        assert (offer.version, offer.seq) == (1, 2)
        until(lambda: len(news(caplog)) == 2)
    assert len(warnings(caplog)) == 1
    assert news(caplog)[0].endswith("is right again")


def test_a_full_service_is_asked_again(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with running(replace(settings, queue=0)) as (url, _):
        blocker = httpx.post(f"{url}/v1/jobs", json={"problem": chain(forward=3.0).to_dict(), "method": "hang"}, trust_env=False).json()
        with ScheduleClient(url, chain(), method="hang", **QUICK) as client:
            until(lambda: warnings(caplog))
            assert client.poll() is None
            httpx.post(f"{url}{blocker['url']}/cancel", trust_env=False)
            assert until(client.poll).schedule.programs in (one_by_one(chain()).programs, gpipe(chain()).programs)
