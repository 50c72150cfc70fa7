"""docker-compose.yml's commands and environments work together, against a real PostgreSQL with a password."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psycopg
import pytest
from support.deploy.deployment import SCRAPED, SERVICES
from support.deploy.stack import PASSWORD, STARTS_S, Stack
from support.service import client_at
from support.service.postgres import Postgres
from support.until import until

PROBLEM = Path(__file__).parents[2] / "examples" / "problems"
WORKERS = [f"worker-{number + 1}" for number in range(SERVICES["worker"]["deploy"]["replicas"])]


@pytest.fixture
def stack(postgres: Postgres, tmp_path: Path) -> Iterator[Stack]:
    """A database whose owner needs the password, as in the image; nothing is started yet."""
    rules = postgres.folder / "data" / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text(f"local all optpipe scram-sha-256\n{before}")
    postgres.run("select pg_reload_conf()")
    postgres.run(f"create role optpipe login password '{PASSWORD}'")
    with postgres.database() as url:
        name = url.split("/")[3].partition("?")[0]
        postgres.run(f"alter database {name} owner to optpipe")
        made = Stack(tmp_path, postgres, name)
        try:
            yield made
        finally:
            made.close()
    postgres.run("drop role optpipe")
    rules.write_text(before)
    postgres.run("select pg_reload_conf()")


INSIDE = {"api": "8000", "worker": "9101"}


def listens(stack: Stack, name: str) -> bool:
    with (
        suppress(OSError),
        socket.create_connection(("127.0.0.1", stack.port(name, INSIDE[name.partition("-")[0]])), STARTS_S),
    ):
        return True
    return False


def key(stack: Stack, name: str, *scopes: str) -> str:
    """Create a key by the command in docs/service.md."""
    made = stack.run(
        "api",
        "optpipe",
        "keys",
        "create",
        name,
        *(word for scope in scopes for word in ("--scope", scope)),
    )
    assert (made.returncode, made.stderr) == (0, "")
    return made.stdout.strip()


def test_a_job_is_solved_by_one_of_two_workers_and_all_end_in_order(stack: Stack, postgres: Postgres) -> None:
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(f"{postgres.url(stack.database)}".replace("postgres@", "optpipe@"), password="guessed").close()

    # Others could reach it, and there is no key yet.
    refused = stack.run("api", *stack.command("api"))
    assert refused.returncode == 2
    assert "optpipe keys create NAME --scope submit" in refused.stderr.splitlines()[-1]
    (stack.secrets / "metrics_key").write_text(key(stack, "prometheus", "admin") + "\n")
    mine = key(stack, "me", "submit", "read")

    for name in ("api", *WORKERS):  # all at once, as compose does
        stack.start(name)
    for name in ("api", *WORKERS):
        until(lambda name=name: listens(stack, name))  # until then each check is a process in vain
        until(lambda name=name: stack.healthy(name))

    url = f"http://127.0.0.1:{stack.port('api', '8000')}"
    with client_at(url, mine) as client:
        problem = json.loads((PROBLEM / "shared-pcie-4x8.json").read_text())
        posted = client.post("/v1/jobs", json={"problem": problem, "time_limit_s": 200, "gap": 0.5})
        assert posted.status_code == 201, posted.text
        job = posted.json()
        ended = until(
            lambda: (now := client.get(job["url"]).json())["state"] not in ("queued", "running") and now,
            within_s=STARTS_S,
        )
        assert ended["state"] == "done"
        assert ended["best"]["makespan_ms"] > 0
        taken = [
            line["text"]
            for line in client.get(f"{job['url']}/log").json()["lines"]
            if line["text"].startswith("taken by ")
        ]
        assert len(taken) == 1
        assert (
            client.put(f"{job['url']}/adoptions/1", json={"step": 7, "measured_iteration_ms": 500.0}).status_code == 200
        )
        assert client.get("/metrics").status_code == 403

    counted = scraped(stack, "api").splitlines()
    for line in (
        'optpipe_jobs{state="done"} 1.0',
        'optpipe_jobs{state="queued"} 0.0',
        "optpipe_jobs_submitted_total 1.0",
        # A process for first schedules that still compiles leaves them to the worker.
        *(["optpipe_first_schedule_seconds_count 1.0", "optpipe_incumbents_total 1.0"] if job["best"] else []),
        'optpipe_cache_lookups_total{result="miss"} 1.0',
        "optpipe_adoptions_total 1.0",
        'optpipe_request_seconds_count{method="POST",route="/v1/jobs",status="201"} 1.0',
    ):
        assert line in counted
    # A worker counts a job after it has stored the job's end.
    done = 'optpipe_solve_seconds_count{state="done"} 1.0'
    assert until(lambda: sum(done in scraped(stack, name) for name in WORKERS)) == 1

    passed_on = -signal.SIGTERM  # uvicorn, once all has ended
    assert [stack.stop(name) for name in (*WORKERS, "api")] == [0, 0, passed_on]
    for name in ("api", *WORKERS):
        said = stack.log(name)
        assert all({"time", "level", "event"} <= json.loads(line).keys() for line in said.splitlines())
        assert PASSWORD not in said
        assert mine not in said


def scraped(stack: Stack, name: str) -> str:
    """What Prometheus gets when it scrapes as deploy/prometheus.yml says."""
    [how] = [how for how in SCRAPED if how["job_name"] == name.partition("-")[0]]
    headers = {}
    if "authorization" in how:
        credentials = Path(stack.mapped(name, how["authorization"]["credentials_file"])).read_text().strip()
        headers = {"Authorization": f"Bearer {credentials}"}
    reply = httpx.get(
        f"http://127.0.0.1:{stack.port(name, INSIDE[how['job_name']])}/metrics",
        headers=headers,
        timeout=240,
        trust_env=False,
    )
    assert reply.status_code == 200
    return reply.text


def test_the_database_is_healthy_when_it_answers(postgres: Postgres) -> None:
    """By the program of the health check; here PostgreSQL listens on a socket file only."""
    check: list[str] = [*SERVICES["postgres"]["healthcheck"]["test"][1:]]
    check[check.index("--host") + 1] = str(postgres.folder)
    assert subprocess.run([str(postgres._programs / check[0]), *check[1:]], check=False).returncode == 0
    check[check.index("--host") + 1] = str(postgres.folder / "data")
    assert subprocess.run([str(postgres._programs / check[0]), *check[1:]], check=False).returncode == 2
