"""What a cache believes of bounds: what this user's own searches have proven, not what a file says of itself."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.problems.chain import chain, gpipe

from optpipe import InputError, ScheduleError
from optpipe_cache import Cache


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache.sqlite")


def _proud(cache: Cache) -> None:
    """Adds a schedule whose bound is its own length, as if a search had proven it."""
    cache.add(gpipe(chain()), "optimal", gpipe(chain()).makespan_ms)


FORGED: dict[str, Callable[[str], str]] = {
    "a bound": lambda text: text.replace('"lower_bound_ms":5.0', '"lower_bound_ms":6.0'),
    "a status": lambda text: text.replace('"status":"feasible"', '"status":"optimal"'),
    "a length": lambda text: re.sub('"objective_ms":[0-9.]+', '"objective_ms":5.0', text),
    "a seal": lambda text: re.sub('"seal":"[0-9a-f]*"', f'"seal":"{"0" * 64}"', text),
    "no seal": lambda text: re.sub('"seal":"[0-9a-f]*",', "", text),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_shared_file_proves_nothing(tmp_path: Path, forge: Callable[[str], str]) -> None:
    path = tmp_path / "cache.sqlite"
    cache = Cache(path)
    cache.add(gpipe(chain()), "feasible", 5.0)
    stored = cache.storage.entry(chain().sha256, "makespan")
    assert stored is not None
    assert forge(stored) != stored
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE schedules SET entry = ?", (forge(stored),))
    hit = cache.lookup(chain())
    assert hit is not None
    assert (hit.status, hit.lower_bound_ms) == ("feasible", None)
    assert cache.add(gpipe(chain()), "feasible", 5.0), "what a search proves takes its place"


def test_another_users_bounds_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "shared.sqlite")
    for home, status in (("one", "optimal"), ("another", "feasible"), ("one", "optimal")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        if not cache.entries():
            _proud(cache)
        hit = cache.lookup(chain())
        assert hit is not None
        assert hit.status == status
    assert (tmp_path / "one" / "optpipe" / "seal.key").stat().st_mode & 0o777 == 0o600


def test_a_seal_without_a_home_lasts_as_long_as_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache = Cache(tmp_path / "cache.sqlite")
    _proud(cache)
    hit = cache.lookup(chain())
    assert hit is not None
    assert hit.status == "optimal"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda line: line[:-1], "line 2"),
        (lambda line: line.replace("0F0 0F1", "0F0 0F0"), "line 2: the schedule is not valid"),
        (lambda line: line.replace("0F0 0F1", "0F0 nonsense"), "line 2: programs\\[0\\]"),
        (lambda line: line.replace('"lower_bound_ms":2.0', '"lower_bound_ms":1e9'), "line 2: lower_bound_ms"),
        (lambda line: line.replace('"programs":{', '"programs":{"rules":{},'), "line 2: programs.rules.in_flight"),
    ],
)
def test_import_refuses_what_is_wrong(cache: Cache, tmp_path: Path, spoil: Any, message: str) -> None:
    cache.add(gpipe(chain()), "feasible", 2.0)
    [line] = cache.export_lines()
    other = Cache(tmp_path / "other.sqlite")
    with pytest.raises((InputError, ScheduleError), match=message):
        other.import_lines(["", spoil(line)])
    assert other.entries() == []
