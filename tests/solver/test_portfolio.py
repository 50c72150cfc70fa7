"""The portfolio: the best of heuristics and engines, each engine's word verified, each engine's fault survived, the
last line in time."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import optpipe
from optpipe import Device, InputError, Problem, Stage, check
from optpipe.model.placement import rechunk
from optpipe.process.child import Child
from optpipe.process.protocol import Bound, Incumbent, Infeasible, Note, Programs, Refused, Request
from optpipe_solver import crew, plan, portfolio, systems
from optpipe_solver.heuristics import generate
from optpipe_solver.portfolio import LARGE, Portfolio

TESTS = Path(__file__).parents[1]
PLANNED = (1 - plan.heuristics_share(19.7)) * plan.COUNTED_SHARE  # of the time of 20 s, for engines on one thread
EXAMPLES = TESTS.parent / "examples" / "problems"


def pipeline(devices: int = 4, microbatches: int = 8, memory: int = 20, **changes: object) -> Problem:
    costs = {
        "forward_ms": 10.0,
        "backward_input_ms": 10.0,
        "backward_weight_ms": 8.0,
        "activation_bytes": 5,
        "saved_for_weight_bytes": 2,
    }
    return Problem(
        microbatches=microbatches,
        p2p_ms=1.0,
        devices=[Device(activation_budget_bytes=memory)] * devices,
        stages=[Stage(device=d, **costs) for d in range(devices)],
        **changes,
    )


@pytest.fixture
def engines(monkeypatch):
    """Two engines, each behaving as told."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(crew, "ENGINE", "support.fake_engine")
    monkeypatch.setattr(plan, "AUTO", (plan.Turn("cyclic", 0.5), plan.Turn("milp", 0.5)))
    monkeypatch.setattr(Portfolio, "applies", lambda self, engine: True)

    def behave(cyclic: str, milp: str) -> None:
        monkeypatch.setenv("cyclic", cyclic)
        monkeypatch.setenv("milp", milp)

    return behave


def run(problem: Problem, **asked: object) -> list[object]:
    frames: list[object] = []
    Portfolio(Request(problem=problem, **{"time_limit_s": 10.0, "threads": 2, **asked}), frames.append).run()
    return frames


def notes(frames: list[object]) -> list[str]:
    return [frame.text for frame in frames if isinstance(frame, Note)]


def test_incumbents_get_better_and_all_are_valid(engines):
    engines("tells", "tells")
    problem = pipeline()
    frames = run(problem)
    assert frames[0] == Bound(method="trivial", lower_bound_ms=257.0)
    found = [frame.schedule.schedule(problem, frame.method) for frame in frames if isinstance(frame, Incumbent)]
    values = [schedule.makespan_ms for schedule in found]
    assert values == sorted(values, reverse=True)
    assert values
    assert all(check(problem, schedule) == [] for schedule in found)


@pytest.mark.parametrize(("microbatches", "first"), [(8, "adaoffload"), (LARGE, "naive")])
def test_a_large_problem_gets_a_schedule_before_list_scheduling_takes_its_time(engines, microbatches, first):
    engines("tells", "tells")
    frames = run(pipeline(devices=2, microbatches=microbatches, memory=5), time_limit_s=30.0)
    methods = [frame.method for frame in frames if isinstance(frame, Incumbent)]
    assert methods[0] == first
    assert "adaoffload" in methods


def test_engines_start_from_the_best_and_share_threads_and_time(engines):
    engines("tells", "tells")
    beside = notes(run(pipeline(), threads=4, time_limit_s=20.0))
    assert len(beside) == 2
    assert all(text.startswith("start True, threads 2, ") and 15 < float(text.split()[-1]) < 20 for text in beside)
    one_by_one = notes(run(pipeline(), threads=1, time_limit_s=20.0))
    assert one_by_one[0].startswith("start True, threads 1, ")
    assert [float(text.split()[-1]) for text in one_by_one] == pytest.approx(
        [PLANNED * 19.7 / 2 - 0.5] * 2
    )  # by plan, not by the clock


@pytest.mark.parametrize("fault", ["crash", "garbage", "killed"])
def test_an_engine_that_fails_is_told_of_and_the_other_goes_on(engines, fault):
    engines(fault, "good")
    frames = run(pipeline())
    assert any(text.startswith("cyclic failed: ") for text in notes(frames))
    assert any(isinstance(frame, Bound) and frame.method == "good engine" for frame in frames)


def test_an_engine_that_holds_too_much_is_ended(engines):
    engines("holds 300", "tells")
    own = psutil.Process().memory_info().rss // 2**20
    frames = run(
        pipeline(), memory_mib=own + 400, time_limit_s=6.0
    )  # two interpreters hold less than that, one with 300 MiB more does not
    (told,) = (text for text in notes(frames) if "memory_mib" in text)
    assert told.startswith("cyclic was ended: the solver's processes held ")
    assert told.endswith(f"and memory_mib is {own + 400}")
    assert any(isinstance(frame, Incumbent) for frame in frames)


def test_turns_come_again_with_another_seed_but_not_after_a_failure(engines, monkeypatch):
    engines("seed 2.0", "crash")  # of what it is given it spends most
    monkeypatch.setattr(plan, "AUTO", (plan.Turn("cyclic", 0.2, again=True), plan.Turn("milp", 0.1, again=True)))
    told = notes(run(pipeline(), seed=5, time_limit_s=16.0, threads=1))
    assert sum(text.startswith("milp failed") for text in told) == 1
    seeds = [int(text.split()[-1]) for text in told if "seed" in text]
    assert len(seeds) > 2
    assert len(set(seeds)) == len(seeds)


def test_who_has_nothing_more_to_do_does_not_come_again(engines, monkeypatch):
    engines("seed 0.1", "seed 2.0")
    monkeypatch.setattr(plan, "AUTO", (plan.Turn("cyclic", 0.2, again=True), plan.Turn("milp", 0.2, again=True)))
    told = notes(run(pipeline(), time_limit_s=16.0, threads=1))
    assert sum(text.startswith("cyclic") for text in told) == 1
    assert sum(text.startswith("milp") for text in told) > 2


def test_what_an_engine_does_not_use_is_left_to_the_next(engines):
    engines("spends 1.0", "tells")
    after = notes(run(pipeline(), threads=1, time_limit_s=20.0))
    assert float(after[0].split()[-1]) == pytest.approx(
        PLANNED * 19.7 - 1.5 - 0.5
    )  # of all that is planned for engines


def test_what_an_engine_started_ends_with_it(engines):
    engines("parent", "tells")
    started = next(int(text) for text in notes(run(pipeline(), time_limit_s=6.0)) if text.isdigit())
    assert gone(started)


@pytest.mark.parametrize("method", ["lns", "auto"])
def test_cancelled_while_engines_compute_nothing_is_left_but_the_best(method):
    search = optpipe.improve(Problem.load(EXAMPLES / "fastlink-8x16.json"), method=method, time_limit=60.0, threads=2)
    assert next(search).schedule is not None
    solver = psutil.Process(search._child.pid)
    deadline = time.monotonic() + 60
    while not any(
        child.cpu_times().user > 1.5 for child in solver.children()
    ):  # past its imports: at work in native code
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = [solver, *solver.children(recursive=True)]
    threading.Timer(0.1, search.cancel).start()
    began = time.monotonic()
    *_, last = search
    assert time.monotonic() - began < 10  # a second on a quiet machine
    assert last.status == "feasible"
    assert check(last.schedule.problem, last.schedule) == []
    assert last.notes == ()
    assert all(gone(process.pid) for process in family)


def gone(pid: int) -> bool:
    """Whether it has ended, within moments; whoever inherited it may not have read its exit code yet."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_what_an_engine_claims_is_verified(engines):
    engines("invalid", "boastful")
    frames = run(pipeline())
    assert not any(isinstance(frame, Incumbent) and frame.method == "bad engine" for frame in frames)
    rejected = [text for text in notes(frames) if "rejected" in text]
    assert len(rejected) == 2
    assert "0F0" in rejected[0]
    assert "'what?'" in rejected[1]
    assert any("milp claims a bound of 1000000.0 ms" in text for text in notes(frames))
    assert max(frame.lower_bound_ms for frame in frames if isinstance(frame, Bound)) == 257.0


def test_a_slow_engine_is_stopped_in_time(engines):
    engines("slow", "slow")
    began = time.monotonic()
    frames = run(pipeline(), time_limit_s=3.0)
    assert time.monotonic() - began < 8.0  # not the engine's minute, however busy the machine
    assert any(isinstance(frame, Incumbent) for frame in frames)


def test_it_stops_when_the_bound_is_reached(engines):
    engines("slow", "slow")
    began = time.monotonic()
    frames = run(pipeline(devices=1), time_limit_s=30.0)
    assert time.monotonic() - began < 10.0
    assert isinstance(frames[-1], Incumbent)


def test_a_warm_start_is_the_first_incumbent_if_it_is_a_schedule_of_this_problem(engines):
    engines("tells", "tells")
    problem = pipeline()
    best = generate("zb-auto", problem)
    frames = run(problem, warm_start=Programs.of(best), method="naive")
    assert [frame.method for frame in frames if isinstance(frame, Incumbent)] == ["warm start"]
    stale = run(problem, warm_start=Programs.of(generate("zb-auto", pipeline(microbatches=9))), method="naive")
    assert any(text.startswith("the warm start is no schedule of this problem: ") for text in notes(stale))
    assert [frame.method for frame in stale if isinstance(frame, Incumbent)] == ["naive"]


def test_only_the_method_named_runs(engines):
    engines("crash", "tells")
    assert notes(run(pipeline(), method="milp"))[0].startswith("start True")
    frames = run(pipeline(), method="zb-auto")
    assert {frame.method for frame in frames if isinstance(frame, Incumbent)} == {"zb-auto"}
    assert notes(frames) == []


def test_a_heuristic_that_does_not_fit_or_fails_is_told_of(engines, monkeypatch):
    engines("tells", "tells")
    frames = run(pipeline(memory=15), method="1f1b")
    assert notes(frames) == ["1f1b gives no schedule: device 0 needs 20 bytes during 0F3 and has 15"]

    def broken(problem, objective, deadline):
        raise ZeroDivisionError("oh")
        yield

    monkeypatch.setitem(portfolio.STREAMS, "adaoffload", broken)
    frames = run(pipeline())
    assert "adaoffload gives no schedule: ZeroDivisionError: oh" in notes(frames)
    assert any(isinstance(frame, Incumbent) for frame in frames)


def test_a_system_that_is_named_is_all_that_runs(engines):
    engines("crash", "crash")
    frames = run(pipeline(), method="1f1b")
    (found,) = (frame for frame in frames if isinstance(frame, Incumbent))
    assert found.method == "1f1b"
    assert found.schedule == Programs.of(systems.generate("1f1b", pipeline()))
    assert notes(frames) == []


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (
            "1f1b",
            "1f1b needs one stage a device, all in one row: the problem has other stages (with all placements it "
            "is given them)",
        ),
        ("1f1b:group=2", "method = '1f1b:group=2': 1f1b has no parameter group (its parameters: none)"),
        ("1f1b:", "method = '1f1b:': '' is no parameter, "),
    ],
)
def test_a_system_that_is_not_for_the_stages_is_one_sentence(method, told):
    with pytest.raises(InputError) as raised:
        optpipe.solve(rechunk(pipeline(), 2), method=method, time_limit=20.0)
    assert str(raised.value).startswith(told)


def test_engines_start_from_the_best_that_they_know(engines):
    engines("tells", "tells")
    sizes: dict[str, Any] = {"microbatches": 16, "memory": 40}
    problem = pipeline(overlap_factor=0.7, **sizes)
    search = Portfolio(Request(problem=problem), print)
    split, joined = (generate("zb-auto", one) for one in (pipeline(**sizes), problem))
    apart = replace(split, problem=problem)
    assert joined.makespan_ms < apart.makespan_ms
    for schedule in (joined, apart):
        assert search.offer(schedule) is None
    assert (search.best, search.nominal, search.best_for("lns"), search.best_for("robust")) == (
        joined,
        joined,
        apart,
        joined,
    )


def test_an_engine_that_is_not_for_this_problem_is_told_of(monkeypatch):
    monkeypatch.setattr(Portfolio, "applies", lambda self, engine: False)
    frames = run(pipeline(), method="milp")
    assert notes(frames) == ["milp is not for a problem of this sort or size"]
    assert any(isinstance(frame, Incumbent) for frame in frames)


def test_memory_that_admits_nothing_is_proven():
    assert run(pipeline(memory=4)) == [
        Infeasible(reason="device 0 needs at least 5 bytes for one micro-batch at a time and has 4")
    ]


def test_an_unknown_method_is_one_sentence():
    with pytest.raises(InputError, match=r"^method = 'best': the methods are auto, naive, .*cyclic, .*$"):
        Portfolio(Request(problem=pipeline(), method="best"), print)
    child = Child("optpipe_solver", Request(problem=pipeline(), method="best"))
    (refused,) = child.frames()
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("method = 'best': the methods are auto, ")


def test_through_the_front_door():
    problem = pipeline(microbatches=5)
    result = optpipe.solve(problem, method="zb-auto", time_limit=20.0)
    assert result.schedule is not None
    assert result.method == "zb-auto"
    assert check(problem, result.schedule) == []
    assert result.lower_bound_ms == 33 + 5 * 20 + 3 * 11 + 8  # the last device's wait, its F and B, the way back
    assert result.notes == ()
    assert optpipe.solve(pipeline(memory=4), time_limit=20.0).status == "infeasible"


def test_a_huge_problem_ends_in_time():
    began = time.monotonic()
    result = optpipe.solve(pipeline(devices=64, microbatches=4096), time_limit=2.0)
    assert (
        time.monotonic() - began < 12.0
    )  # two seconds, the process's start, and a check of half a million ops, on a busy machine
    assert result.status == "feasible" or result.reason == "no schedule was found before the search ended"
    assert not any("exit code" in note for note in result.notes)


def test_an_engine_that_is_named_may_be_asked_for_more_than_it_is_started_for_by_itself(monkeypatch):
    class Module:
        applies = staticmethod(lambda problem: problem.microbatches < 5)
        improves = staticmethod(lambda problem: problem.microbatches < 9)

    monkeypatch.setattr(portfolio.importlib, "import_module", lambda name: Module)
    fits = [
        Portfolio(Request(problem=pipeline(microbatches=m), method=method), print).applies("milp")
        for m in (4, 8, 9)
        for method in ("auto", "milp")
    ]
    assert fits == [True, True, False, True, False, False]


@pytest.mark.parametrize("placements", ["keep", "all"])
def test_work_that_takes_no_time_is_proven_to_take_none(placements):
    free = {
        "forward_ms": 0.0,
        "backward_input_ms": 0.0,
        "backward_weight_ms": 0.0,
        "activation_bytes": 5,
        "saved_for_weight_bytes": 2,
    }
    problem = Problem(
        microbatches=3,
        devices=[Device(activation_budget_bytes=20)] * 2,
        stages=[Stage(device=d, **free) for d in range(2)],
    )
    result = optpipe.solve(problem, time_limit=20, placements=placements)
    assert (result.status, result.makespan_ms, result.lower_bound_ms) == ("optimal", 0.0, 0.0)


def test_without_ortools_the_milp_solves_windows_of_what_is_too_large_for_it(monkeypatch):
    large = Problem.load(EXAMPLES / "fastlink-8x16.json")
    monkeypatch.setattr(portfolio.importlib.util, "find_spec", lambda name: None if name == "ortools" else object())
    frames: list[object] = []
    search = Portfolio(Request(problem=large), frames.append)
    assert [search.applies(engine) for engine in ("cyclic", "lns", "cpsat", "milp")] == [False, False, False, True]
    assert notes(frames) == [
        f"{engine} is not available: ortools is not installed" for engine in ("cyclic", "lns", "cpsat")
    ]
    monkeypatch.undo()
    assert [search.applies(engine) for engine in ("cyclic", "lns", "milp")] == [True, True, False]


@pytest.mark.parametrize(("parts", "first"), [(1, "adaoffload"), (64, "naive")])
def test_many_parts_make_a_problem_large(parts, first):
    problem = pipeline(devices=2, microbatches=LARGE // 100)
    leaves = {"offload_ms": 1.0, "reload_ms": 1.0, "offload_bytes": 5, "offload_parts": parts}
    problem = problem.replace(stages=[stage.model_copy(update=leaves) for stage in problem.stages])
    assert Portfolio(Request(problem=problem), print).within_memory()[0] == first
