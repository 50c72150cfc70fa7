"""Clients of real servers, on both databases."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from support.service import client_at, fake_service, settings_in, use_fake_solver
from support.service.postgres import database_of
from support.service.work import Work

from optpipe_cache import Retention
from optpipe_server import Settings
from optpipe_server.database import Database
from optpipe_server.database.keys import SCOPES
from optpipe_server.http.server import Server

Shared = tuple[str, Server]


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    return settings_in(tmp_path, database_url)


@pytest.fixture
def fake_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_solver(monkeypatch)


@pytest.fixture
def work(database: Database, tmp_path: Path) -> Work:
    return Work(database, tmp_path)


@pytest.fixture
def local(sqlite_url: str, tmp_path: Path) -> Iterator[Work]:
    """On SQLite only, for tests that do not depend on the database."""
    with closing(Database(sqlite_url)) as database:
        yield Work(database, tmp_path)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """One server with fake solvers for a file of tests, on each database."""
    with (
        database_of(request) as url,
        fake_service(tmp_path_factory.mktemp("service"), url, solves=4) as serving,
    ):
        yield serving


@pytest.fixture
def client(shared: Shared) -> Iterator[httpx.Client]:
    """A client of the shared server; its jobs and their schedules are deleted afterwards."""
    url, server = shared
    with client_at(url, server.service.keys.create("client", SCOPES)) as client:
        yield client
        for job in client.get("/v1/jobs", params={"limit": 200}).json()["jobs"]:
            assert client.delete(job["url"]).status_code == 204
        server.service.cache.open().storage.prune(Retention(0))
