"""The schedule cache: exact and nearest hits, both verified on the exact problem; several processes use one file."""

import multiprocessing
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.problems.chain import chain, gpipe, one_by_one

from optpipe import InputError, Problem, ScheduleError, check
from optpipe.reuse import by_rules
from optpipe_cache import Cache, Retention, default_path, storage, structure
from optpipe_server.database import Database
from optpipe_server.database.tables import schedules
from optpipe_server.service_cache import TableStorage


@pytest.fixture(params=["file", "postgresql"])
def each_cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cache]:
    """A cache on each of its storages."""
    if request.param == "file":
        yield Cache(tmp_path / "new folder" / "cache.sqlite")
        return
    database = Database(request.getfixturevalue("postgres_url"))
    yield Cache(TableStorage(database))
    database.close()


def spoil(cache: Cache, column: str, value: str | bytes) -> None:
    """Overwrite a column of all its rows."""
    if isinstance(cache.storage, TableStorage):
        with cache.storage._database.write() as db:
            db.execute(schedules.update().values({column: value}))
    else:
        with closing(sqlite3.connect(cache.storage.path)) as db, db:  # type: ignore[attr-defined]
            db.execute(f"UPDATE schedules SET {column} = ?", (value,))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """One in a file, for what does not depend on the storage."""
    return Cache(tmp_path / "cache.sqlite")


def test_exact_hit(each_cache: Cache) -> None:
    problem = chain()
    assert each_cache.lookup(problem) is None
    assert each_cache.add(gpipe(problem), "feasible", 5.0)
    hit = each_cache.lookup(problem)
    assert (hit.exact, hit.distance, hit.status, hit.lower_bound_ms) == (True, 0.0, "feasible", 5.0)
    assert (hit.schedule.programs, hit.schedule.method) == (gpipe(problem).programs, "gpipe")


def test_rules_are_kept_with_a_schedule(cache: Cache) -> None:
    schedule = by_rules(chain(), None, "makespan", most=1)
    cache.add(schedule, "feasible")
    hit = cache.lookup(chain())
    for kept, array in zip(hit.schedule.rules, schedule.rules, strict=True):
        assert (kept == array).all()


def test_the_better_schedule_is_kept(each_cache: Cache) -> None:
    problem = chain()
    assert gpipe(problem).makespan_ms < one_by_one(problem).makespan_ms
    assert each_cache.add(one_by_one(problem), "feasible")
    assert each_cache.add(gpipe(problem), "feasible", 3.0)
    assert not each_cache.add(one_by_one(problem), "feasible")
    assert not each_cache.add(gpipe(problem), "feasible", 2.0)
    assert each_cache.add(gpipe(problem), "feasible", 4.0)
    [entry] = each_cache.entries()
    assert (entry.method, entry.lower_bound_ms) == ("gpipe", 4.0)


def test_a_faster_machine_has_distance_zero_and_its_own_makespan(cache: Cache) -> None:
    cache.add(gpipe(chain()), "optimal", gpipe(chain()).makespan_ms)
    twice = chain(scale=2.0)
    hit = cache.lookup(twice)
    assert (hit.exact, hit.distance, hit.schedule.problem) == (False, 0.0, twice)
    assert hit.schedule.makespan_ms <= 2 * gpipe(chain()).makespan_ms * (1 + 1e-9)
    assert (hit.status, hit.lower_bound_ms) == ("feasible", None), "what was proven is of another problem"


def test_a_schedule_that_needs_more_memory_or_has_other_microbatches_is_adapted(cache: Cache) -> None:
    cache.add(gpipe(chain(memory=4, m=4)), "feasible")
    for wanted in (chain(memory=3, m=4), chain(memory=4, m=5), chain(memory=4, m=3)):
        hit = cache.lookup(wanted)
        assert not hit.exact
        assert check(wanted, hit.schedule) == []


def test_what_would_take_too_long_is_given_up_and_reported(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    for forward in (1.0, 1.05, 1.1):
        cache.add(one_by_one(chain(memory=1, m=1, forward=forward)), "feasible")
    monkeypatch.setattr("optpipe_cache.cache.MOST_OPS", 15)
    assert cache.lookup(chain(memory=1, m=4)) is None
    assert "not adapted: of 16 ops, more than 15 would take too long" in caplog.text
    monkeypatch.setattr("optpipe_cache.cache.MOST_HANDLED", 7)
    assert cache.lookup(chain(memory=1, m=4)) is None
    assert "given up: it had verified schedules of 8 ops" in caplog.text


LESS = tuple(device.model_copy(update={"activation_budget_bytes": 900}) for device in chain().devices)


@pytest.mark.parametrize("other", [chain(offload=None), chain(link="pcie0"), chain().replace(devices=LESS)])
def test_another_structure_or_too_little_memory_is_never_a_hit(cache: Cache, other: Problem) -> None:
    cache.add(gpipe(chain(memory=2)), "feasible")
    assert (structure(other) == structure(chain())) == (other.devices == LESS)
    assert cache.lookup(other) is None


def test_an_invalid_schedule_is_not_added(cache: Cache) -> None:
    with pytest.raises(ScheduleError, match="device 0 needs 2 kB"):
        cache.add(gpipe(chain(memory=1)), "feasible")
    with pytest.raises(InputError, match="lower_bound_ms = 99"):
        cache.add(gpipe(chain()), "feasible", 99.0)
    for bound in (None, 1.0):
        with pytest.raises(InputError, match="status = 'optimal': lower_bound_ms = "):
            cache.add(gpipe(chain()), "optimal", bound)
    assert cache.entries() == []


def test_export_and_import(each_cache: Cache, tmp_path: Path) -> None:
    for forward in (1.0, 2.0):
        each_cache.add(gpipe(chain(forward=forward)), "feasible", 2.0)
    lines = [*each_cache.export_lines(), "", "\n"]
    other = Cache(tmp_path / "other.sqlite")
    assert other.import_lines(lines) == 2
    assert other.import_lines(lines) == 0
    theirs, ours = ({each.problem.sha256: each.programs for each in cache.entries()} for cache in (each_cache, other))
    assert ours == theirs


def _forwards(cache: Cache) -> list[tuple[float, int]]:
    """The forward time of each entry, and how often it was found."""
    return [(entry.problem.stages[0].forward_ms, hits) for entry, hits in cache.entries_and_hits()]


def test_what_is_kept_for_another_problem_is_no_hit(each_cache: Cache, caplog: Any) -> None:
    """Its bound would be told as this problem's."""
    best = gpipe(chain(memory=2, forward=0.5))
    each_cache.add(best, "optimal", best.makespan_ms)
    [other] = each_cache.export_lines()
    each_cache.prune(0)
    each_cache.add(gpipe(chain(memory=2)), "feasible")
    spoil(each_cache, "entry", other)
    assert each_cache.lookup(chain(memory=2)) is None
    assert each_cache.lookup(chain(memory=2, forward=1.01)) is None
    assert "of another problem" in caplog.text


def test_prune_keeps_what_was_used_last(each_cache: Cache) -> None:
    for forward in (1.0, 2.0, 3.0):
        each_cache.add(gpipe(chain(forward=forward)), "feasible")
    assert each_cache.lookup(chain(forward=1.0))
    assert each_cache.prune(2) == 1
    assert _forwards(each_cache) == [(1.0, 1), (3.0, 0)]
    assert each_cache.prune(2) == each_cache.prune(10**30) == 0
    assert each_cache.prune(days=1) == each_cache.prune(days=10**9) == 0
    spoil(each_cache, "used", (datetime.now(UTC) - timedelta(days=3)).isoformat())
    assert each_cache.prune(days=4) == 0
    assert each_cache.prune(days=2) == 2
    for wrong in ({"keep": -1}, {"days": -0.5}):
        [(name, value)] = wrong.items()
        with pytest.raises(InputError, match=f"{name} = {value}"):
            each_cache.prune(**wrong)


def test_a_hit_that_cannot_be_counted_is_a_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache.sqlite"
    cache = Cache(path)
    cache.add(gpipe(chain()), "feasible")
    monkeypatch.setattr(storage, "BUSY_S", 0.0)
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        assert cache.lookup(chain()) is not None
        writer.execute("ROLLBACK")
    assert _forwards(cache) == [(1.0, 0)]


def test_a_full_cache_loses_what_was_unused_longest(each_cache: Cache) -> None:
    full = Cache(each_cache.storage, Retention(keep=2))
    for forward in (1.0, 2.0):
        full.add(gpipe(chain(forward=forward)), "feasible")
    assert full.lookup(chain(forward=1.01)), "a nearest hit is a use, too"
    full.add(gpipe(chain(forward=3.0)), "feasible")
    assert _forwards(full) == [(3.0, 0), (1.0, 1)]
    full.add(gpipe(chain(forward=1.0)), "feasible", 2.0)
    assert _forwards(full) == [(1.0, 1), (3.0, 0)], "a better entry keeps its hits"


def test_a_damaged_entry_is_no_hit_and_is_replaced(each_cache: Cache) -> None:
    each_cache.add(gpipe(chain()), "feasible")
    [line] = each_cache.export_lines()
    spoil(each_cache, "entry", line.replace("0F1", "0F7"))
    assert each_cache.lookup(chain()) is None
    assert each_cache.lookup(chain(scale=2.0)) is None
    assert each_cache.add(gpipe(chain()), "feasible")
    assert each_cache.lookup(chain()) is not None


def test_a_stored_length_is_not_believed(each_cache: Cache) -> None:
    longer, shorter = one_by_one(chain()), gpipe(chain())
    each_cache.add(longer, "feasible", 0.5)
    [entry] = each_cache.entries()
    spoil(each_cache, "entry", entry.model_copy(update={"objective_ms": 0.5}).model_dump_json(exclude_none=True))
    assert each_cache.lookup(chain()).status == "feasible"
    assert each_cache.add(shorter, "feasible")
    assert each_cache.lookup(chain()).schedule.programs == shorter.programs


@pytest.mark.parametrize("damaged", [b"", b"1", b"\xff" * 99])
def test_damaged_features_are_no_hit_and_are_reported(each_cache: Cache, damaged: bytes, caplog: Any) -> None:
    each_cache.add(gpipe(chain()), "feasible")
    spoil(each_cache, "features", damaged)
    assert each_cache.lookup(chain(scale=2.0)) is None
    assert "skipped 1 entries whose features cannot be read" in caplog.text
    assert each_cache.lookup(chain()) is not None


def test_files_that_are_not_caches_are_refused_in_one_sentence(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("this is not a database " * 100)
    with pytest.raises(InputError, match="cannot be used"):
        Cache(text)
    with pytest.raises(InputError, match="text/below"):
        Cache(text / "below" / "cache.sqlite")
    newer = tmp_path / "newer"
    with closing(sqlite3.connect(newer)) as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(InputError, match="version 7"):
        Cache(newer)


def test_default_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPTPIPE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_path() == Path("/somewhere/optpipe/schedules.sqlite")
    monkeypatch.setenv("OPTPIPE_CACHE", "/elsewhere/cache.sqlite")
    assert default_path() == Path("/elsewhere/cache.sqlite")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("OPTPIPE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(InputError, match="OPTPIPE_CACHE is not set"):
        default_path()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda line: line[:-1], "line 2"),
        (lambda line: line.replace("0F0 0F1", "0F0 0F0"), "line 2: the schedule is not valid"),
        (lambda line: line.replace("0F0 0F1", "0F0 nonsense"), "line 2: programs\\[0\\]"),
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


def test_a_bound_from_outside_is_not_kept(each_cache: Cache, tmp_path: Path) -> None:
    proven = gpipe(chain()), "optimal", gpipe(chain()).makespan_ms  # a bound as if a search had proven it
    each_cache.add(*proven)
    [entry] = each_cache.entries()
    imported = Cache(tmp_path / "imported.sqlite")
    assert imported.import_lines([*each_cache.export_lines(), entry.model_dump_json()]) == 1
    hit = imported.lookup(chain())
    assert (hit.exact, hit.status, hit.lower_bound_ms) == (True, "feasible", None)
    imported.add(*proven)  # now one of this user's
    assert [entry.status for entry in imported.entries()] == ["optimal"]


def _create(paths: list[Path], start: Any) -> None:
    schedule = gpipe(chain())
    try:
        for path in paths:
            start.wait(60)
            Cache(path).add(schedule, "feasible")
    except InputError:
        start.abort()  # the others need not wait
        raise


def test_several_processes_create_one_cache_at_once(tmp_path: Path) -> None:
    paths = [tmp_path / f"{k}.sqlite" for k in range(20)]
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(6)
    creators = [spawn.Process(target=_create, args=(paths, start)) for _ in range(6)]
    for creator in creators:
        creator.start()
    for creator in creators:
        creator.join()
    codes = [creator.exitcode for creator in creators]
    for creator in creators:
        creator.close()
    assert codes == [0] * 6


def _add_endlessly(path: Path, first: int, added: Any) -> None:
    cache = Cache(path, kept=Retention(keep=10_000))
    for k in range(first, first + 100_000):
        problem = chain(forward=1.0 + k / 64)
        cache.add(gpipe(problem), "feasible")
        added.send(problem.sha256)
        cache.lookup(problem)  # which counts the hit


@pytest.mark.parametrize("kills", [3, pytest.param(60, marks=pytest.mark.soak)])
def test_what_a_killed_process_has_added_is_there(tmp_path: Path, kills: int) -> None:
    path, spawn = tmp_path / "cache.sqlite", multiprocessing.get_context("spawn")
    added: set[str] = set()
    for n in range(kills):
        receiver, sender = spawn.Pipe(duplex=False)
        writer = spawn.Process(target=_add_endlessly, args=(path, 100_000 * n, sender))
        writer.start()
        sender.close()
        added |= {receiver.recv() for _ in range(5 + n)}
        writer.kill()
        writer.join()
        while True:  # what it said before
            try:
                added.add(receiver.recv())
            except EOFError:
                break
        receiver.close()
        writer.close()
        known = {entry.problem.sha256 for entry in Cache(path).entries()}
        assert added <= known
        assert len(known) <= len(added) + n + 1, "each of them may have added one that it could not tell of"
