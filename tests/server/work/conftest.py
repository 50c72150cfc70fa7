"""Supervisors on each of the two databases, with a fake solver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.service import use_fake_solver
from support.service.work import Work

from optpipe_server.database import Database


@pytest.fixture(autouse=True)
def fake_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_solver(monkeypatch)


@pytest.fixture
def work(database: Database, tmp_path: Path) -> Work:
    return Work(database, tmp_path)


@pytest.fixture
def local(sqlite_url: str, tmp_path: Path) -> Iterator[Work]:
    """On SQLite only, for tests that do not depend on the database."""
    database = Database(sqlite_url)
    yield Work(database, tmp_path)
    database.close()
