"""The client: schedules arrive, costs change, and the service may end and come back. What is offered is better than
what runs, for the current costs; the service gets reports of what was swapped in."""

import re
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import func, select, update
from support.fakes import service as fake
from support.fakes.service import Answer, Answers, Asked, by_path, fake_service, one_after_the_other
from support.problems.chain import chain, gpipe, one_by_one
from support.processes import free_port, until
from support.service import client_at, running, settings_in, use_fake_solver
from support.service.following import news, set_waits, warnings

from optpipe.model.problem import Problem
from optpipe.options import StackName
from optpipe.results import GONE
from optpipe.schedule import Schedule, check
from optpipe_runtime.service import client as client_module
from optpipe_runtime.service import job as job_module
from optpipe_runtime.service.client import Offer, ScheduleClient
from optpipe_server import Settings
from optpipe_server.database import tables
from optpipe_server.database.tables import OPEN
from optpipe_server.http.server import Server


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    use_fake_solver(monkeypatch)
    return settings_in(tmp_path)


def seen(url: str, key: str | None = None) -> Any:
    return httpx.get(url, trust_env=False, headers={"Authorization": f"Bearer {key}"} if key else None).json()


def jobs_at(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = seen(f"{url}/v1/jobs")["jobs"]
    return found


def test_a_service_that_comes_goes_and_comes_back(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with the job, and gets reports of what the training adopted in between."""
    port, waits = free_port(), []
    wait_s = job_module.wait_s
    monkeypatch.setattr(job_module, "wait_s", lambda state: waits.append(wait_s(state)) or waits[-1])
    with ScheduleClient(f"http://127.0.0.1:{port}/", chain(), method="hang") as client:
        until(lambda: len(waits) >= 5)
        assert client.why_none == "the service cannot be used"
        with running(settings, port):
            assert len(warnings(caplog)) == 1, "one warning an outage, however many attempts"
            first = until(client.poll)
            until(lambda: news(caplog))
            assert [line.rpartition(" is ")[2] for line in news(caplog)] == ["available again"]
        until(lambda: len(warnings(caplog)) == 2)
        client.adopted(first, 7)
        client.adopted(first, 7, 9.5)
        with running(settings, port) as (url, _):
            until(lambda: not client._adoptions)
            [job] = jobs_at(url)
            assert (job["id"], job["state"] in OPEN) == (first.job, True)
            [incumbent] = seen(f"{url}{job['url']}/incumbents")["incumbents"]
            assert client.poll() is None, "nothing is offered twice"
    adoption = incumbent["adoption"]
    assert (incumbent["makespan_ms"], adoption["step"], adoption["measured_iteration_ms"]) == (
        first.makespan_ms,
        7,
        9.5,
    )


@pytest.mark.parametrize("fails", [False, True])
def test_the_search_ends_with_its_training(settings: Settings, fails: bool) -> None:
    """Also after a failure; what it has found stays."""
    with running(settings) as (url, _):
        with suppress(ZeroDivisionError), ScheduleClient(url, chain(), method="hang") as client:
            offer = until(client.poll)
            assert 1 // (not fails)
        until(lambda: jobs_at(url)[0]["state"] == "cancelled")
        assert seen(f"{url}/v1/jobs/{offer.job}")["best"]["makespan_ms"] == offer.makespan_ms


def test_a_search_goes_on_with_new_costs(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """It is the same job, from its best, which is what runs: nothing is offered."""
    with running(settings) as (url, _), ScheduleClient(url, chain(), method="hang") as client:
        first = until(client.poll)
        assert not client.ended
        client.update(SLOWER, first.schedule)
        best = until(lambda: (job := seen(f"{url}/v1/jobs/{first.job}"))["problem_version"] == 2 and job["best"])
        until(lambda: client._job and client._job._seen == best["seq"])
        assert client.poll() is None
        assert len(jobs_at(url)) == 1
    assert best["source"] == "carried"
    assert best["makespan_ms"] == one_by_one(SLOWER).makespan_ms
    assert warnings(caplog) == []


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
        assert ("came after the last step" in client.why_none) == (offered is not None)
        offer = client.poll()
    assert (offer and offer.schedule.method) == offered
    assert re.fullmatch(r"none is shorter than the one of [\d.]+ ms, and the search is over", client.why_none)
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


@pytest.mark.parametrize(("stack", "offers"), [("torch", True), ("megatron", False)])
def test_what_a_service_offers_is_checked_for_the_stack(
    stack: StackName, offers: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With what the stack holds: offers are on its problem."""
    set_waits(monkeypatch)
    with fake_service(by_path(FOUND)) as (url, _), ScheduleClient(url, chain(), stack=stack) as client:
        until(lambda: client.ended)
        offer = client.poll()
    assert (offer.schedule.problem.stack if offer else None) == ("torch" if offers else None)
    assert [line for line in warnings(caplog) if "where Megatron's 1F1B has" in line] == warnings(caplog)
    assert bool(warnings(caplog)) != offers


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

    with fake_service(by_path({**FOUND, "/adoptions/1": slow})) as (url, asked), ScheduleClient(url, chain()) as client:
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


def test_an_outage_is_over_where_nothing_better_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    set_waits(monkeypatch)
    monkeypatch.setattr(client_module, "STEADY_S", 0.1)
    jobs = one_after_the_other(Answer(503), fake.job())
    with (
        fake_service(by_path({**FOUND, "/jobs": jobs, "/events": fake.open_events()})) as (url, asked),
        ScheduleClient(url, chain()) as client,
    ):
        until(lambda: "/v1/jobs/a1/events" in paths(asked))
        until(lambda: client.why_none.endswith("the search goes on"))


RUNS = {**FOUND, "/events": fake.open_events(fake.one()), "/cancel": fake.as_json({}, 202)}


def paths(asked: list[Asked]) -> list[str]:
    return [request.path for request in asked]


def test_close_cancels_the_job_while_a_report_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not wait long for the report."""
    monkeypatch.setattr(client_module, "REPORT_S", 0.3)
    monkeypatch.setattr(client_module, "CLOSE_S", 120.0)
    with fake_service(by_path({**RUNS, "/adoptions/1": fake.silent})) as (url, asked):
        client = ScheduleClient(url, chain())
        client.adopted(until(client.poll), 3)
        until(lambda: told(asked))
        client.close()
        assert not client._thread.is_alive()
        assert paths(asked)[-1] == "/v1/jobs/a1/cancel"


@pytest.mark.parametrize("answered", [True, False])
def test_close_cancels_a_job_whose_submission_has_no_answer_yet(
    answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent again it is the same submission; a service that never answers is not waited for."""
    monkeypatch.setattr(client_module, "REPORT_S", 60.0 if answered else 0.3)
    monkeypatch.setattr(client_module, "CLOSE_S", 120.0)
    jobs = one_after_the_other(fake.silent, fake.job() if answered else fake.silent)
    with fake_service(by_path({**RUNS, "/jobs": jobs})) as (url, asked):
        client = ScheduleClient(url, chain())
        until(lambda: asked)
        client.close()
        assert not client._thread.is_alive()
    assert paths(asked) == ["/v1/jobs"] * 2 + ["/v1/jobs/a1/cancel"] * answered
    assert len({(request.headers["Idempotency-Key"], request.body) for request in asked[:2]}) == 1


# Leases

TRAINING = """
import sys
from support.problems.chain import chain
from optpipe_runtime.service import client
client.LEASE_S = 2.0
with client.ScheduleClient(sys.argv[1], chain(), method="hang"):
    print("runs", flush=True)
    sys.stdin.read()
"""


def renewed_at(server: Server) -> str:
    """When a lease was renewed last."""
    with server.service.database.read() as db:
        return db.execute(select(func.max(tables.leases.c.renewed_at))).scalar_one()


def test_a_job_ends_with_its_killed_training(settings: Settings) -> None:
    """It keeps what was found. A job without a lease goes on."""
    with running(settings) as (url, server), client_at(url) as http:
        command = [sys.executable, "-c", TRAINING, url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as training:
            assert training.stdout
            assert training.stdout.readline() == b"runs\n"
            until(lambda: any(job["state"] == "running" for job in jobs_at(url)))
            before = renewed_at(server)
            until(lambda: renewed_at(server) > before)
            other = http.post("/v1/jobs", json={"problem": SLOWER.to_dict(), "method": "hang"}).json()["id"]
            training.kill()
        until(lambda: [job["id"] for job in jobs_at(url) if job["state"] != "cancelled"] == [other])
        ended = [job for job in jobs_at(url) if job["id"] != other]
        assert {job["reason"] for job in ended} == {GONE}
        assert all(job["value_ms"] for job in ended)


def test_a_living_training_whose_job_was_taken_for_gone_gets_another_one(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short ago it renewed the lease, as where the clock of the service has jumped."""
    set_waits(monkeypatch)
    with running(settings) as (url, server), ScheduleClient(url, chain(), method="hang"):
        until(lambda: [job["state"] for job in jobs_at(url)] == ["running"])
        with server.service.database.write() as db:
            db.execute(update(tables.leases).values(renewed_at="2026-01-01T00:00:00.000+00:00"))
            server.service._leases_since = ""
        until(lambda: [job["state"] for job in jobs_at(url)] == ["running", "cancelled"])


def test_a_renewal_without_an_answer_is_sent_again_before_the_lease_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LEASE_S", 0.4)
    set_waits(monkeypatch)
    table = {"/jobs": fake.job(), "/lease": fake.silent, **RUNS}
    with fake_service(by_path(table)) as (url, asked), ScheduleClient(url, chain()):
        until(lambda: paths(asked).count("/v1/jobs/a1/lease") > 1)


@pytest.mark.parametrize(("reason", "submissions"), [(GONE, 2), ("whoever", 1)])
def test_who_could_not_renew_a_lease_submits_another_job(
    reason: str, submissions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that somebody has cancelled meanwhile stays so."""
    set_waits(monkeypatch)
    table = {
        "/jobs": one_after_the_other(fake.job("a1"), fake.job("a2")),
        "a1/events": fake.events(fake.end("cancelled", reason)),
        "a2/events": fake.events(fake.end()),
    }
    with fake_service(by_path(table)) as (url, asked), ScheduleClient(url, chain()) as client:
        until(lambda: client.ended)
    posted = [request.json() for request in asked if request.path == "/v1/jobs"]
    assert [body["lease_s"] for body in posted] == [client_module.LEASE_S] * submissions
