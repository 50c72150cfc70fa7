"""The schedule cache: exact and nearest hits, both verified on the exact problem."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from support.chain import chain, gpipe, one_by_one
from support.strategies import problems

from optpipe import InputError, Problem, ScheduleError
from optpipe_cache import Cache, default_path, distance, features, structure
from optpipe_server.database import Database
from optpipe_server.database.cache_storage import TableStorage
from optpipe_server.database.tables import schedules

Spoil = Callable[[str, str | bytes], None]


@pytest.fixture(params=["file", "sqlite", "postgresql"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Cache, Spoil]]:
    """A cache on each of its storages, and a function that overwrites a column of all its rows."""
    if request.param == "file":
        path = tmp_path / "new folder" / "cache.sqlite"
        yield Cache(path), lambda column, value: _spoil(path, column, value)
        return
    database = Database(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url"))
    Cache(TableStorage(database, "other")).add(one_by_one(chain(forward=0.25)), "feasible")  # another tenant's

    def spoil(column: str, value: str | bytes) -> None:
        with database.write() as db:
            db.execute(schedules.update().where(schedules.c.tenant == "own").values({column: value}))

    yield Cache(TableStorage(database, "own")), spoil
    assert [entry.method for entry in Cache(TableStorage(database, "other")).entries()] == ["naive"]
    database.close()


def _spoil(path: Path, column: str, value: str | bytes) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"UPDATE schedules SET {column} = ?", (value,))


@pytest.fixture
def cache(kept: tuple[Cache, Spoil]) -> Cache:
    return kept[0]


@pytest.fixture
def spoil(kept: tuple[Cache, Spoil]) -> Spoil:
    return kept[1]


def test_an_empty_cache_has_no_hit(cache: Cache) -> None:
    assert cache.lookup(chain()) is None
    assert cache.entries() == []


def test_exact_hit(cache: Cache) -> None:
    problem = chain()
    assert cache.add(gpipe(problem), "feasible", 5.0)
    hit = cache.lookup(problem)
    assert hit is not None
    assert hit.exact
    assert hit.distance == 0.0
    assert hit.schedule.programs == gpipe(problem).programs
    assert hit.schedule.method == "gpipe"
    assert (hit.status, hit.lower_bound_ms) == ("feasible", 5.0)


def test_the_better_schedule_is_kept(cache: Cache) -> None:
    problem = chain()
    assert gpipe(problem).makespan_ms < one_by_one(problem).makespan_ms
    assert cache.add(one_by_one(problem), "feasible")
    assert cache.add(gpipe(problem), "feasible", 3.0)
    assert not cache.add(one_by_one(problem), "feasible")
    assert not cache.add(gpipe(problem), "feasible", 2.0)
    assert cache.add(gpipe(problem), "feasible", 4.0)
    [entry] = cache.entries()
    assert (entry.method, entry.lower_bound_ms) == ("gpipe", 4.0)


def test_each_objective_has_its_own_schedule(cache: Cache) -> None:
    problem = chain()
    cache.add(gpipe(problem), "feasible", objective="span")
    assert cache.lookup(problem) is None
    hit = cache.lookup(problem, "span")
    assert hit is not None
    assert hit.entry.objective_ms == gpipe(problem).span_ms


def test_a_faster_machine_has_distance_zero_and_its_own_makespan(cache: Cache) -> None:
    cache.add(gpipe(chain()), "optimal", gpipe(chain()).makespan_ms)
    twice = chain(scale=2.0)
    hit = cache.lookup(twice)
    assert hit is not None
    assert not hit.exact
    assert hit.distance == 0.0
    assert hit.schedule.problem == twice
    assert hit.schedule.makespan_ms == pytest.approx(2 * gpipe(chain()).makespan_ms)
    assert (hit.status, hit.lower_bound_ms) == ("feasible", None), (
        "what was proven of another problem says nothing of this one"
    )


def test_the_nearest_comes_first(cache: Cache) -> None:
    for forward in (1.2, 2.0, 3.0):
        cache.add(gpipe(chain(forward=forward)), "feasible")
    hit = cache.lookup(chain(forward=2.6))
    assert hit is not None
    assert hit.entry.problem == chain(forward=3.0)
    assert 0 < hit.distance < distance(features(chain(forward=2.6)), features(chain(forward=1.2)))


def test_a_nearer_schedule_that_does_not_fit_is_skipped(cache: Cache) -> None:
    cache.add(gpipe(chain(memory=2, forward=1.1)), "feasible")
    cache.add(one_by_one(chain(memory=1, forward=9.0)), "feasible")
    hit = cache.lookup(chain(memory=1))
    assert hit is not None
    assert hit.schedule.method == "naive"
    near, far = (distance(features(chain(memory=1)), features(entry.problem)) for entry in reversed(cache.entries()))
    assert near < far


def test_without_a_valid_schedule_there_is_no_hit(cache: Cache) -> None:
    cache.add(gpipe(chain(memory=2)), "feasible")
    assert cache.lookup(chain(memory=1)) is None


@pytest.mark.parametrize("other", [chain(m=3), chain(offload=None), chain(link="pcie0"), chain(m=3, memory=3)])
def test_another_shape_is_never_a_hit(cache: Cache, other: Problem) -> None:
    cache.add(gpipe(chain()), "feasible")
    assert structure(other) != structure(chain())
    assert cache.lookup(other) is None


@given(problems())
def test_distance_is_zero_to_oneself_and_scale_free(problem: Problem) -> None:
    assume(any(problem.costs.ms[:3].ravel()))
    content = problem.to_dict()
    content["p2p_ms"] *= 4
    for stage in content["stages"]:
        stage |= {name: value * 4 for name, value in stage.items() if name.endswith("_ms")}
    slower = Problem.from_dict(content)
    assert structure(slower) == structure(problem)
    assert distance(features(problem), features(slower)) == 0.0


def test_distance_matches_its_documentation() -> None:
    shifted = Problem.from_dict({**chain().to_dict(), "p2p_ms": 0.1 + 0.3})
    assert distance(features(chain()), features(shifted)) == pytest.approx(0.1)  # F + B + W is 3 ms
    assert distance(features(chain(memory=1)), features(chain(memory=2))) == pytest.approx(1.0)
    assert distance(features(chain(memory=2)), features(chain(memory=9))) == 0.0, (
        "memory for all micro-batches is as good as any more"
    )


def test_proportions_of_times_near_zero_are_numbers(cache: Cache) -> None:
    content = chain().to_dict() | {"p2p_ms": 1e12}
    for stage in content["stages"]:
        stage |= {name: 1e-300 for name in stage if name.endswith("_ms")}
    problem = Problem.from_dict(content)
    cache.add(gpipe(problem), "feasible")
    near = cache.lookup(problem.replace(p2p_ms=9e11))
    assert near is not None
    assert near.distance == 0.0


def test_an_invalid_schedule_is_not_added(cache: Cache) -> None:
    with pytest.raises(ScheduleError, match="device 0 needs 2000 bytes"):
        cache.add(gpipe(chain(memory=1)), "feasible")
    with pytest.raises(InputError, match="lower_bound_ms = 99"):
        cache.add(gpipe(chain()), "feasible", 99.0)
    for bound in (None, 1.0):
        with pytest.raises(InputError, match="status = 'optimal': lower_bound_ms = "):
            cache.add(gpipe(chain()), "optimal", bound)
    assert cache.entries() == []


def test_export_and_import(cache: Cache, tmp_path: Path) -> None:
    for forward in (1.0, 2.0):
        cache.add(gpipe(chain(forward=forward)), "feasible", 2.0)
    lines = [*cache.export_lines(), "", "\n"]
    other = Cache(tmp_path / "other.sqlite")
    assert other.import_lines(lines) == 2
    assert other.import_lines(lines) == 0
    assert set(other.export_lines()) == set(cache.export_lines())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda line: line[:-1], "line 2"),
        (lambda line: line.replace("0F0 0F1", "0F0 0F0"), "line 2: the schedule is not valid"),
        (lambda line: line.replace("0F0 0F1", "0F0 nonsense"), "line 2: programs\\[0\\]"),
        (lambda line: line.replace('"lower_bound_ms":2.0', '"lower_bound_ms":1e9'), "line 2: lower_bound_ms"),
    ],
)
def test_import_refuses_what_is_wrong(cache: Cache, tmp_path: Path, spoil: Any, message: str) -> None:
    cache.add(gpipe(chain()), "feasible", 2.0)
    [line] = cache.export_lines()
    other = Cache(tmp_path / "other.sqlite")
    with pytest.raises((InputError, ScheduleError), match=message):
        other.import_lines(["", spoil(line)])
    assert other.entries() == []


def test_prune_keeps_the_newest(cache: Cache) -> None:
    for forward in (1.0, 2.0, 3.0):
        cache.add(gpipe(chain(forward=forward)), "feasible")
    assert cache.prune(2) == 1
    assert [entry.problem.stages[0].forward_ms for entry in cache.entries()] == [3.0, 2.0]
    assert cache.prune(2) == cache.prune(10**30) == 0
    with pytest.raises(InputError, match="keep = -1"):
        cache.prune(-1)


def test_a_damaged_entry_is_no_hit_and_is_replaced(cache: Cache, spoil: Spoil) -> None:
    cache.add(gpipe(chain()), "feasible")
    [line] = cache.export_lines()
    spoil("entry", line.replace("0F1", "0F7"))
    assert cache.lookup(chain()) is None
    assert cache.lookup(chain(scale=2.0)) is None
    assert cache.add(gpipe(chain()), "feasible")
    assert cache.lookup(chain()) is not None


@pytest.mark.parametrize("damaged", ["{", "{}", "null", '{"forward": [1]}'])
def test_damaged_features_are_no_hit(cache: Cache, spoil: Spoil, damaged: str) -> None:
    cache.add(gpipe(chain()), "feasible")
    spoil("features", damaged)
    assert cache.lookup(chain(scale=2.0)) is None
    assert cache.lookup(chain()) is not None


def test_entries_that_are_not_text_are_no_hit(tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    cache = Cache(path)
    cache.add(gpipe(chain()), "feasible")
    _spoil(path, "features", b"{\xff}")
    assert cache.lookup(chain(scale=2.0)) is None
    _spoil(path, "entry", b"{\xff}")
    assert cache.lookup(chain()) is None
    assert cache.add(gpipe(chain()), "feasible")
    assert cache.lookup(chain()) is not None


def test_files_that_are_not_caches_are_refused_in_one_sentence(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("this is not a database " * 100)
    with pytest.raises(InputError, match="cannot be used"):
        Cache(text)
    with pytest.raises(InputError, match="text/below"):
        Cache(text / "below" / "cache.sqlite")
    newer = tmp_path / "newer"
    db = sqlite3.connect(newer)
    db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(InputError, match="version 7"):
        Cache(newer)


def test_default_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPTPIPE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_path() == Path("/somewhere/optpipe/schedules.sqlite")
    monkeypatch.setenv("OPTPIPE_CACHE", "/elsewhere/cache.sqlite")
    assert default_path() == Path("/elsewhere/cache.sqlite")


def test_a_user_without_a_home_folder_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPTPIPE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(InputError, match="OPTPIPE_CACHE is not set"):
        default_path()
