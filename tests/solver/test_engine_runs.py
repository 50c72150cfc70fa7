"""Which engine runs when, from which schedule, how long and with how many threads; when one does not run again; their
table. One clock for a search and its parts: by the wall, or by counted work with the wall as a backstop."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from types import NoneType, SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
import pytest
from support.problems.chain import chain
from support.processes import over, until

from optpipe import Problem, Schedule
from optpipe.model.rules import Rules
from optpipe.process.child import Child
from optpipe.process.protocol import End, Incumbent, Programs, Ready, Request
from optpipe_solver import clock, engines, systems, tuning
from optpipe_solver.clock import Clock, counts_work
from optpipe_solver.heuristics import generate
from optpipe_solver.methods import ENGINES, HEURISTICS
from optpipe_solver.portfolio import engine_runs as engine_runs_module
from optpipe_solver.portfolio.engine_runs import EngineProcess, EngineProcesses, EngineRuns
from optpipe_solver.portfolio.portfolio import incumbents_of
from optpipe_solver.tuning import EngineRun, engine_runs

PROBLEM: Problem = chain(m=6)
NAIVE, BETTER = generate("naive", PROBLEM), generate("adaoffload", PROBLEM)
LNS = EngineRun("lns")
TABLE = [EngineRun("cpsat"), EngineRun("lns", repeat=True), EngineRun("dispatch", repeat=True)]
BETTER_IS_FOUND = Incumbent(method="x", schedule=Programs.from_schedule(BETTER))


class Started(NamedTuple):
    """An engine that was started."""

    engine: str
    threads: int
    time_limit_s: float
    start: Schedule | None
    deadline: float
    allotted_s: float


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """The engines that are started, without their processes."""
    each: list[Started] = []

    def start(
        self: EngineProcesses, asked: Request, start: Schedule | None, deadline: float, allotted_s: float
    ) -> None:
        each.append(Started(asked.method, asked.threads, asked.time_limit_s, start, deadline, allotted_s))

    monkeypatch.setattr(EngineProcesses, "start", start)
    return each


def searching(planned: list[EngineRun], best: Schedule | None = NAIVE, **asked: object) -> EngineRuns:
    """The engine runs of a search that has a schedule."""
    request = Request.model_validate({"problem": PROBLEM, "threads": 2, "time_limit_s": 1000.0, **asked})
    incumbents = incumbents_of(request, lambda frame: None)
    if best:
        assert incumbents.offer(best) is None
    clock = Clock(request.time_limit_s, counts_work(request), wall_s=request.time_limit_s)
    return EngineRuns(request, planned, incumbents, clock, lambda frame: None)


def process(engine: str = "lns", start: Schedule | None = None, spent_s: float = 9.0) -> EngineProcess:
    """One that has used so much of its ten seconds, by its own count."""
    return EngineProcess(engine, cast(Child, None), 1, start, time.monotonic() + 60, 10.0, spent_s=spent_s)


def test_a_run_starts_from_the_best_whoever_found_it(started: list[Started]) -> None:
    runs, by_engine = searching([]), replace(BETTER, method="dispatch")
    for _ in range(2):
        runs.start(LNS, 5.0, 1)
        assert runs._incumbents.offer(by_engine) is None
    assert [engine.start for engine in started] == [NAIVE, by_engine]


def test_what_is_better_and_has_no_rules_gets_those_of_the_best() -> None:
    each = np.zeros((2, 6), dtype=int)
    rules = Rules(np.array([1, 1]), np.zeros((2, 2)), each - 1, each, np.zeros(2), np.arange(6))
    best = systems.generate("zb-h1", PROBLEM)
    assert NAIVE.makespan_ms > BETTER.makespan_ms > best.makespan_ms
    runs = searching([], replace(BETTER, rules=rules))
    runs.handle(process(), Incumbent(method="lns", schedule=Programs.from_schedule(best)))
    assert runs._incumbents.best.makespan_ms == best.makespan_ms
    assert runs._incumbents.best.rules is rules


def test_an_engine_has_a_second_at_least(started: list[Started]) -> None:
    """A small share of a short time would be over before the engine has started."""
    for share in (0.001, 0.5):
        planned = [EngineRun("lns", share), EngineRun("lns", repeat=True)]
        searching(planned, time_limit_s=60.0).start_next(beside_heuristics=True)
    assert started[0].allotted_s == tuning.ENGINE_LEAST_S < 20.0 < started[1].allotted_s


@pytest.mark.parametrize(("threads", "order"), [(1, ["dispatch"]), (2, ["lns", "dispatch"])])
def test_engines_that_must_compile_let_another_begin(
    threads: int, order: list[str], started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thread the order is always the same, and with it the answer."""
    monkeypatch.setattr(engines, "waits_for_compiler", lambda name: name == "dispatch")
    searching([EngineRun("dispatch", 0.1), EngineRun("lns", 0.1)], threads=threads).start_next(beside_heuristics=False)
    assert [engine.engine for engine in started] == order


@pytest.mark.parametrize(("threads", "order"), [(1, ["lns"]), (2, ["lns", "cpsat"])])
def test_engines_that_another_process_compiles_wait_for_it(
    threads: int, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: EngineProcesses, asked: Request, start: Schedule | None, *_: float) -> None:
        self.running.append(SimpleNamespace(engine=asked.method, threads=asked.threads, start=start))

    monkeypatch.setattr(EngineProcesses, "start", start)
    monkeypatch.setattr(engine_runs_module, "compiles_elsewhere", lambda: True)
    monkeypatch.setattr(engines, "waits_for_compiler", lambda name: name in ("dispatch", "relax"))
    planned = [EngineRun(name, 0.1) for name in ("dispatch", "lns", "relax", "cpsat")]
    runs = searching(planned, threads=threads)
    runs.start_next(beside_heuristics=False)
    assert [process.engine for process in runs._processes.running] == order
    alone = searching(planned[:1], threads=threads)  # nothing else runs: it does not wait
    alone.start_next(beside_heuristics=False)
    assert [process.engine for process in alone._processes.running] == ["dispatch"]


@pytest.mark.parametrize("threads", [1, 2])
def test_where_the_clock_counts_open_ended_engines_make_no_end(threads: int, started: list[Started]) -> None:
    """`cpsat` plans its time; with one thread work is counted, and all engines end by their count."""
    runs = searching([], threads=threads)
    for run in (*TABLE, EngineRun("relax")):
        runs.start(run, 10.0, 1)
    planned_s = 10.0 - tuning.ENGINE_END_S
    open_ended_s = planned_s if threads == 1 else tuning.NO_LIMIT_S
    assert [engine.time_limit_s for engine in started] == [planned_s, *[open_ended_s] * 3]
    assert all(engine.deadline > time.monotonic() + engine.allotted_s / 2 for engine in started)


@pytest.mark.parametrize(
    ("threads", "shared"),
    [
        (1, {"dispatch": 1}),
        (2, {"dispatch": 1, "relax": 1}),
        (8, {"dispatch": 1, "relax": 1, "cpsat": 6}),
        (16, {"dispatch": 1, "relax": 1, "cpsat": 5, "lns": 5, "milp": 4}),
    ],
)
def test_what_an_engine_cannot_use_others_have(threads: int, shared: dict[str, int], started: list[Started]) -> None:
    table = [EngineRun(name) for name in ("dispatch", "relax", "cpsat", "lns", "milp")]
    searching(table, None, threads=threads).start_next(beside_heuristics=False)
    assert {engine.engine: engine.threads for engine in started} == shared
    assert sum(shared.values()) == threads


@pytest.mark.parametrize(("best", "following"), [(NAIVE, ["cpsat", "dispatch"]), (BETTER, ["cpsat", "lns"])])
def test_an_engine_that_gained_runs_again(best: Schedule, following: list[str], started: list[Started]) -> None:
    """With one thread, where shares are counted; after those that do not repeat."""
    runs = searching(list(TABLE), best, threads=1)
    ended = process("dispatch")
    for message in (BETTER_IS_FOUND, None):
        runs.handle(ended, message)
    for _ in following:
        runs.start_next(beside_heuristics=False)
    assert [engine.engine for engine in started] == following


@pytest.mark.parametrize(("best", "more_s"), [(NAIVE, 10.0), (BETTER, 4.0)])
def test_an_engine_goes_on_while_it_gains(best: Schedule, more_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its share again from its last gain on; it has used six of its ten seconds."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    runs, under_way = searching(list(TABLE), best), process("dispatch")
    under_way.deadline = 104.0
    runs.handle(under_way, BETTER_IS_FOUND)
    assert under_way.deadline == 100.0 + more_s


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[EngineRuns, float], tuple[EngineProcess, list[str]]]:
    """An engine that is stopped at 110 s by a clock that stands at 100 s; and what its process is sent."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)

    def begin(runs: EngineRuns, deadline: float) -> tuple[EngineProcess, list[str]]:
        sent: list[str] = []
        fake = SimpleNamespace(end_soon=lambda: sent.append("end"), stop=lambda: sent.append("kill"))
        engine = EngineProcess("dispatch", cast(Child, fake), 1, None, deadline, 10.0)
        runs._processes.running.append(engine)
        return engine, sent

    return begin


def test_an_engine_whose_time_is_up_is_asked_to_end_and_killed_if_it_does_not(under_way, monkeypatch) -> None:
    runs, passed = searching([]), tuning.ENGINE_END_S
    engine, sent = under_way(runs, 110.0)
    told = []
    for now in (110.0, 110.1, 110.2, 110.1 + passed, 110.2 + passed):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        runs.handle_messages()
        told.append((list(sent), engine.asked_to_end, engine.killed))
    assert told == [([], False, False), *[(["end"], True, False)] * 2, *[(["end", "kill"], True, True)] * 2]


def test_where_no_time_is_left_for_another_engine_one_searches_to_the_end(under_way, monkeypatch) -> None:
    runs = searching([], time_limit_s=10.0)
    engine, sent = under_way(runs, 110.0)
    for now, expected in ((110.0, []), (110.1, ["kill"])):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        runs.handle_messages()
        assert sent == expected
    assert not engine.asked_to_end


def test_what_an_engine_has_sent_counts_before_its_time_is_up(under_way, monkeypatch) -> None:
    """Which a heuristic that took long let nobody see; and what it sends when it is asked to end gains it no time."""
    runs = searching([])
    engine, sent = under_way(runs, 110.0)
    runs._processes._inbox.put((engine, BETTER_IS_FOUND))
    monkeypatch.setattr(time, "monotonic", lambda: 112.0)
    runs.handle_messages()
    assert (sent, engine.deadline) == ([], 122.0)
    monkeypatch.setattr(time, "monotonic", lambda: 122.1)
    runs.handle_messages()
    best = Incumbent(method="x", schedule=Programs.from_schedule(systems.generate("zb-h1", PROBLEM)))
    runs.handle(engine, best)
    assert runs._incumbents.best.method == "x"
    assert (sent, engine.deadline) == (["end"], 122.0 + tuning.ENGINE_END_S)


def test_a_process_that_died_while_it_waited_is_passed_over() -> None:
    processes = EngineProcesses()
    processes.prepare()
    (dead,) = processes.waiting
    os.kill(dead.pid, signal.SIGKILL)
    until(lambda: not dead.waits)
    processes.start(Request(problem=PROBLEM, method="dispatch", time_limit_s=0.1), NAIVE, time.monotonic() + 600, 600.0)
    messages: list[object] = []
    while processes.running:
        messages += [message for _, message in processes.messages(1.0)]
    assert [type(message) for message in messages[-2:]] == [End, NoneType]
    (alive,) = processes.waiting
    assert alive.waits
    processes.end_waiting()
    assert over(alive.pid)


def test_engines_follow_each_other_in_one_process_but_for_what_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Child] = []

    class Counted(Child):
        def __init__(self, module: str, request: Request) -> None:
            super().__init__(module, request)
            started.append(self)

    monkeypatch.setattr(engine_runs_module, "Child", Counted)
    planned = [EngineRun(name, 0.002) for name in ("dispatch", "anneal", "milp", "relax", "cpsat")]
    runs = searching(planned, threads=1)
    ran: list[tuple[str, Child]] = []
    while runs._planned or runs.running:
        runs.start_next(beside_heuristics=False)
        ran += [(each.engine, each.child) for each in runs._processes.running if each.engine not in dict(ran)]
        runs.handle_messages(0.1)
    shared, alone = started
    assert ran == [(run.engine, alone if run.engine == "milp" else shared) for run in planned]
    assert shared.waits
    runs.stop_all()
    assert over(shared.pid)


def test_a_process_that_waits_is_ended_before_an_engine_holds_too_much() -> None:
    ended: list[str] = []
    runs, under_way = searching([], memory_mib=64), process()  # this process alone holds more
    under_way.child = cast(Child, SimpleNamespace(mark="/none/", stop=lambda: ended.append("an engine")))
    runs._processes.running.append(under_way)
    runs._processes.waiting.append(cast(Child, SimpleNamespace(mark="/none/", close=lambda: ended.append("waits"))))
    runs.limit_memory()
    assert ended == ["waits"]
    runs.limit_memory()
    assert ended == ["waits", "an engine"]


def test_an_engine_that_ended_early_runs_again_only_from_another_schedule() -> None:
    runs = searching([])
    assert runs.may_gain(LNS)
    runs.handle(process("lns", NAIVE, spent_s=1.0), None)
    assert not runs.may_gain(LNS)
    assert runs.may_gain(EngineRun("cpsat"))
    by_engine = replace(BETTER, method="dispatch")
    runs._incumbents.offer(by_engine)
    assert runs.may_gain(LNS)
    runs.handle(process("lns", by_engine, spent_s=1.0), None)
    assert not runs.may_gain(LNS)
    used_up = searching([])
    used_up.handle(process("lns", NAIVE, spent_s=9.0), None)
    stopped = process("lns", NAIVE, spent_s=1.0)
    stopped.deadline = engine_runs_module.KILLED
    used_up.handle(stopped, None)
    assert used_up.may_gain(LNS)


def test_heuristics_wait_only_for_an_engine_that_was_started() -> None:
    """One that was asked for by name starts after them."""
    runs, under_way = searching(list(TABLE)), process("lns")
    assert not runs.loading
    runs._processes.running.append(under_way)
    assert runs.loading
    runs.handle(under_way, Ready())
    assert not runs.loading


@pytest.mark.parametrize(("asked", "most"), [({}, tuning.MILP_OPS), ({"milp_ops": 7}, 7), ({"method": "milp"}, None)])
def test_auto_solves_small_problems_whole_by_milp(asked: dict[str, object], most: int | None, monkeypatch) -> None:
    each: list[Request] = []
    monkeypatch.setattr(EngineProcesses, "start", lambda self, request, *_: each.append(request))
    searching([], **asked).start(EngineRun("milp"), 5.0, 1)
    assert [request.milp_ops for request in each] == [most]


TWENTY_FORWARDS = chain(m=10)  # 20 forwards


@pytest.fixture
def auto(monkeypatch):
    def set_to(*rows: EngineRun) -> None:
        monkeypatch.setattr(tuning, "AUTO", rows)

    return set_to


def shares(method: str = "auto", unfit: tuple[str, ...] = ()) -> dict[str, float]:
    return {run.engine: run.share for run in engine_runs(method, TWENTY_FORWARDS, lambda engine: engine not in unfit)}


def test_a_run_that_repeats_fills_the_rest(auto):
    auto(EngineRun("a", 0.3), EngineRun("b", 0.2, max_forwards=19), EngineRun("c", 0.1, repeat=True))
    assert shares() == {"a": 0.3, "c": 0.1}


def test_otherwise_all_time_is_shared(auto):
    auto(EngineRun("a", 0.3), EngineRun("b", 0.2, max_forwards=20), EngineRun("c", 0.1, repeat=True))
    assert shares(unfit=("c",)) == {"a": pytest.approx(0.6), "b": pytest.approx(0.4)}
    assert shares(unfit=("a", "b", "c")) == {}
    assert shares(unfit=("a", "b")) == {"c": 0.1}


def test_a_method_that_is_named_has_the_time_to_itself():
    assert all(shares(engine) == {engine: 1.0} for engine in ENGINES)
    assert all(shares(engine, unfit=ENGINES) == {} for engine in ENGINES)
    assert all(shares(heuristic) == {} for heuristic in HEURISTICS)


def test_the_table_itself_fits_the_time():
    assert {run.engine for run in tuning.AUTO} == {*ENGINES}
    assert sum(run.share for run in tuning.AUTO) <= 1.0  # runs that repeat fill the rest


@pytest.mark.parametrize("factor", [None, 0.8])
def test_heuristics_have_time_beyond_one_schedule_only_for_what_no_engine_knows(factor: float | None) -> None:
    problem = PROBLEM.replace(overlap_factor=factor)
    shares = [tuning.heuristics_share(problem, seconds) for seconds in (60.0, 5.0, 0.5)]
    assert shares == ([0.0, 0.0, 0.0] if factor is None else [tuning.HEURISTICS_SHARE, tuning.HEURISTICS_S / 5, 0.5])


def test_what_needs_more_time_than_its_share_is_left_out() -> None:
    planned = [EngineRun("cpsat", 0.1, least_s=9.0), LNS]
    assert [searching(planned, time_limit_s=seconds)._planned == planned for seconds in (100.0, 10.0)] == [True, False]
    assert searching(planned, time_limit_s=10.0)._planned == [LNS]


# The clock


@pytest.fixture
def passes(monkeypatch):
    """Lets seconds of wall time pass; none passes otherwise."""
    now = [100.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def pass_(seconds: float) -> None:
        now[0] += seconds

    return pass_


def test_by_the_wall_work_is_not_counted(passes):
    whole = Clock.for_request(Request(problem=chain(), time_limit_s=10.0, threads=2))
    whole.spend(9.0)
    assert (whole.left_s, whole.spent_s, whole.over) == (10.0, None, False)
    passes(4.0)
    part = whole.share(0.5)
    assert (whole.left_s, whole.passed_s, part.left_s, whole.share(0.7).left_s) == (6.0, 4.0, 5.0, 6.0)
    passes(5.0)
    assert (part.over, whole.over, part.left_s) == (True, False, 0.0)
    assert whole.moment(0.5) - 109.0 == 0.5
    assert whole.moment(5.0) == whole.until


def test_counted_work_is_what_ends_it_unless_the_wall_takes_much_longer(passes):
    whole = Clock.for_request(Request(problem=chain(), time_limit_s=10.0, threads=1))
    whole.count(2 * tuning.OPS_PER_S)
    whole.count(30, ops_per_s=10)
    assert (whole.left_s, whole.spent_s) == (5.0, 5.0)
    part = whole.share(0.1)
    passes(10.0 * tuning.COUNTED_TIMEOUT - 0.5)
    assert (whole.left_s, part.left_s, part.wall_left_s) == (5.0, 1.0, 0.5), "a busy machine changes nothing"
    part.spend(1.0)
    assert part.over
    assert not whole.over
    passes(0.5)
    assert (whole.over, whole.left_s, whole.spent_s) == (True, 0.0, 5.0)


def test_without_end_it_is_never_over():
    assert Clock().until > time.monotonic() + 1e9
    assert not Clock().over
