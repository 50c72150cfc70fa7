"""Where schedules are kept; what can no longer be stored is not accepted, `/readyz` says so, and so does a sentence."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs
from support.problems.chain import chain, gpipe, one_by_one
from support.service import client_of, settings_in
from support.service.work import submit

from optpipe.errors import InputError
from optpipe.options import SolveOptions
from optpipe.results import Result
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
    other.unlink()
    other.symlink_to(file)
    with pytest.raises(InputError, match="another process has it"):
        Database(f"sqlite:///{other}")
    database.close()
    Database(f"sqlite:///{other}").close()


def test_a_log_without_its_file_is_never_emptied(settings: Settings) -> None:
    """`optpipe keys list` beside a service whose file was moved must not make a new one, whose log is the service's."""
    database, file = Database(settings.database), file_of(settings)
    elsewhere = file.with_name("elsewhere")
    job = submit(database)
    file.rename(elsewhere)
    with pytest.raises(InputError, match=r"the file is missing and its log .* is there"):
        Database(settings.database, secondary=True)
    elsewhere.rename(file)
    assert Jobs(database).job(job).id == job
    database.close()


@pytest.fixture
def damaged(settings: Settings) -> Settings:
    """A database whose pages, the first apart, are garbage."""
    database, file = Database(settings.database), file_of(settings)
    for _ in range(30):
        submit(database)
    database.close()
    content = file.read_bytes()
    file.write_bytes(content[:4096] + b"\xa5" * (len(content) - 4096))
    return settings


def test_a_damaged_file_ends_a_command_in_a_sentence(damaged: Settings) -> None:
    for command in (["keys", "list"], ["serve", "--port", "0"]):
        with pytest.raises(InputError, match=r"^.*malformed.*$"):
            optpipe()([*command, "--database", damaged.database])
    with pytest.raises(InputError, match="malformed"):  # nor does a service that cannot free lost jobs start
        Service(damaged)


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
    ready = threading.Barrier(8)
    kept: list[bool] = []

    def add(k: int) -> None:
        ready.wait(60)
        for bound in range(k, 40, 8):
            schedule = gpipe(chain()) if k % 2 else one_by_one(chain())
            kept.append(cache.open().add(schedule, "feasible", bound / 8))

    threads = [threading.Thread(target=add, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [entry] = cache.open().entries()
    assert (entry.method, entry.lower_bound_ms) == ("gpipe", 39 / 8)
    assert len(kept) == 40
    assert any(kept)
