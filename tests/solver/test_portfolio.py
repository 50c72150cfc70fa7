"""The portfolio: the best of heuristics and engines, each engine's word verified, each engine's fault survived, the
last line in time."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support import problems
from support.frames import bounds, notes, schedules
from support.processes import over, until

import optpipe
from optpipe import InputError, Problem, check
from optpipe.options import SolveOptions
from optpipe.process.child import Child
from optpipe.process.protocol import Bound, Frame, Incumbent, Note, Programs, Refused, Request
from optpipe.results import Result
from optpipe_solver import clock, systems, tuning
from optpipe_solver.bounds import lower_bound
from optpipe_solver.heuristics import STREAMS, generate
from optpipe_solver.portfolio import Portfolio, engine_runs, heuristic_runs, portfolio
from optpipe_solver.tuning import EngineRun

TESTS = Path(__file__).parents[1]
HEURISTICS_SHARE = 0.01  # of the time
PLANNED_S = 19.7 * (1 - HEURISTICS_SHARE) * tuning.COUNTED_SHARE  # of 20 s, for engines on one thread
COSTS = problems.stage((10, 10, 8), (5, 2))
EXAMPLES = TESTS.parent / "examples" / "problems"


def pipeline(devices: int = 4, microbatches: int = 8, memory: int = 20, **changes: Any) -> Problem:
    return problems.pipeline(devices, microbatches, memory, COSTS, p2p_ms=1.0, **changes)


@pytest.fixture
def engines(monkeypatch):
    """Two engines, each behaving as told."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(engine_runs, "ENGINE", "support.fakes.engine")
    monkeypatch.setattr(tuning, "AUTO", (EngineRun("cpsat", 0.5), EngineRun("milp", 0.5)))
    monkeypatch.setattr(tuning, "heuristics_share", lambda problem, seconds: HEURISTICS_SHARE)
    monkeypatch.setattr(tuning, "DESCENT_FAILURES", 10)
    monkeypatch.setattr(Portfolio, "supports", lambda self, engine: True)

    def behave(cpsat: str, milp: str) -> None:
        monkeypatch.setenv("cpsat", cpsat)
        monkeypatch.setenv("milp", milp)

    return behave


def run(problem: Problem, ends: Callable[[Frame], bool] = lambda frame: False, **asked: Any) -> list[Frame]:
    """Search; time is up as soon as `ends` holds for a frame."""
    frames: list[Frame] = []

    def emit(frame: Frame) -> None:
        frames.append(frame)
        if ends(frame):
            search.clock.stop()

    search = Portfolio(Request(problem=problem, **{"time_limit_s": 60.0, "threads": 2, **asked}), emit)
    search.run()
    return frames


def test_incumbents_get_better_and_all_are_valid(engines):
    engines("tells", "tells")
    problem = pipeline()
    frames = run(problem)
    assert frames[0] == Bound(method="trivial", lower_bound_ms=257.0)
    found = schedules(frames, problem)
    values = [schedule.makespan_ms for schedule in found]
    assert values == sorted(values, reverse=True)
    assert values
    assert all(check(problem, schedule) == [] for schedule in found)


def test_engines_start_from_the_best_and_share_threads_and_time(engines):
    engines("tells", "tells")
    beside = notes(run(pipeline(), threads=4, time_limit_s=2000.0))  # so long that a busy machine takes nothing of it
    assert len(beside) == 2
    assert all(text.startswith("start True, threads 2, ") and 1500 < float(text.split()[-1]) < 2000 for text in beside)
    one_by_one = notes(run(pipeline(), threads=1, time_limit_s=20.0))
    assert one_by_one[0].startswith("start True, threads 1, ")
    assert [float(text.split()[-1]) for text in one_by_one] == pytest.approx([PLANNED_S / 2 - tuning.ENGINE_END_S] * 2)


def test_one_thread_and_one_seed_find_the_same_however_busy_the_machine(engines, monkeypatch):
    engines("seed", "tells")
    monkeypatch.setattr(tuning, "OPS_PER_S", 5_000)
    problem = Problem.load(EXAMPLES / "slowlink-8x16.json")
    quiet = run(problem, time_limit_s=200.0, threads=1, seed=2)
    busy = SimpleNamespace(monotonic=lambda: 1.6 * time.monotonic(), thread_time=lambda: 1.6 * time.thread_time())
    monkeypatch.setattr(clock, "time", busy)
    assert run(problem, time_limit_s=200.0, threads=1, seed=2) == quiet
    assert schedules(quiet, problem)


@pytest.mark.parametrize("fault", ["crash", "garbage", "killed"])
def test_an_engine_that_fails_is_told_of_and_the_other_goes_on(engines, fault):
    engines(fault, "good")
    frames = run(pipeline())
    assert any(text.startswith("cpsat failed: ") for text in notes(frames))
    assert any(isinstance(frame, Bound) and frame.method == "good engine" for frame in frames)


def test_an_engine_that_holds_too_much_is_ended(engines):
    engines("holds 300", "tells")
    own = psutil.Process().memory_info().rss // 2**20
    frames = run(pipeline(), memory_mib=own + 400)  # what two interpreters hold, but not 300 MiB more
    (told,) = (text for text in notes(frames) if "memory_mib" in text)
    assert told.startswith("cpsat was ended: the solver's processes held ")
    assert told.endswith(f"and memory_mib is {own + 400}")
    assert schedules(frames, pipeline())


def test_runs_repeat_with_another_seed_but_not_after_a_failure(engines, monkeypatch):
    engines("seed 8.0", "crash")  # of what it is given it spends most
    monkeypatch.setattr(tuning, "AUTO", (EngineRun("cpsat", 0.2, repeat=True), EngineRun("milp", 0.1, repeat=True)))
    told = notes(run(pipeline(), seed=5, time_limit_s=80.0, threads=1))
    assert sum(text.startswith("milp failed") for text in told) == 1
    seeds = [int(text.split()[-1]) for text in told if "seed" in text]
    assert len(seeds) > 2
    assert len(set(seeds)) == len(seeds)


def test_what_an_engine_does_not_use_is_left_to_the_next(engines):
    engines("spends 1.0", "tells")
    after = notes(run(pipeline(), threads=1, time_limit_s=20.0))
    left_s = PLANNED_S - (1.0 + tuning.ENGINE_END_S)  # of all that is planned for engines
    assert float(after[0].split()[-1]) == pytest.approx(left_s - tuning.ENGINE_END_S)


def test_what_an_engine_started_ends_with_it(engines):
    engines("parent", "tells")
    frames = run(pipeline(), lambda frame: isinstance(frame, Note) and frame.text.isdigit())
    pid = int(next(text for text in notes(frames) if text.isdigit()))
    until(lambda: over(pid), within_s=60)


@pytest.mark.parametrize("method", ["lns", "auto"])
def test_cancelled_while_engines_compute_nothing_is_left_but_the_best(method):
    search = optpipe.improve(
        Problem.load(EXAMPLES / "fastlink-8x16.json"), method=method, time_limit_s=3600.0, threads=2
    )
    assert next(search).schedule is not None
    solver = psutil.Process(search._child.pid)
    # Past its imports: at work in native code.
    until(lambda: any(child.cpu_times().user > 1.5 for child in solver.children()))
    family = [solver, *solver.children(recursive=True)]
    threading.Timer(0.1, search.cancel).start()
    began = time.monotonic()
    *_, last = search
    assert time.monotonic() - began < 60  # a second on a quiet machine
    assert last.status == "feasible"
    assert check(last.schedule.problem, last.schedule) == []
    assert last.notes == ()
    until(lambda: all(over(process.pid) for process in family), within_s=60)


def test_what_an_engine_claims_is_verified(engines):
    engines("invalid", "boastful")
    frames = run(pipeline())
    assert not any(isinstance(frame, Incumbent) and frame.method == "bad engine" for frame in frames)
    rejected = [text for text in notes(frames) if "rejected" in text]
    assert len(rejected) == 2
    assert "0F0" in rejected[0]
    assert "'what?'" in rejected[1]
    assert any("milp claims a bound of 1000000.0 ms" in text for text in notes(frames))
    assert max(bounds(frames)) == lower_bound(pipeline())


@pytest.mark.parametrize("devices", [4, 1])
def test_a_slow_engine_is_stopped_in_time_or_when_the_bound_is_reached(engines, devices):
    """With one device the first schedule is optimal."""
    engines("slow", "slow")
    began = time.monotonic()
    frames = run(
        pipeline(devices), lambda frame: isinstance(frame, Note) and frame.text == "asleep", time_limit_s=500.0
    )
    assert time.monotonic() - began < 200.0  # not the engine's ten minutes
    assert schedules(frames, pipeline(devices))


def test_a_warm_start_is_the_first_incumbent_if_it_is_a_schedule_of_this_problem(engines):
    engines("tells", "tells")
    problem = pipeline()
    best = generate("adaoffload", problem)
    frames = run(problem, warm_start=Programs.from_schedule(best), method="naive")
    assert [schedule.method for schedule in schedules(frames, problem)] == ["adaoffload"]
    stale = run(
        problem, warm_start=Programs.from_schedule(generate("adaoffload", pipeline(microbatches=9))), method="naive"
    )
    assert any(text.startswith("the warm start is no schedule of this problem: ") for text in notes(stale))
    assert [schedule.method for schedule in schedules(stale, problem)] == ["naive"]


def test_only_the_method_named_runs(engines):
    engines("crash", "tells")
    assert notes(run(pipeline(), method="milp"))[0].startswith("start True")
    for method in ("adaoffload", "1f1b"):
        frames = run(pipeline(), method=method)
        found = schedules(frames, pipeline())
        assert {schedule.method for schedule in found} == {method}
        assert notes(frames) == []
    assert found[-1].programs == systems.generate("1f1b", pipeline()).programs


def test_the_milp_runs_if_it_is_asked_for_though_heuristics_meet_the_bound(engines):
    proven = Problem.load(EXAMPLES / "figure4-4x6.json")
    engines("tells", "tells")
    assert notes(run(proven, method="milp"))[0].startswith("start True")
    assert notes(run(proven, method="cpsat")) == []


def test_a_search_says_how_the_milp_ended():
    told = notes(run(pipeline(2, 2, memory=8), method="milp", solver="highs"))
    assert {text.partition(" after ")[0] for text in told} == {"milp: HiGHS: optimal"}


def test_in_auto_the_milps_schedules_and_bounds_count_and_notes_say_what_it_did(monkeypatch):
    monkeypatch.setattr(tuning, "AUTO", (EngineRun("milp", 1.0),))
    monkeypatch.setattr(tuning, "HEURISTIC", "naive")
    monkeypatch.setattr(heuristic_runs, "variants", lambda problem: iter(()))
    problem = pipeline(2, 2, memory=8)
    frames = run(problem, solver="highs")
    assert [(frame.method, frame.lower_bound_ms) for frame in frames if isinstance(frame, Bound)][-1] == ("milp", 92.0)
    assert [(each.method, each.makespan_ms) for each in schedules(frames, problem)][-1] == ("milp", 92.0)
    (note,) = [frame for frame in frames if isinstance(frame, Note)]
    assert "its own best 92 ms" in note.text
    assert not note.ongoing


def test_an_engine_that_was_asked_for_and_has_nothing_shorter_is_named(engines):
    engines("tells", "tells")
    text = "cpsat has no schedule that is shorter than the one by zb-h1"
    assert notes(run(pipeline(), method="cpsat"))[-1] == text
    assert text not in notes(run(pipeline()))


def test_in_auto_a_schedule_of_the_milp_that_is_no_shorter_changes_nothing(monkeypatch):
    """Who asks for the MILP sees its own; else what came first stays."""
    problem, each = pipeline(2, 2, memory=8), []
    schedule = generate("adaoffload", problem)
    for method in ("auto", "milp"):
        keeper = portfolio.incumbents_of(Request(problem=problem, method=method), each.append)
        for found in (schedule, replace(schedule, method="milp")):
            assert keeper.offer(found) is None
        assert keeper.best is not None
        assert keeper.best.method == {"auto": "adaoffload"}.get(method, "milp")


@pytest.mark.parametrize(("method", "made"), [("dispatch", 1), ("naive", 5)])
def test_heuristics_make_one_schedule_after_a_search_in_which_an_engine_was_best(engines, monkeypatch, method, made):
    engines("tells", "tells")
    problem, times = pipeline(), []
    best = replace(generate("adaoffload", problem), method=method)

    def counted(problem, objective, clock):
        for _ in range(5):
            times.append(1)
            yield best

    monkeypatch.setitem(STREAMS, "adaoffload", counted)
    monkeypatch.setattr(heuristic_runs, "variants", lambda problem: iter(()))
    request = Request(problem=problem, time_limit_s=60.0, threads=1)
    keeper = portfolio.incumbents_of(request, lambda frame: None)
    keeper.offer(best)
    Portfolio(request, lambda frame: None, keeper).run()
    assert len(times) == made


def test_a_heuristic_that_does_not_fit_or_fails_is_told_of(engines, monkeypatch):
    engines("tells", "tells")
    frames = run(pipeline(memory=15), method="1f1b")
    assert notes(frames) == ["1f1b gives no schedule: device 0 needs 20 B during 0F3 and has 15 B"]

    def broken(problem, objective, clock):
        raise ZeroDivisionError("oh")
        yield

    monkeypatch.setitem(STREAMS, "adaoffload", broken)
    frames = run(pipeline())
    assert "adaoffload gives no schedule: ZeroDivisionError: oh" in notes(frames)
    assert schedules(frames, pipeline())


def test_a_named_engine_that_cannot_work_on_the_problem_says_why():
    frames = run(pipeline(microbatches=1), method="dispatch")
    assert notes(frames) == ["dispatch does not apply: with one micro-batch there is nothing to choose"]
    assert schedules(frames, pipeline(microbatches=1))


def test_an_unknown_method_is_one_sentence():
    with pytest.raises(InputError, match=r"^method = 'best': the methods are auto, naive, .*cpsat, .*$"):
        Portfolio(Request(problem=pipeline(), method="best"), print)
    child = Child("optpipe_solver", Request(problem=pipeline(), method="best"))
    (refused,) = child.frames()
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("method = 'best': the methods are auto, ")


def test_a_huge_problem_ends_in_time():
    """Beside its two seconds it starts processes, and makes, sends, reads and checks two schedules of half a million
    ops: some seven times one schedule and its check on a quiet machine."""
    problem = pipeline(devices=64, microbatches=4096)

    def one_schedule_s() -> float:
        began = time.monotonic()
        assert check(problem, generate("naive", problem)) == []
        return time.monotonic() - began

    before_s, began = one_schedule_s(), time.monotonic()
    result = optpipe.solve(problem, time_limit_s=2.0)
    took_s = time.monotonic() - began
    assert took_s < 2.0 + 20 * (before_s + one_schedule_s())
    assert result.status == "feasible" or result.reason == "no schedule was found before the search ended"
    assert not any("exit code" in note for note in result.notes)


@pytest.mark.parametrize("placements", ["keep", "all"])
def test_work_that_takes_no_time_is_proven_to_take_none(placements):
    problem = problems.pipeline(2, 3, 20, problems.stage((0, 0, 0), (5, 2)))
    result = optpipe.solve(problem, time_limit_s=20, placements=placements)
    assert (result.status, result.makespan_ms, result.lower_bound_ms) == ("optimal", 0.0, 0.0)


UNEVEN = problems.pipeline(
    4, 8, 100, [problems.stage(ms, (1, 0)) for ms in ((60.0, 0.0, 0.0), *[(10.0, 10.0, 0.0)] * 3)], p2p_ms=0.0
)


def test_beside_its_answer_a_search_names_the_best_published_schedule_on_other_stages() -> None:
    """Through every door in one sentence, with the figures for programs."""
    *earlier, result = optpipe.improve(UNEVEN, time_limit_s=0.5, threads=1)
    assert [each.advice for each in earlier] == [None] * len(earlier) != [], "it is said once"
    schedule = result.other_stages
    assert (schedule.method, check(schedule.problem, schedule)) == ("dualpipe-v", [])
    assert schedule.programs == systems.generate("dualpipe-v", UNEVEN, "all").programs
    less = 1 - schedule.makespan_ms / result.makespan_ms
    assert result.advice == (
        f"on other stages, which placements = all searches, dualpipe-v takes {schedule.makespan_ms:.6g} ms, "
        f"{less:.1%} less, with 2 chunks a device, V-shaped"
    )
    assert str(result).endswith(f"; {result.advice}")
    assert result.explanation == result.advice
    figures = result.to_dict()
    assert figures["advice"] == result.advice
    assert figures["other_stages"] == {
        "method": "dualpipe-v", "value_ms": schedule.makespan_ms, "placement": {"chunks": 2, "shape": "v"}
    }  # fmt: skip
    tied = Result.from_schedule(schedule, SolveOptions(placements="keep"))
    assert replace(tied, other_stages=schedule).advice == (
        "on other stages, which placements = all searches, no published schedule that was tried is shorter "
        f"(dualpipe-v: {schedule.makespan_ms:.6g} ms)"
    )
    assert replace(result, placements="all").advice is None


@pytest.mark.parametrize(("placements", "text"), [("keep", "the stages as given"), ("all", "all stages")])
def test_an_optimum_says_of_which_stages(placements: str, text: str) -> None:
    schedule = systems.generate("1f1b", UNEVEN)
    options = SolveOptions.from_arguments("test", {"placements": placements})
    assert f"proven optimal for {text}" in str(Result.from_schedule(schedule, options, schedule.makespan_ms))
