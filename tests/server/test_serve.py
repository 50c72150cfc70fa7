"""The process of `optpipe serve`: where it listens, how it ends, what kill -9 leaves, its memory, its solver."""

import json
import random
import re
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.problems.chain import chain
from support.processes import free_port, over, until
from support.service import client_at, client_of, events
from support.service.postgres import on_sqlite
from support.service.serve_process import serve_process

from optpipe import InputError, Problem, ScheduleFile, check, solvers
from optpipe.evaluate.jit import compiles_elsewhere
from optpipe_server import Settings
from optpipe_server.accepted import MOST_MICROBATCHES, MOST_PARTS
from optpipe_server.database import Database
from optpipe_server.database.keys import Keys
from optpipe_server.http.app import LONGEST_BODY
from optpipe_server.http.server import listen, make_server

EXAMPLE = Path(__file__).parents[2] / "examples" / "problems" / "fastlink-4x8.json"


def submit_with_pid(client: httpx.Client, pid_file: Path) -> tuple[str, int]:
    """Submit a job whose solver never ends; return its URL and the solver's process id."""
    problem = Problem.from_dict({**chain().to_dict(), "name": str(pid_file)})
    job = client.post("/v1/jobs", json={"problem": problem.to_dict(), "method": "pid"}).json()
    assert job["best"]["method"] == "naive"
    until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
    return job["url"], int(pid_file.read_text())


def test_on_an_empty_machine_nothing_waits_for_what_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the first schedule nor a search; what cannot be searched is refused, or ended, for its own reason."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    solver, posed = solvers.installed(), Problem.load(EXAMPLE).to_dict()
    with serve_process(tmp_path, modules=(solver.SEARCH, solver.FIRST)) as (_, client):
        until(lambda: client.get("/readyz").status_code == 200)
        job = client.post("/v1/jobs", json={"problem": posed, "time_limit_s": 2.0}).json()
        assert job["best"]
        refused = client.post("/v1/jobs", json={"problem": posed, "method": "nope"})
        assert (refused.status_code, "method = 'nope'" in refused.json()["detail"]) == (422, True)
        none_fits = {**posed, "devices": [{**device, "activation_budget_bytes": 1} for device in posed["devices"]]}
        assert client.post("/v1/jobs", json={"problem": none_fits}).json()["state"] == "infeasible"
        over = client.get(job["url"], params={"wait": 60}).json()
        assert (over["state"], over["best"] is not None) == ("done", True)
        assert compiles_elsewhere(), "it was compiled before, which is no test"
    until(lambda: not compiles_elsewhere())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_in_order_with_open_streams(tmp_path: Path, number: signal.Signals) -> None:
    with serve_process(tmp_path) as (process, client):
        job, pid = submit_with_pid(client, tmp_path / "pid")
        with client.stream("GET", f"{job}/events") as response:
            stream = events(response)
            assert next(stream)["event"] == "incumbent"
            process.send_signal(number)
            assert list(stream) == []
        assert process.wait(60) in (0, -number)
        assert (tmp_path / "serve.log").read_text() == ""
        until(lambda: over(pid))


def test_a_killed_service_leaves_no_solver_and_a_restart_on_its_port_resumes(tmp_path: Path) -> None:
    pid_file, port = tmp_path / "pid", free_port()
    with serve_process(tmp_path, port=port) as (process, client):
        job, pid = submit_with_pid(client, pid_file)
        process.kill()
        process.wait(60)
        until(lambda: over(pid))
        pid_file.unlink()
    with serve_process(tmp_path, port=port) as (_, client):
        shown = client.get(job).json()
        assert (shown["state"] in ("queued", "running"), shown["best"]["method"]) == (True, "naive")
        until(pid_file.exists)
        assert client.get(job).json()["attempt"] == 2
        assert "is gone" in client.get(f"{job}/log").text


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_host_that_others_can_reach_needs_a_key(host: str, settings: Settings) -> None:
    with listen(host, 0) as listener:
        with pytest.raises(InputError, match="others can reach it, and there are no keys yet"):
            make_server(listener, settings, print)
        database = Database(settings.database)
        Keys(database).create("somebody", ["read"])
        database.close()
        make_server(listener, settings, print).service.database.close()


def test_an_unusable_address_is_refused_in_a_sentence() -> None:
    for host, port in (("192.0.2.1", 0), ("no such host", 0), ("127.0.0.1", 70000)):
        with pytest.raises(InputError, match=f"host = '{host}'" if port == 0 else "port = 70000"):
            listen(host, port)
    with listen("127.0.0.1", 0) as taken, pytest.raises(InputError, match=r"port = .*[Aa]ddress already in use"):
        listen("127.0.0.1", taken.getsockname()[1])


CLIENTS = 2
STARTS_S = 60.0


def submit_all(number: int, url: str, stop: threading.Event, acknowledged: dict[str, tuple[Any, Any]]) -> None:
    """Submit one job after the other, each until it is acknowledged, repeated with the same key if need be.

    `acknowledged` gets, by the key, the problem and the job as it was told.
    """
    with client_at(url) as http:
        for n in count():
            if stop.is_set():
                return
            problem, key, reply = chain(forward=1.0 + n + number / CLIENTS).to_dict(), f"{number}-{n}", None
            while reply is None:
                try:
                    body = {"problem": problem, "method": "plain"}
                    reply = http.post("/v1/jobs", json=body, headers={"Idempotency-Key": key})
                except httpx.TransportError:
                    time.sleep(0.1)
            assert reply.status_code in (200, 201), reply.text
            acknowledged[key] = problem, reply.json()


@pytest.mark.parametrize("kills", [1, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_no_acknowledged_job_is_lost(kills: int, database_url: str, tmp_path: Path) -> None:
    chance, port, stop = random.Random(kills), free_port(), threading.Event()
    acknowledged: dict[str, tuple[Any, Any]] = {}
    with ThreadPoolExecutor(CLIENTS) as pool, ExitStack() as ending:
        ending.callback(stop.set)
        clients: list[Future[None]] = []
        for _ in range(kills):
            with serve_process(tmp_path, database_url, port) as (started, _):
                url = f"http://127.0.0.1:{port}"
                clients = clients or [pool.submit(submit_all, k, url, stop, acknowledged) for k in range(CLIENTS)]
                known = len(acknowledged)
                until(lambda known=known: len(acknowledged) > known)
                time.sleep(chance.uniform(0.0, 0.3))
                started.kill()
                started.wait(60)
        stop.set()
        http = ending.enter_context(serve_process(tmp_path, database_url, port))[1]
        for client in clients:  # each ends when its last job is acknowledged
            client.result(STARTS_S)
        ids, address = set(), "/v1/jobs?limit=200"
        while address:
            page = http.get(address).json()
            ids |= {job["id"] for job in page["jobs"]}
            address = page["next"]
        # What was not acknowledged was said again, and is one job.
        assert {job["id"] for _, job in acknowledged.values()} == ids
        assert len(ids) == len(acknowledged), "a job of its own for every key"
        for problem, told in acknowledged.values():
            assert told["best"]["schedule"]["problem"] == problem
            now = http.get(told["url"]).json()
            assert now["best"]["makespan_ms"] <= told["best"]["makespan_ms"]
            assert now["state"] in ("queued", "running", "done")
            schedule = ScheduleFile.model_validate(now["best"]["schedule"]).schedule()
            assert check(schedule.problem, schedule) == []


@on_sqlite
def test_a_proven_first_schedule_is_cached_and_the_milp_runs_all_the_same(settings: Settings) -> None:
    """By the real solver."""
    problem = chain(memory=4, m=2).to_dict()
    with client_of(settings) as (client, _):
        job = client.post("/v1/jobs", json={"problem": problem}).json()
        assert (job["state"], job["best"]["source"]) == ("done", "heuristic")
        hit = client.post("/v1/cache/lookup", json={"problem": problem}).json()["hit"]
        assert (hit["exact"], hit["status"]) == (True, "optimal")
        job = client.post("/v1/jobs", json={"problem": problem, "method": "milp", "time_limit_s": 60.0}).json()
        assert (job["state"] in ("queued", "running"), job["gap"]) == (True, 0.0)
        with client.stream("GET", f"{job['url']}/events") as response:
            *_, end = [json.loads(event["data"]) for event in events(response)]
        assert (end["state"], end["gap"]) == ("done", 0.0)
        lines = client.get(f"{job['url']}/log").json()["lines"]
    assert {line["level"] for line in lines if line["text"].startswith("milp: HiGHS: optimal after ")} == {"info"}


MOST_MIB = 1536  # `docker-compose.yml` gives the process 2 GB


def peak_mib(pid: int) -> int:
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) >> 10


def test_the_largest_bodies_leave_memory_and_turns_to_others(tmp_path: Path) -> None:
    largest = chain(m=MOST_MICROBATCHES, memory=MOST_MICROBATCHES).to_dict()
    largest["stages"] = [largest["stages"][0] | {"device": s % 2} for s in range(MOST_PARTS // MOST_MICROBATCHES)]
    split = {"offload_ms": 1.0, "reload_ms": 1.0, "offload_bytes": 1, "offload_parts": 64}
    parted = largest | {"microbatches": 64, "stages": [stage | split for stage in largest["stages"]]}
    ops = [f"0F{j % 4096}" for j in range(LONGEST_BODY // 9)]
    whole = {"problem": chain().to_dict(), "devices": [{"program": ops}, {"program": []}]}

    def bodies(problem: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        return [
            ("workbench", {"problem": problem, "schedule": whole}),
            ("workbench", {"problem": problem, "schedule": whole | {"devices": [{"program": []}] * 2}}),
            ("cache/lookup", {"problem": problem}),
            ("jobs", {"problem": problem, "method": "plain"}),
            ("jobs", {"problem": problem, "method": "plain", "warm_start": whole}),
        ]

    with serve_process(tmp_path) as (process, client), ThreadPoolExecutor(32) as pool:
        refused = parted | {"microbatches": MOST_MICROBATCHES}  # 16,777,216 parts
        asked = [body for problem in (refused, largest, parted) for body in bodies(problem) * 2]
        replies = [pool.submit(client.post, f"/v1/{path}", json=body) for path, body in asked]
        small = client.post("/v1/jobs", json={"problem": chain().to_dict(), "method": "plain"})
        assert small.status_code == 201
        assert small.json()["best"]
        assert not all(reply.done() for reply in replies), "it has not waited for all of them"
        assert {reply.result().status_code for reply in replies} <= {200, 201, 422, 429, 503}
        assert {reply.result().status_code for reply in replies[: len(asked) // 3]} == {422}
        jobs = client.get("/v1/jobs").json()["jobs"]
        shown = list(pool.map(client.get, [job["url"] for job in jobs] * 4))
        assert {reply.status_code for reply in shown} == {200}
        assert peak_mib(process.pid) < MOST_MIB
