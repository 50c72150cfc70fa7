"""The process of `optpipe serve`: where it listens, how it ends, what it leaves behind."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest
from support.ports import free_port
from support.problems.chain import chain
from support.processes import over
from support.service import events
from support.service.serve_process import serve_process
from support.until import until

from optpipe.errors import InputError
from optpipe.model.problem import Problem
from optpipe_server import Settings
from optpipe_server.database import Database
from optpipe_server.database.keys import Keys
from optpipe_server.http.server import listen, make_server


def submit_with_pid(client: httpx.Client, pid_file: Path) -> tuple[str, int]:
    """Submit a job whose solver never ends; return its URL and the solver's process id."""
    problem = Problem.from_dict({**chain().to_dict(), "name": str(pid_file)})
    job = client.post("/v1/jobs", json={"problem": problem.to_dict(), "method": "pid"}).json()
    assert job["best"]["method"] == "naive"
    until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
    return job["url"], int(pid_file.read_text())


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


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_the_error_for_a_foreign_host_is_one_sentence(host: str) -> None:
    with pytest.raises(InputError, match="host = "):
        listen(host, 0)


def test_the_error_for_a_port_in_use_is_one_sentence() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(InputError, match=r"port = .*[Aa]ddress already in use"):
        listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(InputError, match="port = 70000"):
        listen("127.0.0.1", 70000)
