"""`optpipe solve --url` and `optpipe jobs`: the commands that ask a service."""

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from support.commands import Run
from support.problems.chain import chain, gpipe
from support.processes import free_port, until
from support.service import fake_service

from optpipe import Result, ScheduleFile, check
from optpipe.options import SolveOptions
from optpipe_cli.jobs import TRIES, ServiceSearch
from optpipe_runtime.service.requests import UnavailableError
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
    code, out, _ = run("solve", "p.json", "--url", service[0], "--method", "later", "--json", "--warm-start", "s.json")
    figures = json.loads(out)
    assert (code, figures["status"], figures["makespan_ms"]) == (0, "feasible", gpipe(PROBLEM).makespan_ms)


@pytest.mark.parametrize(
    ("comes_on", "outages", "lives"), [(True, 3 * TRIES, True), (False, TRIES - 1, True), (False, TRIES, False)]
)
def test_a_search_outlives_outages_as_long_as_it_comes_on(
    monkeypatch: pytest.MonkeyPatch, comes_on: bool, outages: int, lives: bool
) -> None:
    search, left = ServiceSearch("http://there", PROBLEM, SolveOptions(), None), iter(range(outages))
    search._path = "/v1/jobs/1"

    async def follow(self: ServiceSearch, _: object) -> Result:
        for _ in left:
            self._seen += comes_on
            raise UnavailableError("away")
        return self.best

    async def sleep(seconds: float) -> None:
        assert seconds >= 1

    monkeypatch.setattr(ServiceSearch, "_follow", follow)
    monkeypatch.setattr("optpipe_cli.jobs.asyncio.sleep", sleep)
    with contextlib.nullcontext() if lives else pytest.raises(UnavailableError):
        assert asyncio.run(search._followed(cast(Any, None))) is search.best


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
