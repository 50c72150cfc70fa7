"""First schedules: whatever a process answers, the result is a valid schedule in time, or none."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.patience import hold_timers
from support.problems.chain import chain, gpipe, one_by_one
from support.problems.strategies import problems
from support.processes import over, started_with
from support.until import until

import optpipe_server.first_schedules
from optpipe.errors import InputError
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe.schedule import Schedule, check
from optpipe_cache import Cache, Retention
from optpipe_server.database import Database, InitialResult
from optpipe_server.database.tables import Source
from optpipe_server.first_schedules import FirstSchedules
from optpipe_server.schedule_cache import ScheduleCache
from optpipe_server.settings import Settings
from optpipe_solver.bounds.least_memory import infeasibility

AMPLE, TIGHT = chain(memory=2), chain(memory=1)  # for both micro-batches' activations, and for one's
SOON_S = 60.0  # on a busy machine; a process that hangs does so for longer
MODULE, FAKE = optpipe_server.first_schedules.MODULE, "support.fakes.first_process"


class View:
    """`FirstSchedules` with a cache, and the requests that its processes have read."""

    def __init__(self, finder: FirstSchedules, cache: Cache, log: Path) -> None:
        self.first_schedules, self.cache, self._log = finder, cache, log

    def start(
        self,
        problem: Problem = TIGHT,
        method: str = "good",
        given: Schedule | None = None,
        source: Source = "warm_start",
        within_s: float = SOON_S,
        **options: Any,
    ) -> InitialResult:
        read = None if given is None else lambda: given
        asked, deadline = SolveOptions(method=method, **options), time.monotonic() + within_s
        start = self.first_schedules.find(problem, asked, read, source, deadline)
        if found := start.best.schedule:
            assert check(found.placement.apply(problem) if found.placement else problem, found) == []
        return start

    def requests(self) -> list[tuple[int, str]]:
        """The pid and the method of every request that a process has read."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [(int(pid), method) for pid, _, method in (line.partition(" ") for line in lines)]

    def until_requested(self, method: str) -> None:
        until(lambda: any(asked == method for _, asked in self.requests()))


@contextmanager
def opened(folder: Path, processes: int = 1) -> Iterator[Callable[[], View]]:
    """Yield a function that empties the cache and returns a view."""
    settings = Settings(
        f"sqlite:///{folder / 'jobs.sqlite'}",
        folder / "cache.sqlite",
        pack=None,
        first_schedule_processes=processes,
    )
    database = Database(settings.database)
    cache = ScheduleCache(settings, database)
    finder = FirstSchedules(settings, cache)

    def view() -> View:
        cache.open().storage.prune(Retention(0))
        return View(finder, cache.open(), folder / "log")

    try:
        yield view
    finally:
        finder.close()
        database.close()


@contextmanager
def odd(folder: Path, processes: int = 1) -> Iterator[Callable[[], View]]:
    """The same with processes that do what the method says; none is left afterwards."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        patched.setenv("FIRST_LOG", str(folder / "log"))
        patched.setattr(optpipe_server.first_schedules, "MODULE", FAKE)
        with opened(folder, processes) as view:
            yield view
        assert started_with(str(folder / "log")) == []


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], View]]:
    with odd(tmp_path_factory.mktemp("odd")) as view:
        yield view


@pytest.fixture
def view(views: Callable[[], View]) -> View:
    return views()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[View]:
    """A view that no other test uses."""
    with odd(tmp_path, processes=2) as view:
        yield view()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[View]:
    with pytest.MonkeyPatch.context() as patched:  # `views` may be there already
        patched.setattr(optpipe_server.first_schedules, "MODULE", MODULE)
        with opened(tmp_path_factory.mktemp("real")) as view:
            yield view()


@given(problem=problems(beyond=True), memory=st.sampled_from([0.5, 1.0, 1.5, 3.0, 100.0]))
@settings(max_examples=examples(12))
def test_first_schedules_are_valid_or_infeasible_for_the_solvers_reason(real, problem, memory):
    problem = problem.with_memory_for(memory)
    start, reason = real.start(problem, "auto"), infeasibility(problem)
    assert start.best.reason == reason
    assert (start.best.status == "infeasible") == (start.best.schedule is None) == bool(reason)
    assert start.source in ("heuristic", "cache")
    if start.best.schedule:
        assert start.best.lower_bound_ms <= start.best.value_ms * (1 + 1e-9)
        assert (start.best.status == "optimal") == (start.best.gap <= 1e-9)


@pytest.mark.parametrize("method", ["nope", "dualpipe"])
def test_a_method_that_does_not_apply_is_refused_even_if_an_answer_is_cached(real, method):
    best = gpipe(AMPLE)
    real.cache.add(best, "optimal", best.makespan_ms)
    with pytest.raises(InputError, match=r"method = |needs "):
        real.start(AMPLE, method)


def test_an_unusable_cache_is_ignored(tmp_path):
    with odd(tmp_path) as views:
        view = views()
        (tmp_path / "cache.sqlite").write_bytes(b"no database" * 100)
        start = view.first_schedules.find(
            TIGHT, SolveOptions(method="good"), None, "warm_start", time.monotonic() + SOON_S
        )
    assert start.best.schedule


def test_the_best_of_all_sources_wins(view):
    assert view.start(AMPLE, given=gpipe(AMPLE)).source == "warm_start"
    assert view.start(AMPLE, given=one_by_one(AMPLE)).source == "warm_start"  # as short as the process's
    assert view.start(TIGHT, given=gpipe(AMPLE)).source == "heuristic"  # does not fit
    assert view.start(AMPLE, given=one_by_one(chain(m=3))).source == "heuristic"  # of another problem
    view.cache.add(gpipe(AMPLE), "feasible")
    assert view.start(AMPLE, "auto", given=one_by_one(AMPLE)).source == "cache"


@pytest.mark.parametrize(
    ("options", "source", "status"),
    [
        ({}, "cache", "optimal"),
        ({"seed": 5, "threads": 3, "solver": "highs", "gap": 0.1, "memory_mib": 512}, "cache", "optimal"),
        ({"objective": "span"}, "heuristic", "feasible"),
        ({"method": "good"}, "heuristic", "feasible"),
        ({"placements": "all"}, "cache", "feasible"),  # a place to start from; other stages may be faster
    ],
)
def test_a_cached_optimum_answers_only_what_it_is_the_optimum_of(view, options, source, status):
    view.cache.add(gpipe(AMPLE), "optimal", gpipe(AMPLE).makespan_ms)
    before = view.requests()
    start = view.start(AMPLE, **{"method": "auto", **options})
    assert (start.source, start.best.status) == (source, status)
    assert (view.requests() == before) == (status == "optimal"), "a proven answer needs no process"
    if "placements" in options:
        assert start.best.lower_bound_ms is None


def test_with_all_placements_a_system_runs_on_its_own_stages_and_nothing_bounds_the_others(real):
    assert real.start(AMPLE, "zb-v", placements="all").best.schedule.placement == Placement(chunks=2, shape="v")
    tight = chain(memory=1)
    with pytest.raises(InputError, match="needs "):
        real.start(tight, "zb-v")
    start = real.start(tight, "auto", placements="all")
    assert (start.best.status, start.best.lower_bound_ms) == ("feasible", None)
    impossible = tight.replace(
        devices=[device.model_copy(update={"activation_budget_bytes": 1}) for device in tight.devices]
    )
    assert real.start(impossible, "auto").best.status == "infeasible"
    assert real.start(impossible, "auto", placements="all").best.status == "unknown"


def test_drifted_costs_carry_the_best_over(view):
    drifted = chain(memory=2, forward=1.5)
    start = view.start(drifted, given=gpipe(AMPLE), source="carried")
    assert start.source == "carried"
    assert start.best.schedule is not None
    assert start.best.schedule.problem is drifted
    assert start.best.value_ms == gpipe(drifted).makespan_ms


def test_a_refused_request_is_an_input_error(view):
    with pytest.raises(InputError, match="the methods are others"):
        view.start(method="none")
    assert view.start().best.schedule


@pytest.mark.parametrize(
    "method",
    [
        "greedy",
        "stranger",
        "babbler",
        "garbage",
        "not JSON",
        "half a frame",
        "gigabyte",
        "dies",
        "infeasible",
        "silent",
    ],
)
def test_a_process_without_a_valid_schedule_gives_none(view, method):
    start = view.start(method=method)
    assert start.best.schedule is None
    assert start.best.status == ("infeasible" if method == "infeasible" else "unknown")
    assert view.start().best.schedule
    assert view.requests()[-1][1] == "good"


@pytest.mark.parametrize("method", ["first good, then greedy", "infeasible, but", "boaster", "dies late"])
def test_valid_schedules_count_whatever_else_the_process_writes(view, method):
    start = view.start(method=method)
    assert start.best.value_ms == one_by_one(TIGHT).makespan_ms
    assert (start.best.status, start.best.lower_bound_ms) == ("feasible", None)


@pytest.mark.parametrize("method", ["hangs", "asleep", "endless"])
def test_a_late_process_is_ended_with_its_children(view, method, monkeypatch):
    view.start()
    before, processes = len(view.requests()), 2 if method == "hangs" else 1
    hold_timers(monkeypatch, lambda: until(lambda: len(view.requests()) >= before + processes))
    start = view.start(method=method, within_s=1.0)
    assert (start.best.schedule is not None) == (method == "hangs")
    ids = {pid for pid, _ in view.requests()[before:]}
    assert len(ids) == processes
    until(lambda: all(over(pid) for pid in ids))
    assert view.start().best.schedule


@pytest.mark.parametrize("method", ["talks on", "talks late"])
def test_what_answers_an_earlier_request_is_passed_over(view, method):
    """Behind the end of its answer, or when the next request has been read. The process goes on."""
    view.start(method=method)
    start = view.start(AMPLE)
    assert start.best.value_ms == one_by_one(AMPLE).makespan_ms
    assert start.best.lower_bound_ms is None
    (first, said), (second, then) = view.requests()[-2:]
    assert (said, then) == (method, "good")
    assert first == second


def test_a_process_that_has_ended_is_replaced(view):
    view.start()
    pid, _ = view.requests()[-1]
    os.kill(pid, signal.SIGKILL)
    assert view.start().best.schedule
    assert view.requests()[-1][0] != pid


def test_close_ends_all_waits(alone, monkeypatch):
    """Of small problems, and of a large one, for which they do not wait."""
    monkeypatch.setattr(optpipe_server.first_schedules, "LARGE", 20)
    with ThreadPoolExecutor(4) as pool:
        large = pool.submit(alone.start, chain(m=20), "asleep")
        alone.until_requested("asleep")
        assert alone.start().best.schedule
        waiting = [large, *(pool.submit(alone.start, TIGHT, "asleep") for _ in range(3))]
        alone.first_schedules.close()
        assert [start.result(SOON_S).best.schedule for start in waiting] == [None] * 4
    assert alone.start().best.schedule is None  # and who comes later
