"""Opening and refusing databases of both kinds."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text
from support.service.postgres import Postgres
from support.service.work import row, submit

from optpipe.errors import InputError
from optpipe_server.database import AwayError, Database


def test_sqlite_is_durable_and_locks_at_the_start_of_a_write(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    with database.read() as db:
        told = [
            db.execute(text(f"pragma {name}")).scalar_one() for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
    assert told == ["wal", 2, 1], "2 is FULL"
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), timeout=0, isolation_level=None)
    with closing(other), database.write(), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("begin immediate")
    database.close()


OPEN = "import sys; from optpipe_server.database import Database; Database(sys.argv[1]).close(); print('opened')"


def test_processes_that_create_the_tables_at_once(postgres: Postgres) -> None:
    with postgres.database() as url:
        command = [sys.executable, "-c", OPEN, url]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)]
        assert [process.communicate()[0].decode() for process in started] == ["opened\n"] * 2


def test_a_file_has_one_process(tmp_path: Path, sqlite_url: str) -> None:
    database = Database(sqlite_url)
    (tmp_path / "link").symlink_to(tmp_path / "service.sqlite")
    for url in (sqlite_url, f"sqlite:///{tmp_path / 'link'}"):
        with pytest.raises(InputError, match="another process has it; processes can share a PostgreSQL database"):
            Database(url)
    ended = subprocess.run([sys.executable, "-c", OPEN, sqlite_url], capture_output=True, text=True)
    assert "another process has it" in ended.stderr
    database.close()
    Database(sqlite_url).close()
    assert {file.stat().st_mode & 0o777 for file in tmp_path.glob("service*")} == {0o600}, "of its user only"


def test_a_secondary_opens_the_file_of_another_process(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    beside = Database(sqlite_url, secondary=True)
    job_id = submit(beside)
    assert row(database, job_id).id == job_id
    beside.close()
    with pytest.raises(InputError, match="another process has it"):
        Database(sqlite_url)
    database.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:geheim@127.0.0.1:1/name",
        "postgresql://user@127.0.0.1:1/name?password=geheim",
        "postgresql://user:ge@heim@127.0.0.1:1/name",
        "postgresql://user:geheim@127.0.0.1:port/name",
        "postgresql://user:geheim@127.0.0.1:1",
        "postgresql://user:geheim@127.0.0.1:1/name?nonsense=1",
        "mysql://user:geheim@127.0.0.1/name",
        "geheim",
        "",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite://geheim.db",
        "sqlite:////nowhere/at/all.db",
        "sqlite:////",
        "sqlite:////tmp/file?mode=ro",
    ],
)
def test_the_error_for_a_wrong_url_has_no_password(url: str) -> None:
    with pytest.raises(InputError) as refused:
        Database(url)
    said = str(refused.value)
    assert isinstance(refused.value, AwayError) or "Connection refused" not in said
    assert said.startswith("database")
    assert "\n" not in said
    assert not any(part in said for part in ("geheim", "heim@") if url.startswith(("postgresql", "mysql")))


def test_the_error_for_a_file_that_is_not_a_database_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is not a database " * 100)
    with pytest.raises(InputError, match="file is not a database"):
        Database(f"sqlite:///{tmp_path / 'text'}")
    with pytest.raises(InputError, match="unable to open database file"):
        Database(f"sqlite:///{tmp_path}")
