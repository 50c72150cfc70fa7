"""`optpipe solve --url` and `optpipe jobs`: the commands that ask a service."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from support.commands import Run
from support.deployment import with_what_they_need
from support.fakes import service as fake
from support.fakes.service import Answer, Asked
from support.problems.chain import chain, gpipe
from support.processes import free_port, until
from support.service import fake_service
from support.service.following import set_waits

from optpipe import OptPipeError, ScheduleFile, check
from optpipe.options import SolveOptions
from optpipe_cli import options
from optpipe_cli.jobs import TRIES, ServiceSearch
from optpipe_server.http.server import Server

PROBLEM = chain()


@pytest.fixture
def service(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Server]]:
    """One with fake solvers, and a problem for it in `p.json`."""
    PROBLEM.save("p.json")
    for name in ("OPTPIPE_URL", "OPTPIPE_KEY"):
        monkeypatch.delenv(name, raising=False)
    with fake_service(tmp_path) as serving:
        yield serving


def test_a_service_solves_and_the_answer_is_that_of_a_search_here(run: Run, service: tuple[str, Server]) -> None:
    code, out, err = run(
        "solve", "p.json", "--url", service[0], "--method", "prove", "-o", "s.json", "--html", "s.html"
    )
    assert (code, "proven optimal" in out) == (0, True)
    assert re.search(r"^job [0-9a-f]{32}$", err, re.MULTILINE)
    file = ScheduleFile.load("s.json")
    assert (file.status, file.makespan_ms) == ("optimal", gpipe(PROBLEM).makespan_ms)
    assert check(PROBLEM, file.schedule()) == []
    (job,) = json.loads(run("jobs", "list", "--url", service[0], "--json").out)
    assert "gap: 0.0%\n" in run("jobs", "show", job["id"], "--url", service[0]).out, "as a search here says it"
    code, out, _ = run("solve", "p.json", "--url", service[0], "--method", "later", "--json", "--warm-start", "s.json")
    figures = json.loads(out)
    assert (code, figures["status"], figures["makespan_ms"]) == (0, "feasible", gpipe(PROBLEM).makespan_ms)


@pytest.mark.parametrize(
    ("comes_on", "outages", "lives"), [(True, 3 * TRIES, True), (False, TRIES - 1, True), (False, TRIES, False)]
)
def test_a_search_outlives_outages_as_long_as_it_comes_on(
    monkeypatch: pytest.MonkeyPatch, comes_on: bool, outages: int, lives: bool
) -> None:
    set_waits(monkeypatch, 0.001, 0.01)
    left = iter(range(outages))

    def answers(asked: Asked) -> Answer:
        if asked.path == "/v1/jobs":
            return fake.job()
        if not asked.path.endswith("/events"):
            return fake.incumbent(gpipe(PROBLEM))
        if next(left, None) is None:
            return fake.events(fake.end())
        return fake.events(fake.one(int(asked.headers["Last-Event-ID"]) + 1)) if comes_on else Answer(503)

    ends = contextlib.nullcontext() if lives else pytest.raises(OptPipeError, match="HTTP status 503")
    with fake.fake_service(answers) as (url, asked), ends:
        (result,) = ServiceSearch(url, PROBLEM, SolveOptions(), None)
        assert len(result.history) == comes_on, "found again and again, it is one step"
    assert [request.path for request in asked].count("/v1/jobs") == 1


def test_a_search_that_is_cancelled_before_the_service_answers_leaves_no_job() -> None:
    def late(_: Asked) -> Answer:
        search.cancel()
        return fake.job()

    table = {"/jobs": late, "/cancel": fake.as_json({}, 202), "/events": fake.events(fake.end("cancelled"))}
    with fake.fake_service(fake.by_path(table)) as (url, asked):
        search = ServiceSearch(url, PROBLEM, SolveOptions(), None)
        (result,) = search
    assert (result.schedule, "/v1/jobs/a1/cancel" in [request.path for request in asked]) == (None, True)


def test_a_bound_above_its_schedule_is_refused() -> None:
    found, ends = gpipe(PROBLEM), {"state": "done", "lower_bound_ms": gpipe(PROBLEM).makespan_ms + 1}
    table = {"/jobs": fake.job(), "/events": fake.events(fake.one(), fake.sent("end", ends))}
    with (
        fake.fake_service(fake.by_path(table | {"/incumbents/1": fake.incumbent(found)})) as (url, _),
        pytest.raises(OptPipeError, match=r"the service claims a bound of [\d.]+ ms, above a schedule of"),
    ):
        list(ServiceSearch(url, PROBLEM, SolveOptions(), None))


@pytest.mark.parametrize(
    ("method", "code", "sentence"),
    [
        ("infeasible", 3, r"infeasible: device 0 needs 2000 bytes and has 1000\n"),
        ("crash", 1, r"support.fakes.solver ended with exit code 1: boom\n"),
    ],
)
def test_why_there_is_no_schedule(run: Run, service: tuple[str, Server], method: str, code: int, sentence: str) -> None:
    ended = run("solve", "p.json", "--url", service[0], "--method", method)
    assert ended.code == code
    assert re.fullmatch(sentence, ended.out)
    job = json.loads(run("jobs", "list", "--url", service[0], "--json").out)[0]
    assert job["reason"] in run("jobs", "list", "--url", service[0]).out
    assert f"why: {job['reason']}\n" in run("jobs", "show", job["id"], "--url", service[0]).out


def test_jobs_are_listed_shown_extended_and_cancelled(
    run: Run, service: tuple[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, server = service
    monkeypatch.setenv("OPTPIPE_URL", url)
    assert run("jobs", "list").out.strip() == "there are no jobs"
    running = server.service.jobs
    import httpx

    job = httpx.post(f"{url}/v1/jobs", json={"problem": PROBLEM.to_dict(), "method": "hang"}, trust_env=False).json()
    until(lambda: running.job(job["id"]).state == "running")
    assert job["id"] in run("jobs", "list").out
    shown = run("jobs", "show", job["id"], "-o", "best.json").out
    assert "state: running\n" in shown
    assert " submitted: hang, makespan, 60 s" in shown
    assert ScheduleFile.load("best.json").makespan_ms == job["best"]["makespan_ms"]
    assert run("jobs", "extend", job["id"], "--time-limit", 90) == (0, "", "")
    assert run("jobs", "extend", job["id"], "--time-limit", 80).err == (
        f"error: {url}: time_limit_s = 80: the job has 90 s already; expected more.\n"
    )
    assert run("jobs", "cancel", job["id"]) == (0, "", "")
    until(lambda: running.job(job["id"]).state == "cancelled")


def test_mistakes_end_in_one_sentence(run: Run, service: tuple[str, Server]) -> None:
    url, _ = service
    nowhere = f"http://127.0.0.1:{free_port()}"
    for words, sentence in (
        (("jobs", "list"), "--url is missing, and OPTPIPE_URL is not set: the address of a service is expected"),
        (("jobs", "list", "--url", "here"), "url = 'here': must be http://HOST:PORT"),
        (("jobs", "list", "--url", nowhere), f"{nowhere}: All connection attempts failed"),
        (("jobs", "show", "0000", "--url", url), f"{url}: There is no such job."),
        (("solve", "p.json", "--url", nowhere), f"{nowhere}: All connection attempts failed"),
    ):
        code, out, err = run(*words)
        assert (code, out, err.splitlines()[-1]) == (2, "", f"error: {sentence}")


def test_a_client_without_its_packages_is_told_their_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "httpx" else name)
    code, out, err = run("jobs", "list", "--url", "http://127.0.0.1:1")
    assert (code, out, err) == (2, "", "error: httpx is not installed: pip install 'optpipe[client]'\n")


@pytest.mark.parametrize("extra", options.NEEDS)
def test_an_extra_brings_what_a_command_asks_for(extra: str) -> None:
    brought = with_what_they_need(f"optpipe[{extra}]")
    assert set(map(canonicalize_name, options.NEEDS[extra])) <= brought
    assert ("torch" in brought) == ("torch" in options.NEEDS[extra])
