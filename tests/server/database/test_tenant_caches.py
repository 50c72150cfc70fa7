"""Which solved schedules a tenant finds, on both databases."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from structlog.testing import capture_logs
from support.problems.chain import chain, gpipe, one_by_one

from optpipe.options import SolveOptions
from optpipe.results import Result
from optpipe_cache import Cache
from optpipe_server import Settings
from optpipe_server.database import Database
from optpipe_server.settings import LOCAL
from optpipe_server.tenant_caches import TenantCaches


@pytest.mark.parametrize("shared", [False, True])
def test_tenants_find_their_own_schedules_unless_they_share(database: Database, tmp_path: Path, shared: bool) -> None:
    caches = TenantCaches(Settings(cache=tmp_path / "mine", pack=None, shared_cache=shared), database)
    caches.cache_of("a").add(gpipe(chain()), "feasible")
    assert (caches.cache_of("b").lookup(chain()) is not None) == shared
    assert (caches.cache_of("b").lookup(chain(scale=2.0)) is not None) == shared
    assert caches.cache_of("a").lookup(chain()) is not None
    assert caches.cache_of(LOCAL).lookup(chain()) is None, "the user's own file"
    caches.cache_of(LOCAL).add(gpipe(chain(offload=None)), "feasible")
    assert len(Cache(tmp_path / "mine").entries()) == 1
    assert caches.cache_of("a").lookup(chain(offload=None)) is None


def test_a_job_that_cannot_be_cached_has_its_answer_all_the_same(sqlite_url: str, tmp_path: Path) -> None:
    database = Database(sqlite_url)
    caches = TenantCaches(Settings(cache=tmp_path / "mine", pack=None), database)
    best = Result.from_schedule(gpipe(chain()), SolveOptions())

    @event.listens_for(database.engine, "checkout")
    def read_only(connection: Any, *_: object) -> None:
        connection.execute("pragma query_only = 1").close()

    with capture_logs() as logs:
        caches.keep("a", best)
    [line] = logs
    assert (line["event"], line["error"]) == ("a schedule was not cached", "attempt to write a readonly database")
    assert caches.cache_of("a").entries() == []


def test_the_best_of_many_at_once_is_kept(database: Database, tmp_path: Path) -> None:
    caches = TenantCaches(Settings(cache=tmp_path / "mine", pack=None), database)
    ready = threading.Barrier(8)
    kept: list[bool] = []

    def add(k: int) -> None:
        ready.wait(60)
        for bound in range(k, 40, 8):
            schedule = gpipe(chain()) if k % 2 else one_by_one(chain())
            kept.append(caches.cache_of("a").add(schedule, "feasible", bound / 8))

    threads = [threading.Thread(target=add, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [entry] = caches.cache_of("a").entries()
    assert (entry.method, entry.lower_bound_ms) == ("gpipe", 39 / 8)
    assert len(kept) == 40
    assert any(kept)
