"""First schedules: whatever a process answers, the result is a valid schedule in time, or none."""

import asyncio
import json
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import with_budgets
from support.problems.chain import chain, gpipe, one_by_one
from support.problems.strategies import problems

from optpipe import InputError, Problem, Schedule, check, solvers
from optpipe.model.placement import Placement
from optpipe.options import SolveOptions
from optpipe_cache import Cache, Retention
from optpipe_server import Settings, accepted, first_schedules
from optpipe_server.database import Database, InitialResult
from optpipe_server.database.tables import Source
from optpipe_server.first_schedules import FirstSchedules
from optpipe_server.pool import BUSY, Pool, TaskError
from optpipe_server.service_cache import ServiceCache
from optpipe_solver.bounds.least_memory import infeasibility

AMPLE, TIGHT = chain(memory=2), chain(memory=1)  # for both micro-batches' activations, and for one's
SOON_S = 60.0  # on a busy machine; a process that hangs does so for longer
MODULE, SYSTEMS, FAKE = solvers.installed().FIRST, solvers.installed().SYSTEMS, "support.fakes.first"


class View:
    """`FirstSchedules` with a cache, in an event loop of its own."""

    def __init__(self, runner: asyncio.Runner, folder: Path, module: str) -> None:
        self._module = module
        settings = Settings(f"sqlite:///{folder / 'jobs.sqlite'}", folder / "cache.sqlite", pack=None)
        self.run, self._database = runner.run, Database(settings.database)
        self.cached = ServiceCache(settings, self._database)
        self.run(self._open())

    async def _open(self) -> None:
        self.pool = Pool(2)
        self.first_schedules = FirstSchedules(self.pool, self.cached)

    def close(self) -> None:
        self.run(self.pool.close())
        self._database.close()

    def find(
        self,
        problem: Problem = TIGHT,
        method: str = "good",
        given: Schedule | None = None,
        source: Source = "warm_start",
        within_s: float = SOON_S,
        **options: Any,
    ) -> Coroutine[Any, Any, InitialResult]:
        solvers.installed().FIRST = self._module
        solvers.installed().SYSTEMS = FAKE if self._module == FAKE else SYSTEMS
        read = None if given is None else lambda: given
        asked, deadline = SolveOptions(method=method, **options), time.monotonic() + within_s
        return self.first_schedules.find(problem, asked, read, source, deadline)

    def start(self, problem: Problem = TIGHT, *arguments: Any, **options: Any) -> InitialResult:
        """What is found, checked."""
        start: InitialResult = self.run(self.find(problem, *arguments, **options))
        if found := start.best.schedule:
            assert check(found.placement.apply(problem) if found.placement else problem, found) == []
        return start


@contextmanager
def opened(folder: Path, module: str) -> Iterator[View]:
    with asyncio.Runner() as runner:
        view = View(runner, folder, module)
        yield view
        view.close()
    solvers.installed().FIRST, solvers.installed().SYSTEMS = MODULE, SYSTEMS


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[View]:
    with opened(tmp_path_factory.mktemp("odd"), FAKE) as view:
        yield view


@pytest.fixture
def view(odd: View) -> View:
    odd.cached.open().storage.prune(Retention(0))
    return odd


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[View]:
    with opened(tmp_path_factory.mktemp("real"), MODULE) as view:
        yield view


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked, run = list[Any](), Pool.run
    monkeypatch.setattr(Pool, "run", lambda *task, **more: (asked.append(task), run(*task, **more))[1])
    return asked


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
    real.cached.open().add(best, "optimal", best.makespan_ms)
    with pytest.raises(InputError, match=r"method = |needs "):
        real.start(AMPLE, method)


@pytest.mark.parametrize("method", ["nope", "1f1b:group=2", "gis:group=x"])
def test_an_unknown_method_is_refused_though_no_process_answers(real, method, monkeypatch):
    async def fails(*_arguments, **_options):
        raise TaskError("it was not done in time")

    monkeypatch.setattr(Pool, "run", fails)
    with pytest.raises(InputError, match=r"^method = "):
        real.start(AMPLE, method)
    assert real.start(AMPLE, "1f1b").best.status == "unknown"


def test_an_unusable_cache_is_ignored(tmp_path):
    with opened(tmp_path, FAKE) as view:
        (tmp_path / "cache.sqlite").write_bytes(b"no database" * 100)
        assert view.start().best.schedule


def test_the_best_of_all_sources_wins(view):
    assert view.start(AMPLE, given=gpipe(AMPLE)).source == "warm_start"
    assert view.start(AMPLE, given=one_by_one(AMPLE)).source == "warm_start"  # as short as the process's
    assert view.start(TIGHT, given=gpipe(AMPLE)).source == "heuristic"  # does not fit
    assert view.start(AMPLE, given=one_by_one(chain(m=3))).source == "heuristic"  # of another problem
    view.cached.open().add(gpipe(AMPLE), "feasible")
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
def test_a_cached_optimum_answers_only_what_it_is_the_optimum_of(view, options, source, status, counted):
    view.cached.open().add(gpipe(AMPLE), "optimal", gpipe(AMPLE).makespan_ms)
    start = view.start(AMPLE, **{"method": "auto", **options})
    assert (start.source, start.best.status) == (source, status)
    assert (not counted) == (status == "optimal"), "a proven answer needs no process"
    if "placements" in options:
        assert start.best.lower_bound_ms is None


def test_with_all_placements_a_system_runs_on_its_own_stages_and_bounds_hold_for_all(real):
    assert real.start(AMPLE, "zb-v", placements="all").best.schedule.placement == Placement(chunks=2, shape="v")
    tight = chain(memory=1)
    with pytest.raises(InputError, match="needs "):
        real.start(tight, "zb-v")
    start = real.start(tight, "auto", placements="all")
    shortest = min(start.best.value_ms, real.start(tight, "auto").best.value_ms)
    assert 0.0 < start.best.lower_bound_ms <= shortest * (1 + 1e-9)
    assert real.start(with_budgets(tight, 1), "auto").best.status == "infeasible"
    assert real.start(with_budgets(tight, 1), "auto", placements="all").best.status == "unknown"


def test_where_nothing_fits_the_reason_says_what_would(real, monkeypatch):
    monkeypatch.setattr(first_schedules, "PUBLISHED_S", 60.0)  # it takes a second on a quiet machine
    largest = max(stage.activation_bytes for stage in TIGHT.stages)
    nothing = real.start(with_budgets(TIGHT, largest - 1), "auto")
    assert "placements = all" in {remedy.change for remedy in nothing.best.remedies}
    assert nothing.reason == f"{nothing.best.reason}; what fits: {'; '.join(map(str, nothing.best.remedies))}"


def test_drifted_costs_carry_the_best_over(view):
    drifted = chain(memory=2, forward=1.5)
    start = view.start(drifted, given=gpipe(AMPLE), source="carried")
    assert (start.source, start.best.schedule.problem) == ("carried", drifted)
    assert start.best.value_ms == gpipe(drifted).makespan_ms


def test_a_refused_request_is_an_input_error(view):
    with pytest.raises(InputError, match="the methods are others"):
        view.start(method="none")
    assert view.start().best.schedule


@pytest.mark.parametrize("method", ["greedy", "stranger", "babbler", "fails", "dies", "infeasible", "silent"])
def test_a_process_without_a_valid_schedule_gives_none(view, method):
    start = view.start(method=method)
    assert start.best.schedule is None
    assert start.best.status == ("infeasible" if method == "infeasible" else "unknown")
    assert view.start().best.schedule


@pytest.mark.parametrize("method", ["first good, then greedy", "infeasible, but", "boaster"])
def test_valid_schedules_count_whatever_else_the_process_finds(view, method):
    start = view.start(method=method)
    assert start.best.value_ms == one_by_one(TIGHT).makespan_ms
    assert (start.best.status, start.best.lower_bound_ms) == ("feasible", None)


@pytest.mark.parametrize("method", ["hangs", "asleep", "endless", "stuck"])
def test_a_late_task_ends_in_time_with_what_it_has(view, method):
    view.start()
    began = time.monotonic()
    start = view.start(method=method, within_s=1.0)
    assert time.monotonic() - began < 30
    assert (start.best.schedule is not None) == (method == "hangs")
    assert view.start().best.schedule


def test_large_problems_take_turns_and_small_ones_do_not_wait_for_them(view, monkeypatch):
    monkeypatch.setattr(accepted, "LARGE", 20)
    large = chain(m=20)

    async def together() -> list[Any]:
        first = asyncio.create_task(view.find(large, "asleep", within_s=20.0))
        await asyncio.sleep(0.5)
        behind = [view.find(large, within_s=2.0), view.find(large, within_s=2.0, given=one_by_one(large))]
        small = await view.find()
        assert small.best.schedule
        assert not first.done()
        return [*await asyncio.gather(*behind, return_exceptions=True), await first]

    without, busy, first = view.run(together())
    assert without.best.schedule is first.best.schedule is None
    assert str(busy) == BUSY


def test_where_others_wait_nothing_takes_long(real, counted, monkeypatch):
    exact = list[bool]()
    monkeypatch.setattr(Cache, "lookup", lambda *asked: exact.append(asked[-1]))
    for real.first_schedules.waiting in (1, 2, 1):
        real.start(TIGHT, "auto")
    assert exact == [False, True, False]
    assert [json.loads(task[-1])["time_limit_s"] for task in counted] == [1.0, 0.05, 1.0]


def test_close_ends_all_waits(tmp_path):
    with opened(tmp_path, FAKE) as view:

        async def closed() -> list[InitialResult]:
            waiting = [asyncio.create_task(view.find(TIGHT, "asleep")) for _ in range(4)]
            await asyncio.sleep(1.0)
            await view.pool.close()
            return await asyncio.gather(*waiting)

        assert [start.best.schedule for start in view.run(closed())] == [None] * 4
        assert view.start().best.schedule is None  # and who comes later
