"""The first schedule of a submission: whatever a maker says, what the desk gives is a schedule of the problem, in time,
or none."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chain import chain, gpipe, one_by_one
from support.processes import over, started_with
from support.strategies import problems

import optpipe_server.first_schedule_process
import optpipe_server.first_schedules
from optpipe.errors import InputError
from optpipe.evaluate.validity import check
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_server.database import Database, InitialResult
from optpipe_server.first_schedules import FirstSchedules
from optpipe_server.settings import LOCAL, Settings
from optpipe_server.tenant_caches import TenantCaches
from optpipe_solver.floor import infeasibility

AMPLE, TIGHT = chain(memory=2), chain(memory=1)  # for both micro-batches' activations, and for one's
SOON_S = 60.0  # on a busy machine; a process that hangs does so for longer


class Office:
    """A desk as one tenant sees it, and what its makers have been asked."""

    def __init__(self, desk: FirstSchedules, caches: TenantCaches, tenant: str, log: Path) -> None:
        self.first_schedules, self.cache, self.tenant, self._log = desk, caches.of(tenant), tenant, log

    def start(
        self, problem: Problem = TIGHT, method: str = "good", warm_start: Schedule | None = None
    ) -> InitialResult:
        start = self.first_schedules.find(self.tenant, problem, method, "makespan", warm_start)
        assert start.best.schedule is None or check(problem, start.best.schedule) == []
        return start

    def find_after_change(self, problem: Problem, best: Schedule | None) -> InitialResult:
        return self.first_schedules.find_after_change(self.tenant, problem, "good", "makespan", best)

    def asked(self) -> list[tuple[int, str]]:
        """The pid and the method of every request that a maker has read."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [(int(pid), method) for pid, _, method in (line.partition(" ") for line in lines)]

    def until_asked(self, method: str) -> None:
        until = time.monotonic() + SOON_S
        while not any(asked == method for _, asked in self.asked()):
            assert time.monotonic() < until
            time.sleep(0.02)


@contextmanager
def opened(folder: Path, processes: int = 1) -> Iterator[Callable[[], Office]]:
    """A desk; each call gives it to another tenant."""
    settings = Settings(
        f"sqlite:///{folder / 'jobs.sqlite'}",
        folder / "cache.sqlite",
        first_schedule_processes=processes,
        first_schedule_s=SOON_S,
    )
    database = Database(settings.database)
    caches, tenants = TenantCaches(settings, database), itertools.count()
    desk = FirstSchedules(settings, caches)
    try:
        yield lambda: Office(desk, caches, f"tenant{next(tenants)}", folder / "log")
    finally:
        desk.close()
        database.close()


@contextmanager
def odd(folder: Path, processes: int = 1) -> Iterator[Callable[[], Office]]:
    """A desk with makers that do what the method says; afterwards none of their processes is left."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        patched.setenv("ODD_FIRST_PROCESS_LOG", str(folder / "log"))
        patched.setattr(optpipe_server.first_schedule_process, "MODULE", "support.odd_first_process")
        with opened(folder, processes) as office:
            yield office
        assert started_with(str(folder / "log")) == []


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Office]]:
    with odd(tmp_path_factory.mktemp("odd")) as office:
        yield office


@pytest.fixture
def office(desk: Callable[[], Office]) -> Office:
    return desk()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Office]:
    """A desk that no other test uses."""
    with odd(tmp_path, processes=2) as office:
        yield office()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    with opened(tmp_path_factory.mktemp("real")) as office:
        yield office()


@given(problem=problems(beyond=True), memory=st.sampled_from([0.5, 1.0, 1.5, 3.0, 100.0]))
@settings(max_examples=12)
def test_first_schedules_are_valid_or_infeasible_for_the_solvers_reason(real, problem, memory):
    problem = problem.with_memory_for(memory)
    start, reason = real.start(problem, "auto"), infeasibility(problem)
    assert start.best.reason == reason
    assert (start.state == "infeasible") == (start.best.schedule is None) == bool(reason)
    assert start.source in ("heuristic", "cache")
    if start.best.schedule:
        assert start.best.lower_bound_ms <= start.best.objective_ms * (1 + 1e-9)
        assert (start.best.status == "optimal") == (start.state == "done") == (start.best.gap <= 1e-9)


@pytest.mark.parametrize("method", ["nope", "1f1b:group=2", "dualpipe", "interleaved"])
def test_a_method_that_does_not_apply_is_refused_even_if_an_answer_is_cached(real, method):
    best = gpipe(AMPLE)
    real.cache.add(best, "optimal", best.makespan_ms)
    with pytest.raises(InputError, match=r"method = |needs "):
        real.start(AMPLE, method)


def test_a_schedule_that_no_longer_fits_is_repaired(real):
    start = real.start(TIGHT, "naive", warm_start=gpipe(AMPLE))
    assert start.best.schedule is not None
    assert start.source == "heuristic"


def test_a_proven_cached_answer_needs_no_process(office):
    best = gpipe(AMPLE)
    office.cache.add(best, "optimal", best.makespan_ms)
    before = office.asked()
    start = office.start(AMPLE, "auto")
    assert (start.source, start.state, start.best.objective_ms) == ("cache", "done", best.makespan_ms)
    assert office.asked() == before


def test_a_cached_schedule_without_proof_is_the_initial_result(office):
    office.cache.add(gpipe(AMPLE), "feasible", 1.0)
    start = office.start(AMPLE)
    assert (start.source, start.state, start.best.lower_bound_ms) == ("cache", "queued", 1.0)


def test_a_cached_schedule_of_a_similar_problem_is_the_initial_result(office):
    office.cache.add(gpipe(AMPLE), "optimal", gpipe(AMPLE).makespan_ms)
    start = office.start(chain(memory=2, forward=1.01))
    assert (start.source, start.state, start.best.lower_bound_ms) == ("cache", "queued", None)


def test_an_unusable_cache_is_ignored(tmp_path):
    with odd(tmp_path) as desk:
        (tmp_path / "cache.sqlite").write_bytes(b"no database" * 100)
        start = desk().first_schedules.find(LOCAL, TIGHT, "good", "makespan", None)
    assert start.best.schedule


def test_the_best_of_all_sources_wins(office):
    assert office.start(AMPLE, warm_start=gpipe(AMPLE)).source == "warm_start"
    assert office.start(AMPLE, warm_start=one_by_one(AMPLE)).source == "warm_start"  # as short as the maker's
    assert office.start(TIGHT, warm_start=gpipe(AMPLE)).source == "heuristic"  # does not fit
    assert office.start(AMPLE, warm_start=one_by_one(chain(m=3))).source == "heuristic"  # of another problem
    office.cache.add(gpipe(AMPLE), "feasible")
    assert office.start(AMPLE, warm_start=one_by_one(AMPLE)).source == "cache"


def test_drifted_costs_carry_the_best_over(office):
    drifted = chain(memory=2, forward=1.5)
    start = office.find_after_change(drifted, gpipe(AMPLE))
    assert start.source == "carried"
    assert start.best.schedule is not None
    assert start.best.schedule.problem is drifted
    assert start.best.objective_ms == gpipe(drifted).makespan_ms
    assert office.find_after_change(TIGHT, gpipe(AMPLE)).source == "heuristic"
    assert office.find_after_change(TIGHT, None).source == "heuristic"


def test_a_refused_request_is_an_input_error(office):
    with pytest.raises(InputError, match="there are others"):
        office.start(method="unknown")
    assert office.start().best.schedule


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
        "nothing",
    ],
)
def test_a_process_without_a_valid_schedule_gives_none(office, method):
    start = office.start(method=method)
    assert start.best.schedule is None
    assert start.state == ("infeasible" if method == "infeasible" else "queued")
    assert office.start().best.schedule
    assert office.asked()[-1][1] == "good"


@pytest.mark.parametrize("method", ["first good, then greedy", "infeasible, but", "boaster", "dies late"])
def test_valid_schedules_count_whatever_else_the_process_writes(office, method):
    start = office.start(method=method)
    assert start.best.objective_ms == one_by_one(TIGHT).makespan_ms
    assert (start.state, start.best.status, start.best.lower_bound_ms) == ("queued", "feasible", None)


def test_a_bound_above_a_schedule_proves_nothing(office):
    office.cache.add(one_by_one(TIGHT), "feasible")
    assert office.start(method="boaster").state == "queued"


@pytest.mark.parametrize("method", ["hangs", "silent", "endless"])
def test_a_late_process_is_ended_with_its_children(office, monkeypatch, method):
    office.start()
    before = len(office.asked())
    with monkeypatch.context() as patched:
        patched.setattr(
            office.first_schedules, "_settings", replace(office.first_schedules._settings, first_schedule_s=1.0)
        )
        began = time.monotonic()
        start = office.start(method=method)
        assert 0.9 < time.monotonic() - began < SOON_S
    assert (start.best.schedule is not None) == (method == "hangs")
    ids = {pid for pid, _ in office.asked()[before:]}
    assert len(ids) == (2 if method == "hangs" else 1)
    until = time.monotonic() + SOON_S
    while not all(over(pid) for pid in ids):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert office.start().best.schedule


def test_frames_after_the_end_are_ignored(office):
    office.start(method="talks on")
    start = office.start(AMPLE)
    assert start.best.objective_ms == one_by_one(AMPLE).makespan_ms
    assert start.best.lower_bound_ms is None
    assert [method for _, method in office.asked()[-2:]] == ["talks on", "good"]


def test_a_process_that_has_ended_is_replaced(office):
    office.start()
    pid, _ = office.asked()[-1]
    os.kill(pid, signal.SIGKILL)
    assert office.start().best.schedule
    assert office.asked()[-1][0] != pid


def test_many_at_once_each_get_their_own(alone):
    asked = [chain(m=2 + i % 5, scale=1.0 + i) for i in range(40)]
    with ThreadPoolExecutor(16) as pool:
        starts = list(pool.map(alone.start, asked))
    assert [start.best.objective_ms for start in starts] == [one_by_one(problem).makespan_ms for problem in asked]
    assert len({pid for pid, _ in alone.asked()}) <= 2


def test_small_problems_do_not_wait_for_a_large_one_and_close_ends_it(alone, monkeypatch):
    monkeypatch.setattr(optpipe_server.first_schedules, "LARGE", 20)
    with ThreadPoolExecutor(2) as pool:
        large = [pool.submit(alone.start, chain(m=20), "silent") for _ in range(2)]
        alone.until_asked("silent")
        assert alone.start().best.schedule
        assert not any(start.done() for start in large)
        alone.first_schedules.close()
        assert [start.result(SOON_S).best.schedule for start in large] == [None, None]
    assert [method for _, method in alone.asked()].count("silent") == 1  # one large one at a time


def test_close_ends_all_waits(alone):
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(alone.start, TIGHT, "silent") for _ in range(3)]
        alone.until_asked("silent")
        alone.first_schedules.close()
        assert [start.result(SOON_S).best.schedule for start in waiting] == [None] * 3
    assert alone.start().best.schedule is None  # and who comes later
