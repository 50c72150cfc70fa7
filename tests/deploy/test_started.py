"""docker-compose.yml's commands and environments work together, against a real PostgreSQL with a password."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import packages_distributions
from pathlib import Path

import httpx
import psycopg
import pytest
from support.deployment import ROOT, SCRAPED, SERVICES, image_environment, image_packages
from support.processes import free_port, until
from support.service import client_at
from support.service.postgres import Postgres

PASSWORD = "not a default: pass/word@1"  # with all that a URL would read otherwise
PROBLEM = ROOT / "examples" / "problems" / "shared-pcie-4x8.json"
WORKERS = [f"worker-{number + 1}" for number in range(SERVICES["worker"]["deploy"]["replicas"])]
INSIDE = {"api": "8000", "worker": "9101"}
STARTS_S = 60.0


class Stack:
    """Containers are processes here, with hosts and ports of this machine. A `name` is for example `worker-2`."""

    def __init__(self, folder: Path, postgres: Postgres, database: str) -> None:
        self.secrets, self._scratch, self._missing = (folder / name for name in ("secrets", "tmp", "missing"))
        for made in (self.secrets, self._scratch, self._missing):
            made.mkdir()
        (self.secrets / "postgres_password").write_text(PASSWORD + "\n")
        self._url = f"postgresql://optpipe@/{database}?host={postgres.folder}"
        self._ports: dict[tuple[str, str], int] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        image = image_packages() | {"optpipe", "pip", "setuptools"}
        for module, packages in packages_distributions().items():  # of this environment, which a container lacks
            names = {re.sub(r"[-_.]+", "-", package).lower() for package in packages}
            if not names & image and module.isidentifier():
                text = f"raise ModuleNotFoundError('not in the image: {module}', name='{module}')\n"
                (self._missing / f"{module}.py").write_text(text)

    def port(self, name: str, inside: str | None = None) -> int:
        """The port of this machine that stands for the container's port."""
        return self._ports.setdefault((name, inside or INSIDE[name.partition("-")[0]]), free_port())

    def mapped(self, name: str, text: str) -> str:
        """A path, URL or port of a container, as it is on this machine."""
        text = re.sub(r"^/tmp\b", str(self._scratch), text)  # before any other, whose own paths may be below /tmp
        text = text.replace("/run/secrets/", f"{self.secrets}/")
        text = text.replace("postgresql://optpipe@postgres/optpipe", self._url)
        return re.sub(r"(?<=127\.0\.0\.1:)(\d+)", lambda found: str(self.port(name, found[1])), text)

    def environment(self, name: str) -> dict[str, str]:
        """The environment of the image and the compose file, and nothing of this process's."""
        own = {**image_environment(), **SERVICES[name.partition("-")[0]].get("environment", {})}
        variables = {variable: self.mapped(name, value) for variable, value in own.items()}
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        return variables | {"PATH": path, "PYTHONPATH": str(self._missing)}

    def run(self, name: str, *command: str) -> subprocess.CompletedProcess[str]:
        """`docker compose run --rm NAME COMMAND`."""
        entered, environment = [ROOT / "deploy/entrypoint.sh", *command], self.environment(name)
        return subprocess.run(
            entered, env=environment, cwd=self._scratch, capture_output=True, text=True, timeout=STARTS_S, check=False
        )

    def start(self, name: str) -> None:
        with self.log(name).open("ab") as log:
            self.running[name] = subprocess.Popen(
                [ROOT / "deploy/entrypoint.sh", *self.command(name)],
                env=self.environment(name),
                cwd=self._scratch,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    def command(self, name: str) -> list[str]:
        """The compose file's command, with ports of this machine."""
        command: list[str] = [*SERVICES[name.partition("-")[0]]["command"]]
        for index, word in enumerate(command):
            if word in ("--port", "--metrics-port"):
                command[index + 1] = str(self.port(name, command[index + 1]))
        return command

    def is_healthy(self, name: str) -> bool:
        """Run the health check's own command."""
        with client_at(f"http://127.0.0.1:{self.port(name)}") as client:
            try:
                client.get("/healthz")
            except httpx.TransportError:  # until it listens each check is a process in vain
                return False
        check = [self.mapped(name, word) for word in SERVICES[name.partition("-")[0]]["healthcheck"]["test"][1:]]
        return not subprocess.run(check, env=self.environment(name), capture_output=True, check=False).returncode

    def scraped(self, name: str) -> str:
        """What Prometheus gets when it scrapes as deploy/prometheus.yml says."""
        [how] = [how for how in SCRAPED if how["job_name"] == name.partition("-")[0]]
        file = how.get("authorization", {}).get("credentials_file")
        key = Path(self.mapped(name, file)).read_text().strip() if file else None
        with client_at(f"http://127.0.0.1:{self.port(name)}", key) as client:
            reply = client.get("/metrics")
        assert reply.status_code == 200
        return reply.text

    def log(self, name: str) -> Path:
        return self._scratch / f"{name}.log"

    def close(self) -> None:
        for process in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(url.replace("postgres@", "optpipe@"), password="guessed").close()
        started = Stack(tmp_path, postgres, name)
        try:
            yield started
        finally:
            started.close()
    postgres.run("drop role optpipe")
    rules.write_text(before)
    postgres.run("select pg_reload_conf()")


def key(stack: Stack, name: str, *scopes: str) -> str:
    words = [word for scope in scopes for word in ("--scope", scope)]
    done = stack.run("api", "optpipe", "keys", "create", name, *words)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_a_job_is_solved_by_one_of_two_workers_and_all_end_in_order(stack: Stack) -> None:
    refused = stack.run("api", *stack.command("api"))  # others could reach it, and there is no key yet
    assert refused.returncode == 2
    assert "optpipe keys create NAME --scope submit" in refused.stderr.splitlines()[-1]
    (stack.secrets / "metrics_key").write_text(key(stack, "prometheus", "admin") + "\n")
    mine = key(stack, "me", "submit", "read")

    for name in ("api", *WORKERS):  # all at once, as compose does
        stack.start(name)
    for name in ("api", *WORKERS):
        until(lambda name=name: stack.is_healthy(name))

    with client_at(f"http://127.0.0.1:{stack.port('api')}", mine) as client:
        posted = client.post(
            "/v1/jobs", json={"problem": json.loads(PROBLEM.read_text()), "time_limit_s": 200, "gap": 0.5}
        )
        assert posted.status_code == 201, posted.text
        job = posted.json()
        ended = until(lambda: (now := client.get(job["url"]).json())["ended_at"] and now)
        assert (ended["state"], ended["best"]["makespan_ms"] > 0) == ("done", True)
        assert client.get(f"{job['url']}/log").text.count('"taken by ') == 1
        adopted = client.put(f"{job['url']}/adoptions/1", json={"step": 7, "measured_iteration_ms": 500.0})
        assert adopted.status_code == 200
        assert client.get("/metrics").status_code == 403

    counted = stack.scraped("api").splitlines()
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
    assert until(lambda: sum(done in stack.scraped(name) for name in WORKERS)) == 1

    passed_on = -signal.SIGTERM  # uvicorn, once all has ended
    for name, status in (*((name, 0) for name in WORKERS), ("api", passed_on)):
        stack.running[name].terminate()
        assert stack.running[name].wait(60) == status
        said = stack.log(name).read_text()
        assert all({"time", "level", "event"} <= json.loads(line).keys() for line in said.splitlines())
        assert PASSWORD not in said
        assert mine not in said


def test_the_database_is_healthy_when_it_answers(postgres: Postgres) -> None:
    """By the program of the health check; here PostgreSQL listens on a socket file only."""
    check: list[str] = [*SERVICES["postgres"]["healthcheck"]["test"][1:]]
    for folder, status in ((postgres.folder, 0), (postgres.folder / "data", 2)):
        check[check.index("--host") + 1] = str(folder)
        assert subprocess.run([postgres._programs / check[0], *check[1:]], check=False).returncode == status
