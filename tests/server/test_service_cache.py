"""Where a service keeps solved schedules: beside SQLite in a file, else in the database."""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs
from support.problems.chain import chain, gpipe, one_by_one

from optpipe.options import SolveOptions
from optpipe.results import Result
from optpipe_cache import Cache
from optpipe_server import Settings
from optpipe_server.database import Database
from optpipe_server.schedule_cache import ScheduleCache


def test_schedules_are_found_again(database: Database, tmp_path: Path) -> None:
    cache = ScheduleCache(Settings(cache=tmp_path / "mine", pack=None), database)
    cache.keep(Result.from_schedule(gpipe(chain()), SolveOptions()))
    assert cache.open().lookup(chain()) is not None
    assert cache.open().lookup(chain(scale=2.0)) is not None
    assert len(Cache(tmp_path / "mine").entries()) == int(database.sqlite)


def test_a_job_that_cannot_be_cached_has_its_answer_all_the_same(postgres_url: str, tmp_path: Path) -> None:
    database = Database(postgres_url)
    cache = ScheduleCache(Settings(pack=None), database)

    @event.listens_for(database.engine, "before_cursor_execute")
    def fail(*_: object) -> None:
        raise OperationalError(None, None, Exception("it is away"))

    with capture_logs() as logs:
        cache.keep(Result.from_schedule(gpipe(chain()), SolveOptions()))
    [line] = logs
    assert (line["event"], line["error"]) == ("a schedule was not cached", "it is away")
    database.close()


def test_the_best_of_many_at_once_is_kept(database: Database, tmp_path: Path) -> None:
    cache = ScheduleCache(Settings(cache=tmp_path / "mine", pack=None), database)
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
