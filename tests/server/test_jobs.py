"""From submission to the last incumbent, over HTTP."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
from support.chain import chain, gpipe, one_by_one
from support.databases import on_sqlite
from support.rest import submit, until_cached, until_over, until_running

from optpipe.evaluate.objective import TOLERANCE
from optpipe.model.problem import Problem
from optpipe.schedule import ScheduleFile, check
from optpipe_server import Settings

Serving = Callable[[Settings], httpx.Client]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_reply_has_a_verified_schedule(client: httpx.Client) -> None:
    job = submit(client, method="hang")
    assert job["state"] in ("queued", "running")
    assert job["status"] == "feasible"
    best = job["best"]
    assert (best["seq"], best["source"], best["method"], best["attempt"]) == (1, "heuristic", "naive", 0)
    file = ScheduleFile.model_validate(best["schedule"])
    assert file.schedule().programs == one_by_one(chain()).programs
    assert check(chain(), file.schedule()) == []
    assert best["makespan_ms"] == file.makespan_ms == one_by_one(chain()).makespan_ms


def test_better_schedules_are_appended(client: httpx.Client) -> None:
    job = until_over(client, submit(client))
    assert (job["state"], job["status"]) == ("done", "feasible")
    assert job["created_at"] <= job["started_at"] <= job["ended_at"]
    found = client.get(f"{job['url']}/incumbents").json()["incumbents"]
    assert [(one["seq"], one["method"], one["source"]) for one in found] == [
        (1, "naive", "heuristic"),
        (2, "gpipe", "solver"),
    ]
    assert found[1]["makespan_ms"] < found[0]["makespan_ms"]
    assert client.get(f"{job['url']}/incumbents", params={"after": 1}).json()["incumbents"] == found[1:]
    best = client.get(f"{job['url']}/incumbents/best").json()
    assert best == job["best"] == client.get(found[1]["url"]).json()
    assert [one["id"] for one in client.get("/v1/jobs").json()["jobs"]] == [job["id"]]


def test_an_infeasible_problem_is_a_state(client: httpx.Client) -> None:
    job = submit(client, method="infeasible")
    assert (job["state"], job["status"], job["best"]) == ("infeasible", "infeasible", None)
    assert job["reason"] == "device 0 needs 2000 bytes and has 1000"
    assert client.get(f"{job['url']}/incumbents/best").status_code == 404
    assert client.get(f"{job['url']}/timeline").status_code == 404


def test_a_first_schedule_may_come_from_the_search(client: httpx.Client) -> None:
    job = submit(client, method="later")
    assert (job["best"]["source"], job["best"]["attempt"]) == ("solver", 1)


@on_sqlite
def test_a_silent_solver_does_not_delay_the_reply(serving: Serving, settings: Settings, fake_solver: None) -> None:
    client = serving(replace(settings, first_schedule_s=0.3))
    began = time.monotonic()
    job = submit(client, method="silent")
    assert time.monotonic() - began < 60
    assert (job["state"] in ("queued", "running"), job["best"]) == (True, None)
    client.post(f"{job['url']}/cancel")
    assert until_over(client, job)["state"] == "cancelled"


def test_an_unknown_method_is_refused(client: httpx.Client) -> None:
    reply = client.post("/v1/jobs", json={"problem": chain().to_dict(), "method": "none"})
    assert (reply.status_code, reply.json()["detail"]) == (422, "method = 'none': the methods are others")


def test_cancel_keeps_the_best_and_ends_the_process(client: httpx.Client, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    job = submit(client, Problem.from_dict({**chain().to_dict(), "name": str(pid_file)}), method="pid")
    until_running(client, job)
    while not (pid_file.exists() and pid_file.read_text().strip()):
        time.sleep(0.01)
    pid = int(pid_file.read_text())
    assert alive(pid)
    assert client.post(f"{job['url']}/cancel").status_code == 202
    over = until_over(client, job)
    assert (over["state"], over["reason"], over["best"]) == ("cancelled", "the job was cancelled", job["best"])
    assert not alive(pid)
    again = client.post(f"{job['url']}/cancel")
    assert (again.status_code, again.json()) == (202, over)


@on_sqlite
def test_a_full_queue_refuses(serving: Serving, settings: Settings, fake_solver: None) -> None:
    client = serving(replace(settings, queue=1))
    until_running(client, submit(client, method="hang"))
    submit(client, method="hang")
    reply = client.post("/v1/jobs", json={"problem": chain(forward=2.0).to_dict(), "method": "hang"})
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "10"


def test_solved_schedules_are_found_again(client: httpx.Client) -> None:
    solved = until_cached(client, submit(client))
    again = submit(client, method="auto")
    assert (again["best"]["seq"], again["best"]["source"]) == (1, "cache")
    assert again["best"]["schedule"]["devices"] == solved["best"]["schedule"]["devices"]
    near = submit(client, chain(scale=3.0), method="auto")
    assert near["best"]["source"] == "cache"
    assert near["best"]["makespan_ms"] <= 3 * solved["best"]["makespan_ms"] * (1 + TOLERANCE)


def test_a_proven_schedule_is_not_searched_again(client: httpx.Client) -> None:
    until_cached(client, submit(client, method="prove"))
    job = submit(client, method="auto")
    assert (job["state"], job["status"], job["best"]["source"]) == ("done", "optimal", "cache")
    assert submit(client, method="plain")["best"]["source"] == "heuristic", "a method that is named is asked itself"


def test_a_warm_start_that_fits_is_the_first_schedule(client: httpx.Client) -> None:
    given = ScheduleFile.from_schedule(gpipe(chain(forward=4.0))).model_dump(mode="json", exclude_none=True)
    job = submit(client, method="silent", warm_start=given)
    assert (job["best"]["source"], job["best"]["makespan_ms"]) == ("warm_start", gpipe(chain()).makespan_ms)
    tight = submit(client, chain(memory=1), method="hang", warm_start=given)
    assert (tight["best"]["source"], tight["best"]["method"]) == ("heuristic", "naive")
