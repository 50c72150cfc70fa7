"""Jobs over HTTP: first schedules, conditional requests, idempotency, waiting, pages of a list, changes, exports."""

import asyncio
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.problems.chain import chain, gpipe, one_by_one
from support.processes import until
from support.service import client_of
from support.service.postgres import on_sqlite
from support.service.rest import PROBLEM, submit, until_cached, until_over, until_running

from optpipe import Schedule, ScheduleFile, check, export_schedule
from optpipe.evaluate.objective import TOLERANCE
from optpipe.formats.stacks import STACKS
from optpipe.model.placement import rechunk
from optpipe.schedule import timed_ops
from optpipe_server import Settings
from optpipe_server.http import service


def etag(job: dict[str, Any]) -> str:
    return f'"{job["version"]}"'


def test_the_same_key_and_body_are_the_same_job(client: httpx.Client) -> None:
    body = {"problem": chain().to_dict(), "method": "hang"}
    first = client.post("/v1/jobs", json=body, headers={"Idempotency-Key": "a"})
    again = client.post("/v1/jobs", json=body, headers={"Idempotency-Key": "a"})
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["id"] == first.json()["id"]
    assert again.headers["location"] == first.headers["location"]
    other = client.post("/v1/jobs", json={**body, "priority": 1}, headers={"Idempotency-Key": "a"})
    assert other.status_code == 422
    assert other.json()["detail"] == "Idempotency-Key: it was used with another body before."
    assert client.post("/v1/jobs", json=body, headers={"Idempotency-Key": "b"}).json()["id"] != first.json()["id"]
    assert client.post("/v1/jobs", json=body, headers={"Idempotency-Key": "x" * 256}).status_code == 422


def test_pages_of_the_list(client: httpx.Client) -> None:
    jobs = [submit(client, method="infeasible")["id"] for _ in range(5)]
    hanging = submit(client, method="hang")["id"]
    seen, address = [], "/v1/jobs?limit=2&state=infeasible"
    while address:
        page = client.get(address).json()
        assert len(page["jobs"]) <= 2
        seen += [job["id"] for job in page["jobs"]]
        address = page["next"]
    assert seen == jobs[::-1]
    assert client.get(f"/v1/jobs/{seen[0]}/incumbents/best").status_code == 404
    assert client.get("/v1/jobs").json()["jobs"][0]["id"] == hanging
    for wrong in ("cursor=x", "cursor=%00", "limit=0", "limit=201", "state=stopped", "cursor=LTE"):
        assert client.get(f"/v1/jobs?{wrong}").status_code == 422


def test_an_unchanged_job_is_304(client: httpx.Client) -> None:
    job = until_over(client, submit(client))
    for known in (etag(job), f'"0", {etag(job)}', f"W/{etag(job)}", "*"):
        reply = client.get(job["url"], headers={"If-None-Match": known})
        assert (reply.status_code, reply.content, reply.headers["etag"]) == (304, b"", etag(job))
    assert client.get(job["url"], headers={"If-None-Match": '"1"'}).json() == job
    assert "immutable" in client.get(job["best"]["url"]).headers["cache-control"]


def test_waiting_for_a_change_and_for_the_end(client: httpx.Client) -> None:
    job = until_running(client, submit(client, method="hang"))
    reply = client.get(job["url"], params={"wait": 0.2}, headers={"If-None-Match": etag(job)})
    assert reply.status_code == 304
    threading.Timer(0.2, lambda: client.post(f"{job['url']}/cancel")).start()
    changed = client.get(job["url"], params={"wait": 60}, headers={"If-None-Match": etag(job)})
    assert (changed.status_code, changed.json()["version"] > job["version"]) == (200, True)
    assert until_over(client, job)["state"] == "cancelled"
    began = time.monotonic()
    assert client.get(job["url"], params={"wait": 60}).json()["state"] == "cancelled"
    assert time.monotonic() - began < 20, "what is over is not waited for"
    for wrong in (-1, 61, "nan", "inf", "x"):
        assert client.get(job["url"], params={"wait": wrong}).status_code == 422


def test_more_time(client: httpx.Client) -> None:
    job = until_running(client, submit(client, method="hang"))

    def extend(time_limit_s: Any, if_match: str | None) -> httpx.Response:
        headers = {} if if_match is None else {"If-Match": if_match}
        return client.patch(job["url"], json={"time_limit_s": time_limit_s}, headers=headers)

    for stale in (None, '"1"', "*", "x", f"W/{etag(job)}"):
        assert extend(90.0, stale).status_code == 412
    no_more = extend(60.0, etag(job))
    assert no_more.status_code == 409
    assert no_more.json()["detail"] == "time_limit_s = 60: the job has 60 s already; expected more."
    assert extend(3601, etag(job)).status_code == 422
    more = extend(90.0, etag(job))
    assert (more.status_code, more.json()["options"]["time_limit_s"]) == (200, 90.0)
    assert more.headers["etag"] != etag(job)
    client.post(f"{job['url']}/cancel")
    over = until_over(client, job)
    assert extend(120.0, etag(over)).status_code == 409


def test_other_costs(client: httpx.Client) -> None:
    job = until_cached(client, submit(client, method="auto"))
    slower = chain(forward=1.2)
    reply = client.post(f"{job['url']}/problem", json={"problem": slower.to_dict()})
    assert reply.status_code == 200, reply.text
    posed = reply.json()
    assert (posed["problem_version"], posed["problem_sha256"]) == (2, slower.sha256)
    assert (posed["best"]["source"], posed["best"]["seq"]) == ("cache", 3), "the finished job's schedule is there, too"
    assert posed["best"]["makespan_ms"] <= gpipe(slower).makespan_ms
    assert posed["best"]["schedule"]["problem"] == slower.to_dict()
    old = client.get(job["best"]["url"]).json()
    assert old == job["best"], "what was found for the costs before stays as it was"
    assert until_over(client, job)["state"] == "done"


def test_a_job_for_a_stack_has_the_problem_that_the_stack_runs(client: httpx.Client) -> None:
    """Without offloads and with what torch holds, also for other costs. What no stack runs is refused at once."""
    job = until_cached(client, submit(client, method="auto", stack="torch"))
    posed, slower = map(STACKS["torch"].restrict, (chain(), chain(forward=1.2)))
    assert posed.stages[0].offload_ms is None
    assert (job["options"]["stack"], job["problem_sha256"]) == ("torch", posed.sha256)
    assert job["best"]["schedule"]["problem"] == posed.to_dict()
    reply = client.post(f"{job['url']}/problem", json={"problem": chain(forward=1.2).to_dict()})
    assert reply.json()["problem_sha256"] == slower.sha256
    assert until_over(client, job)["state"] == "done"
    both_ways = rechunk(chain(), 1, "bidirectional").to_dict()
    for problem, options, said in (
        (both_ways, {"stack": "torch"}, "in PyTorch's pipelining every micro-batch passes all stages in order"),
        (chain().to_dict(), {"stack": "megatron", "method": "lns"}, "megatron has its own schedules only"),
        (chain().to_dict(), {"stack": "jax"}, "stack"),
    ):
        refused = client.post("/v1/jobs", json={"problem": problem, **options})
        assert (refused.status_code, said in refused.text) == (422, True), refused.text


def test_another_problem_is_another_job(client: httpx.Client) -> None:
    job = submit(client, method="hang")
    alone = {**chain().to_dict(), "devices": [{"activation_budget_bytes": 9000}] * 3}
    for other in (chain(m=3).to_dict(), chain(offload=None).to_dict(), alone):
        reply = client.post(f"{job['url']}/problem", json={"problem": other})
        assert (reply.status_code, "submit it anew" in reply.json()["detail"]) == (409, True)
    client.post(f"{job['url']}/cancel")
    until_over(client, job)
    assert client.post(f"{job['url']}/problem", json={"problem": chain(forward=2.0).to_dict()}).status_code == 409


def test_adoptions_are_recorded(client: httpx.Client) -> None:
    job = until_over(client, submit(client))
    address = f"{job['url']}/adoptions/2"
    said = client.put(address, json={"step": 7}).json()
    assert (said["step"], said["measured_iteration_ms"]) == (7, None)
    said = client.put(address, json={"step": 7, "measured_iteration_ms": 9.5}).json()
    assert (said["predicted_ms"], said["measured_iteration_ms"]) == (job["best"]["makespan_ms"], 9.5)
    assert client.get(f"{job['url']}/adoptions").json() == {"adoptions": [said]}
    one, two = client.get(f"{job['url']}/incumbents").json()["incumbents"]
    assert (one["adoption"], two["adoption"]["measured_iteration_ms"]) == (None, 9.5)
    assert client.put(f"{job['url']}/adoptions/3", json={"step": 7}).status_code == 404
    for wrong in ({"step": -1}, {"step": 1.5}, {"step": True}, {}, {"step": 1, "measured_iteration_ms": -1}):
        assert client.put(address, json=wrong).status_code == 422


def test_the_trace_has_the_schedules_ops_and_an_export_the_rows_for_pytorch(client: httpx.Client) -> None:
    job = until_over(client, submit(client))
    trace = client.get(f"{job['url']}/trace?seq=2").json()
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == len(timed_ops(gpipe(chain())))
    assert client.get(f"{job['url']}/trace?seq=3").status_code == 404
    address = f"{job['url']}/export"
    reply = client.get(address, params={"to": "torch-comms", "seq": 2})
    assert reply.headers["content-type"].startswith("text/csv"), reply.text
    assert reply.text == export_schedule(gpipe(chain()), "torch-comms")
    assert client.get(address, params={"to": "torch-csv"}).text == export_schedule(gpipe(chain()), "torch-csv")
    assert client.get(address, params={"to": "torch-csv", "seq": 3}).status_code == 404
    refused = client.get(address, params={"to": "torch"})
    assert (refused.status_code, "torch-csv" in refused.json()["detail"]) == (422, True)


def test_an_export_that_does_not_fit_is_refused_or_asked_for(client: httpx.Client) -> None:
    """Without its offloads the schedule needs memory for two micro-batches, and there is memory for one."""
    problem = chain(memory=1)
    programs = [[f"{s}{op}" for op in ("F0", "O0", "D0", "F1", "BW1", "R0", "BW0")] for s in range(2)]
    offloads = Schedule.parse(problem, programs)
    given = json.loads(ScheduleFile.from_schedule(offloads).to_json())
    job = submit(client, problem, method="silent", warm_start=given)
    asked = {"to": "torch-csv", "without_offload": True}
    refused = client.get(f"{job['url']}/export", params=asked)
    assert (refused.status_code, refused.headers["content-type"]) == (409, "application/problem+json")
    why = "It does not fit without offloads: device 0 needs 2 kB during 0F1 and has 1"
    assert refused.json()["detail"].startswith(why)
    reply = client.get(f"{job['url']}/export", params=asked | {"despite_memory": True})
    assert reply.text == export_schedule(offloads, "torch-csv", without_offload=True)


def test_the_log_tells_what_happened(client: httpx.Client) -> None:
    job = until_over(client, submit(client))
    lines = client.get(f"{job['url']}/log").json()["lines"]
    assert lines[0]["text"].startswith("submitted: plain, makespan, 60 s")
    assert lines[-1]["text"].startswith("ended: done")
    seen, address = [], f"{job['url']}/log?limit=1"
    while address:
        page = client.get(address).json()
        seen += page["lines"]
        address = page["next"]
    assert seen == lines


def test_health_and_metrics(client: httpx.Client) -> None:
    assert client.get("/healthz").json()["status"] == "ok"
    assert client.get("/readyz").json() == {"status": "ready", "solves": 4}
    submit(client, method="infeasible")
    told = client.get("/metrics")
    assert told.headers["content-type"].startswith("text/plain")
    assert float(re.findall(r'optpipe_jobs\{state="infeasible"\} (\S+)', told.text)[0]) >= 1
    assert 'optpipe_request_seconds_count{method="POST",route="/v1/jobs",status="201"}' in told.text


def test_the_description_has_examples_of_bodies_that_work(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()
    for path, methods in described["paths"].items():
        for operation in methods.values():
            if body := operation.get("requestBody", {}).get("content", {}).get("application/json"):
                model = body["schema"]["$ref"].rpartition("/")[2]
                example = described["components"]["schemas"][model]["example"]
                if "{" not in path:
                    assert client.post(path, json=example).status_code in (200, 201), path


def test_the_reply_has_a_verified_schedule_and_better_ones_are_appended(client: httpx.Client) -> None:
    posted = submit(client)
    best = posted["best"]
    assert (best["seq"], best["source"], best["method"], best["attempt"]) == (1, "heuristic", "naive", 0)
    file = ScheduleFile.model_validate(best["schedule"])
    assert file.schedule().programs == one_by_one(chain()).programs
    assert check(chain(), file.schedule()) == []
    assert best["makespan_ms"] == file.makespan_ms == one_by_one(chain()).makespan_ms
    job = until_over(client, posted)
    assert (job["state"], job["status"]) == ("done", "feasible")
    assert job["created_at"] <= job["started_at"] <= job["ended_at"]
    found = client.get(f"{job['url']}/incumbents").json()["incumbents"]
    named = [(one["seq"], one["method"], one["source"]) for one in found]
    assert named == [(1, "naive", "heuristic"), (2, "gpipe", "solver")]
    assert found[1]["makespan_ms"] < found[0]["makespan_ms"]
    assert client.get(f"{job['url']}/incumbents", params={"after": 1}).json()["incumbents"] == found[1:]
    best = client.get(f"{job['url']}/incumbents/best").json()
    assert best == job["best"] == client.get(found[1]["url"]).json()
    assert [one["id"] for one in client.get("/v1/jobs").json()["jobs"]] == [job["id"]]
    searched = submit(client, method="later")["best"]
    assert (searched["source"], searched["attempt"]) == ("solver", 1), "a first schedule may come from the search"


@on_sqlite
def test_a_silent_solver_does_not_delay_the_reply(settings: Settings, fake_solver: None) -> None:
    with client_of(replace(settings, first_schedule_s=0.3)) as (client, _):
        began = time.monotonic()
        job = submit(client, method="silent")
        assert time.monotonic() - began < 60
        assert (job["state"] in ("queued", "running"), job["best"]) == (True, None)
        client.post(f"{job['url']}/cancel")
        assert until_over(client, job)["state"] == "cancelled"


@on_sqlite
def test_the_limit_of_open_jobs_refuses(settings: Settings, fake_solver: None) -> None:
    with client_of(replace(settings, open_jobs=2)) as (client, _):
        until_running(client, submit(client, method="hang"))
        submit(client, method="hang")
        reply = client.post("/v1/jobs", json={"problem": chain(forward=2.0).to_dict(), "method": "hang"})
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "10")


@on_sqlite
def test_more_submissions_than_it_can_hold_are_sent_away_for_seconds(
    settings: Settings, fake_solver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_SUBMITTED", 1)
    with client_of(replace(settings, first_schedule_s=60.0)) as (client, server), ThreadPoolExecutor() as threads:
        body = {"problem": PROBLEM, "method": "asleep"}  # its first schedule takes as long as it may
        first = threads.submit(client.post, "/v1/jobs", json=body)
        until(lambda: server.service.first_schedules.waiting)
        refused = client.post("/v1/jobs", json=body)
        assert (refused.status_code, refused.json()["detail"]) == (429, "busy: 1 submissions wait; retry in 5 s")
        assert refused.headers["Retry-After"] == "5"
        server.should_exit = True
        assert first.result().status_code in (201, 503)


@on_sqlite
def test_it_is_ready_once_first_schedules_are_made(settings: Settings, fake_solver: None) -> None:
    with client_of(settings) as (client, server):
        pool, started = server.service.pool, server.service.pool._executor
        pool._executor = asyncio.Future(loop=started.get_loop())
        reply = client.get("/readyz")
        assert (reply.status_code, reply.headers["Retry-After"]) == (503, "1")
        pool._executor = started
        until(lambda: client.get("/readyz").status_code == 200)


def test_solved_schedules_are_found_again(client: httpx.Client) -> None:
    solved = until_cached(client, submit(client))
    again = submit(client, method="auto")
    assert (again["best"]["seq"], again["best"]["source"]) == (1, "cache")
    assert again["best"]["schedule"]["devices"] == solved["best"]["schedule"]["devices"]
    near = submit(client, chain(scale=3.0), method="auto")
    assert near["best"]["source"] == "cache"
    assert near["best"]["makespan_ms"] <= 3 * solved["best"]["makespan_ms"] * (1 + TOLERANCE)
