"""Where schedules are kept; what cannot be stored is not accepted, `/readyz` says so, and so does a sentence.

A database that goes away and comes back: 503 meanwhile, every acknowledged job is stored, and streams continue.
"""

import json
import os
import resource
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs
from support.problems.chain import chain, gpipe, one_by_one
from support.processes import until
from support.service import client_of, events, settings_in
from support.service.postgres import Postgres
from support.service.rest import submit
from support.service.serve_process import serve_process
from support.service.work import at_once
from support.service.work import submit as submit_to

from optpipe import InputError, Result
from optpipe.options import SolveOptions
from optpipe_cache import Cache
from optpipe_cli.app import optpipe
from optpipe_server import Settings
from optpipe_server.database import Database, Jobs
from optpipe_server.http import service
from optpipe_server.http.service import Service
from optpipe_server.service_cache import ServiceCache

BODY = {"problem": chain().to_dict(), "method": "infeasible"}


@pytest.fixture
def settings(tmp_path: Path, fake_solver: None) -> Settings:
    return replace(settings_in(tmp_path), solves=0)


@pytest.fixture(autouse=True)
def probed_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "PROBED_S", 0.0)


def file_of(settings: Settings) -> Path:
    return Path(settings.database.removeprefix("sqlite:///"))


def away(file: Path, beside: str) -> None:
    for path in file.parent.glob(file.name + beside):
        path.rename(path.with_name(f"away {path.name}"))


def back(file: Path) -> None:
    for path in file.parent.glob("away *"):
        path.replace(path.with_name(path.name.removeprefix("away ")))


LOSSES: dict[str, Callable[[Path], object]] = {
    "removed": lambda file: away(file, "*"),
    "without its log": lambda file: away(file, "-wal"),
    "replaced": lambda file: (away(file, ""), shutil.copy(file.with_name(f"away {file.name}"), file)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_file_that_is_gone_stops_acceptance_until_it_is_back(settings: Settings, loss: str) -> None:
    file = file_of(settings)
    with client_of(settings) as (client, _):
        kept = [client.post("/v1/jobs", json=BODY).json()["id"]]
        assert client.get("/readyz").status_code == 200
        LOSSES[loss](file)
        for reply in (client.get("/readyz"), client.post("/v1/jobs", json=BODY)):
            assert (reply.status_code, "removed or replaced" in reply.json()["detail"]) == (503, True), reply.text
        back(file)
        assert client.get("/readyz").status_code == 200
        kept.append(client.post("/v1/jobs", json=BODY).json()["id"])
    with client_of(settings) as (client, _):
        assert [job["id"] for job in client.get("/v1/jobs").json()["jobs"]] == kept[::-1]


def test_a_hard_link_is_the_same_database(settings: Settings) -> None:
    database, file = Database(settings.database), file_of(settings)
    other = file.with_name("other.sqlite")
    os.link(file, other)
    for secondary in (False, True):
        with pytest.raises(InputError, match=r"has 2 names .*, so another process has it"):
            Database(f"sqlite:///{other}", secondary=secondary)
    database.close()


def test_a_log_without_its_file_is_never_emptied(settings: Settings) -> None:
    """`optpipe keys list` beside a service whose file was moved must not make a new one, whose log is the service's."""
    database, file = Database(settings.database), file_of(settings)
    elsewhere = file.with_name("elsewhere")
    job = submit_to(database)
    file.rename(elsewhere)
    with pytest.raises(InputError, match=r"the file is missing and its log .* is there"):
        Database(settings.database, secondary=True)
    elsewhere.rename(file)
    assert Jobs(database).job(job).id == job
    database.close()


def test_a_damaged_file_ends_a_command_in_a_sentence(settings: Settings) -> None:
    """Its pages, the first apart, are garbage."""
    file = file_of(settings)
    with closing(Database(settings.database)) as database:
        for _ in range(30):
            submit_to(database)
    content = file.read_bytes()
    file.write_bytes(content[:4096] + b"\xa5" * (len(content) - 4096))
    for command in (["keys", "list"], ["serve", "--port", "0"]):
        with pytest.raises(InputError, match=r"^.*malformed.*$"):
            optpipe()([*command, "--database", settings.database])
    with pytest.raises(InputError, match="malformed"):  # nor does a service that cannot free lost jobs start
        Service(settings)


def test_a_page_that_is_damaged_while_the_service_runs_is_told(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    file = file_of(settings)
    with client_of(settings) as (client, server):
        job = client.post("/v1/jobs", json=BODY).json()
        with closing(sqlite3.connect(file, timeout=60)) as db:
            db.execute("pragma wal_checkpoint(truncate)")
        server.service.database.engine.dispose()  # with the pages that they remember
        with file.open("r+b") as opened:
            opened.seek(4096)
            opened.write(b"\xa5" * (file.stat().st_size - 4096))
        for reply in (client.get(job["url"]), client.post("/v1/jobs", json=BODY), client.get("/readyz")):
            assert (reply.status_code, "it is damaged" in reply.json()["detail"]) == (503, True), reply.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("command", [["list"], ["revoke", "953b9f7432864f57"]])
def test_asking_for_keys_makes_no_database(tmp_path: Path, command: list[str]) -> None:
    url = f"sqlite:///{tmp_path}/elsewhere.db"
    with pytest.raises(InputError, match="there is no such file here"):
        optpipe()(["keys", *command, "--database", url])
    assert not list(tmp_path.iterdir())


def test_a_key_in_a_new_database_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["keys", "create", "lab", "--scope", "read", "--database", f"sqlite:///{tmp_path}/new.db"]
    for note in (True, False):
        optpipe()(command)
        out, err = capsys.readouterr()
        assert ("did not exist" in err) == note
        assert out.startswith("op_")


def test_schedules_are_found_again(database: Database, tmp_path: Path) -> None:
    cache = ServiceCache(Settings(cache=tmp_path / "mine", pack=None), database)
    cache.keep(Result.from_schedule(gpipe(chain()), SolveOptions()))
    assert cache.open().lookup(chain()) is not None
    assert cache.open().lookup(chain(scale=2.0)) is not None
    assert len(Cache(tmp_path / "mine").entries()) == int(database.sqlite)


def test_a_job_that_cannot_be_cached_has_its_answer_all_the_same(postgres_url: str, tmp_path: Path) -> None:
    database = Database(postgres_url)
    cache = ServiceCache(Settings(pack=None), database)

    @event.listens_for(database.engine, "before_cursor_execute")
    def fail(*_: object) -> None:
        raise OperationalError(None, None, Exception("it is away"))

    with capture_logs() as logs:
        cache.keep(Result.from_schedule(gpipe(chain()), SolveOptions()))
    [line] = logs
    assert (line["event"], line["error"]) == ("a schedule was not cached", "it is away")
    database.close()


def test_the_best_of_many_at_once_is_kept(database: Database, tmp_path: Path) -> None:
    cache = ServiceCache(Settings(cache=tmp_path / "mine", pack=None), database)
    kept: list[bool] = []

    def add(k: int) -> None:
        for bound in range(k, 40, 8):
            schedule = gpipe(chain()) if k % 2 else one_by_one(chain())
            kept.append(cache.open().add(schedule, "feasible", bound / 8))

    assert at_once(*(partial(add, k) for k in range(8))) == [None] * 8
    [entry] = cache.open().entries()
    assert (entry.method, entry.lower_bound_ms) == ("gpipe", 39 / 8)
    assert len(kept) == 40
    assert any(kept)


ENDS_S = 60.0  # what the end of a service may take


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """A PostgreSQL server of this test's own, which it may stop."""
    own = Postgres()
    try:
        own.run("create database service")
        yield own
    finally:
        own.close()


def until_taken(client: httpx.Client) -> str:
    def taken() -> str | None:
        reply = client.post("/v1/jobs", json=BODY)
        assert reply.status_code in (201, 503), reply.text
        return reply.json()["id"] if reply.status_code == 201 else None

    return until(taken)


def is_refusal(reply: httpx.Response) -> None:
    assert (reply.status_code, reply.headers["content-type"]) == (503, "application/problem+json"), reply.text
    assert int(reply.headers["retry-after"]) > 0


def listed(client: httpx.Client) -> set[str]:
    return {job["id"] for job in client.get("/v1/jobs", params={"limit": 200}).json()["jobs"]}


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    taken = set[str]()
    with serve_process(tmp_path) as (process, client):
        taken.add(until_taken(client))
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))  # bytes of a file
        answers = [client.post("/v1/jobs", json=BODY) for _ in range(20)]
        taken |= {reply.json()["id"] for reply in answers if reply.status_code == 201}  # room that a refused one left
        refused = [reply for reply in answers if reply.status_code != 201]
        assert len(refused) > 5
        for reply in (*refused, client.get("/readyz")):
            is_refusal(reply)
        assert listed(client) == taken, "what is there can be read"
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        taken.add(until_taken(client))
        process.kill()
        process.wait(60)
    with serve_process(tmp_path) as (_, client):
        assert listed(client) == taken


def test_a_database_that_is_read_only(own_postgres: Postgres, tmp_path: Path, fake_solver: None) -> None:
    with client_of(settings_in(tmp_path, own_postgres.url("service"))) as (client, _):
        taken = {until_taken(client)}
        own_postgres.run("alter database service set default_transaction_read_only = on")
        own_postgres.stop()  # as a server that comes back as the copy of another
        own_postgres.start()
        for _ in range(5):
            is_refusal(client.post("/v1/jobs", json=BODY))
        assert listed(client) == taken, "what is there can be read"
        own_postgres.run("alter database service reset default_transaction_read_only")
        taken.add(until_taken(client))
        assert listed(client) == taken


def test_a_service_ends_though_its_database_hangs(own_postgres: Postgres, tmp_path: Path) -> None:
    with serve_process(tmp_path, own_postgres.url("service")) as (process, client):
        job = submit(client, method="hang")
        with client.stream("GET", f"{job['url']}/events") as response:
            assert next(events(response))["id"] == "1"
            with own_postgres.hanging():
                time.sleep(1.0)  # until its look for news waits for an answer
                process.terminate()
                assert process.wait(ENDS_S) == -signal.SIGTERM


def test_a_restarted_database(own_postgres: Postgres, tmp_path: Path, fake_solver: None) -> None:
    with client_of(settings_in(tmp_path, own_postgres.url("service"))) as (client, _):
        job = submit(client, method="hang")
        seen: list[dict[str, Any]] = []

        def follow() -> None:
            with client.stream("GET", f"{job['url']}/events") as response:
                seen.extend(events(response))

        follower = threading.Thread(target=follow)
        follower.start()
        until(lambda: seen)
        own_postgres.stop(signal.SIGQUIT)
        body = {"problem": job["best"]["schedule"]["problem"], "method": "infeasible"}
        for method, path, content in (
            ("POST", "/v1/jobs", body),
            ("GET", job["url"], None),
            ("GET", f"{job['url']}?wait=1", None),
            ("GET", "/v1/jobs", None),
            ("GET", f"{job['url']}/events", None),
            ("PUT", f"{job['url']}/adoptions/1", {"step": 1}),
            ("DELETE", job["url"], None),
            ("GET", "/readyz", None),
        ):
            is_refusal(client.request(method, path, json=content))
        assert client.get("/healthz").status_code == 200
        assert follower.is_alive(), "who follows a job need not come again"
        own_postgres.start()
        until(lambda: client.get("/readyz").status_code == 200)
        assert listed(client) == {job["id"]}, "what was refused was not stored"
        submit(client, method="infeasible")
        client.post(f"{job['url']}/cancel")
        follower.join(60)
        assert [event["event"] for event in seen] == ["incumbent", "end"]
        assert json.loads(seen[-1]["data"])["state"] == "cancelled"
