"""From submission to the last incumbent, over HTTP."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.chain import chain, gpipe, one_by_one

from optpipe.files import ScheduleFile
from optpipe.problem import Problem
from optpipe.validity import check
from optpipe_cache import Cache
from optpipe_server import Settings

Serving = Callable[[Settings], httpx.Client]


def submit(client: httpx.Client, problem: Problem | None = None, method: str = "steps", **more: Any) -> dict[str, Any]:
    reply = client.post("/v1/jobs", json={"problem": (problem or chain()).to_dict(), "method": method, **more})
    assert reply.status_code == 201, reply.text
    job: dict[str, Any] = reply.json()
    assert reply.headers["location"] == job["url"]
    return job


def until_over(client: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    for _ in range(1000):
        shown: dict[str, Any] = client.get(job["url"]).json()
        if shown["state"] not in ("queued", "running"):
            return shown
        time.sleep(0.02)
    raise AssertionError(f"still {shown['state']}")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_reply_holds_a_verified_schedule(client: httpx.Client) -> None:
    job = submit(client, method="hang")
    assert job["state"] == "running"
    assert job["status"] == "feasible"
    best = job["best"]
    assert (best["seq"], best["source"], best["method"]) == (1, "solver", "naive")
    file = ScheduleFile.model_validate_json(client.get(best["url"]).text.partition('"schedule":')[2][:-1])
    assert file.schedule().programs == one_by_one(chain()).programs
    assert check(chain(), file.schedule()) == []
    assert best["makespan_ms"] == file.makespan_ms == one_by_one(chain()).makespan_ms


def test_better_schedules_are_appended(client: httpx.Client) -> None:
    job = until_over(client, submit(client))
    assert (job["state"], job["status"]) == ("done", "feasible")
    assert job["created_at"] <= job["started_at"] <= job["ended_at"]
    found = client.get(f"{job['url']}/incumbents").json()["incumbents"]
    assert [(one["seq"], one["method"]) for one in found] == [(1, "naive"), (2, "gpipe")]
    assert found[1]["makespan_ms"] < found[0]["makespan_ms"]
    assert client.get(f"{job['url']}/incumbents", params={"after": 1}).json()["incumbents"] == found[1:]
    best = client.get(f"{job['url']}/incumbents/best").json()
    assert best == job["best"] == client.get(found[1]["url"]).json()
    assert [one["id"] for one in client.get("/v1/jobs").json()["jobs"]] == [job["id"]]


def test_a_proof_ends_as_optimal(client: httpx.Client) -> None:
    job = until_over(client, submit(client, method="prove"))
    assert (job["state"], job["status"], job["gap"]) == ("done", "optimal", 0.0)
    assert job["lower_bound_ms"] == gpipe(chain()).makespan_ms


def test_an_infeasible_problem_is_a_state(client: httpx.Client) -> None:
    job = submit(client, method="infeasible")
    assert job["best"] is None
    job = until_over(client, job)
    assert (job["state"], job["status"]) == ("infeasible", "infeasible")
    assert job["reason"] == "device 0 needs 2000 bytes and has 1000"
    assert client.get(f"{job['url']}/incumbents/best").status_code == 404


def test_a_crash_is_a_state(client: httpx.Client) -> None:
    job = until_over(client, submit(client, method="crash"))
    assert (job["state"], job["status"], job["best"]) == ("failed", "unknown", None)
    assert "boom" in job["reason"]


@pytest.mark.parametrize(("method", "note"), [("crash later", "exit code -6"), ("garbage", "the solver's answer"), ("invalid", "rejected")])
def test_what_was_found_survives_a_bad_solver(client: httpx.Client, method: str, note: str) -> None:
    job = until_over(client, submit(client, method=method))
    assert job["state"] == "done"
    assert job["best"]["method"] == ("gpipe" if method == "invalid" else "naive")
    assert note in job["notes"][0]


def test_a_silent_solver_does_not_hold_the_reply(serving: Serving, settings: Settings, fake_solver: None) -> None:
    client = serving(replace(settings, first_schedule_s=0.3))
    began = time.monotonic()
    job = submit(client, method="silent")
    assert time.monotonic() - began < 5
    assert (job["state"], job["best"]) == ("running", None)
    client.post(f"{job['url']}/cancel")
    assert until_over(client, job)["state"] == "cancelled"


def test_cancel_keeps_the_best_and_ends_the_process(client: httpx.Client, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    job = submit(client, Problem.from_dict({**chain().to_dict(), "name": str(pid_file)}), method="pid")
    pid = int(pid_file.read_text())
    assert alive(pid)
    reply = client.post(f"{job['url']}/cancel")
    assert reply.status_code == 202
    over = until_over(client, job)
    assert (over["state"], over["reason"], over["best"]) == ("cancelled", "the job was cancelled", job["best"])
    assert not alive(pid)
    again = client.post(f"{job['url']}/cancel")
    assert (again.status_code, again.json()) == (202, over)


def test_a_cancel_after_the_end_changes_nothing(client: httpx.Client) -> None:
    job = until_over(client, submit(client))
    assert client.post(f"{job['url']}/cancel").json() == job


def test_a_waiting_job_has_its_first_schedule(client: httpx.Client) -> None:
    first = submit(client, method="hang")
    second = submit(client, chain(forward=2.0), method="slow")
    third = submit(client, chain(forward=3.0), method="hang")
    assert [job["state"] for job in (first, second, third)] == ["running", "queued", "queued"]
    assert all(job["best"]["method"] == "naive" for job in (second, third))
    client.post(f"{third['url']}/cancel")
    assert client.get(third["url"]).json()["state"] == "cancelled"
    client.post(f"{first['url']}/cancel")
    assert until_over(client, second)["best"]["method"] == "gpipe"
    assert client.get(third["url"]).json()["state"] == "cancelled"


def test_a_full_queue_refuses(serving: Serving, settings: Settings, fake_solver: None) -> None:
    client = serving(replace(settings, queue=0))
    submit(client, method="hang")
    reply = client.post("/v1/jobs", json={"problem": chain(forward=2.0).to_dict(), "method": "hang"})
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "10"


def test_solved_schedules_are_found_again(client: httpx.Client) -> None:
    solved = until_over(client, submit(client))
    again = submit(client, method="silent")
    assert (again["best"]["seq"], again["best"]["source"]) == (1, "cache")
    assert again["best"]["schedule"]["devices"] == solved["best"]["schedule"]["devices"]
    near = submit(client, chain(scale=3.0), method="silent")
    assert near["best"]["source"] == "cache"
    assert near["best"]["makespan_ms"] == pytest.approx(3 * solved["best"]["makespan_ms"])
    assert near["lower_bound_ms"] is None


def test_a_proven_schedule_is_not_searched_again(client: httpx.Client) -> None:
    until_over(client, submit(client, method="prove"))
    job = submit(client, method="crash")
    assert (job["state"], job["status"], job["best"]["source"]) == ("done", "optimal", "cache")


def test_an_unusable_cache_stops_nobody(client: httpx.Client, settings: Settings) -> None:
    for file in settings.cache.parent.glob("cache.sqlite*"):
        file.unlink()
    settings.cache.mkdir()
    assert until_over(client, submit(client))["state"] == "done"


def test_a_warm_start_that_fits_is_the_first_schedule(client: httpx.Client) -> None:
    given = ScheduleFile.of(gpipe(chain(forward=4.0))).model_dump(mode="json", exclude_none=True)
    job = submit(client, method="silent", warm_start=given)
    assert (job["best"]["source"], job["best"]["makespan_ms"]) == ("warm_start", gpipe(chain()).makespan_ms)
    tight = submit(client, chain(memory=1), method="hang", warm_start=given)
    assert (tight["best"]["source"], tight["best"]["method"]) == ("solver", "naive")


def test_a_worse_warm_start_does_not_hide_the_cache(client: httpx.Client, settings: Settings) -> None:
    Cache(settings.cache).add(gpipe(chain()), "feasible", 2.0)
    given = ScheduleFile.of(one_by_one(chain())).model_dump(mode="json", exclude_none=True)
    job = submit(client, method="silent", warm_start=given)
    assert (job["best"]["source"], job["lower_bound_ms"]) == ("cache", 2.0)


def test_span_is_an_objective_of_its_own(client: httpx.Client) -> None:
    job = until_over(client, submit(client, method="prove", objective="span"))
    assert job["objective"] == "span"
    assert job["best"]["span_ms"] == gpipe(chain()).span_ms
    assert submit(client, method="steps")["best"]["source"] == "solver"
