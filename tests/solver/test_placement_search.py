"""Placement search: every answer verified for its placement, bounds that hold for all of them, and time where it
pays."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support import problems
from support.commands import run as command
from support.frames import bounds, notes, schedules
from support.oracles.enumeration import best_of_all, problem_of, stage

import optpipe
from optpipe import Problem, Schedule, check
from optpipe.model.placement import Placement, rechunk
from optpipe.process.protocol import Incumbent, Infeasible, Note, Programs, Request
from optpipe_solver import tuning
from optpipe_solver.heuristics import generate
from optpipe_solver.incumbents import Incumbents, Predicate, _Kept
from optpipe_solver.portfolio import PlacementSearch, placement_search
from optpipe_solver.schedule_facts import is_listed, is_modelled

__all__ = ["command"]  # a fixture
EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"


def pipeline(
    memory: int = 6, offload_ms: float | None = 0.25, devices: int = 4, microbatches: int = 8, **changes: Any
) -> Problem:
    """F, B and W one each, activations of 4 bytes, memory for one and a half."""
    away = {} if offload_ms is None else {"offload": (offload_ms, offload_ms, 4)}
    return problems.pipeline(devices, microbatches, memory, problems.stage(sizes=(4, 2), **away), **changes)


def with_layers(memory: int = 40) -> Problem:
    """Ten alike and a heavy head on three devices, in the partition that counts layers."""
    layers = [problems.stage(sizes=(2, 1))] * 10 + [problems.stage((4, 4, 4), (2, 1))]
    return Placement(chunks=1, layers=(4, 4, 3)).apply(problems.pipeline(3, 6, memory, layers[0], layers=layers))


def run(problem: Problem, **asked: Any) -> list[Any]:
    frames: list[Any] = []
    request = Request(
        problem=problem, **{"time_limit_s": 1.5, "threads": 1, "method": "adaoffload", "placements": "all", **asked}
    )
    search = PlacementSearch(request, frames.append)
    search.clock.last(search.clock.seconds + 100.0)  # one thread counts: a busy machine's clock ends nothing
    search.run()
    return frames


@pytest.mark.parametrize(
    ("problem", "seconds", "threads"), [(pipeline(), 20.0, 1), (with_layers(), 3.0, 2)], ids=["chunks", "layers"]
)
def test_every_answer_is_better_than_those_before_and_valid_for_its_placement(problem, seconds, threads):
    """With chunks alone it is over as soon as the bound over all placements is reached."""
    frames = run(problem, threads=threads, time_limit_s=seconds)
    found = schedules(frames, problem)
    assert all(check(schedule.problem, schedule) == [] for schedule in found)
    assert all(b.makespan_ms < a.makespan_ms for a, b in pairwise(found))
    assert found[0].placement is None
    assert found[-1].placement is not None
    assert bounds(frames) == sorted(bounds(frames))
    assert 0 < bounds(frames)[-1] <= found[-1].makespan_ms
    assert notes(frames) == []


def test_more_chunks_beat_what_one_chunk_can_ever_reach():
    """Memory for one activation and a half: no schedule of one chunk is shorter than 29."""
    problem = pipeline()
    kept = optpipe.solve(problem, method="adaoffload", gap=1.0, threads=1)
    free = optpipe.solve(problem, method="adaoffload", time_limit_s=200.0, threads=1, placements="all")
    assert free.makespan_ms < 29.0 <= kept.lower_bound_ms
    assert free.schedule.placement.chunks > 1
    assert free.schedule.problem == free.schedule.placement.apply(problem)
    assert free.lower_bound_ms <= free.makespan_ms
    assert kept.schedule.placement is None


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_bounds_hold_for_every_placement(monkeypatch, objective):
    monkeypatch.setattr(tuning, "CHUNKS", 2)
    problem = problem_of([stage(0, (2, 4, 2), 2, 2), stage(1, (4, 2, 2), 2, 0)], [2, 2], 1)
    best = min(best_of_all(placed, objective)[0] for placed in (problem, rechunk(problem, 2), rechunk(problem, 2, "v")))
    frames = run(problem, objective=objective)
    assert 0 < max(bounds(frames)) <= best + 1e-9
    lengths = [s.makespan_ms if objective == "makespan" else s.span_ms for s in schedules(frames, problem)]
    assert lengths[-1] == best


def test_only_a_placement_fits():
    """A whole activation does not fit; halves do, one after the other has left."""
    problem = pipeline(memory=3)
    frames = run(problem, time_limit_s=6.0)
    assert not any(isinstance(frame, Infeasible) for frame in frames)
    assert schedules(frames, problem)[-1].placement.chunks > 1


def test_it_is_infeasible_only_where_every_placement_is():
    assert run(pipeline(memory=3, offload_ms=None))[-1] == Infeasible(
        reason="devices[0].activation_budget_bytes = 3 B: one micro-batch at a time needs at least 4 B"
    )
    assert run(with_layers(memory=1))[-1] == Infeasible(reason="layers[0] needs 2 B and no device has more than 1 B")
    fits = with_layers(memory=8)  # 22 bytes in all: 4, 4 and 3 layers fit exactly
    assert schedules(run(fits), fits)


def test_fewer_layers_than_devices_leave_the_stages_as_they_are():
    one, two = problems.stage(sizes=(4, 2)), problems.stage((2, 2, 2), (8, 4))
    problem = pipeline().replace(layers=[one, one, two])
    frames = run(problem)
    assert all(schedule.placement is None for schedule in schedules(frames, problem))
    assert max(bounds(frames)) >= 27.0
    tight = problems.with_budgets(problem.replace(stages=pipeline(offload_ms=None).stages), 3)
    assert run(tight)[-1] == Infeasible(reason="3 layers cannot make a stage for each of 4 devices")


def test_several_routes_keep_their_stages():
    problem = pipeline(routes=[[0, 1, 2, 3], [3, 2, 1, 0]], microbatch_routes=[0, 1] * 4)
    frames = run(problem)
    assert all(schedule.placement is None for schedule in schedules(frames, problem))
    assert notes(frames) == ["routes: there are 2, placements are searched for one route only"]
    assert bounds(frames)[0] > 0


@pytest.mark.parametrize("placement", [None, Placement(chunks=2, shape="v"), Placement(chunks=6)])
def test_a_warm_start_of_any_placement_is_where_its_search_begins(placement):
    problem = pipeline(memory=6, microbatches=4)
    placed = placement.apply(problem) if placement else problem
    best = generate("adaoffload", placed)
    start = Programs.from_schedule(best).model_copy(update={"placement": placement})
    frames = run(problem, warm_start=start, method="naive", time_limit_s=2.0)
    last = schedules(frames, problem)[-1]
    assert (last.method, last.placement, last.makespan_ms) == (best.method, placement, best.makespan_ms)


def test_a_warm_start_of_another_model_is_told_of():
    start = Programs.from_schedule(generate("adaoffload", pipeline())).model_copy(
        update={"placement": Placement(chunks=1, layers=(1, 1, 1, 1))}
    )
    (note,) = notes(run(pipeline(), warm_start=start))
    assert note == "the warm start is no schedule of this problem: placement.layers: the problem has none"


class FakePortfolio:
    """In place of a portfolio: the more chunks and the more seconds the shorter is what it finds."""

    asked: list[Request]
    with_rules: list[Request]
    in_rules: list[tuple[int, int]]  # chunks, and ops
    annealed: list[tuple[int, float, Predicate, int]]  # chunks, seconds, of what kind the schedule was, and the number

    def __init__(self, request: Request, emit: Any, incumbents: Incumbents) -> None:
        self.request, self.emit, self.incumbents, self.heuristics = request, emit, incumbents, self
        FakePortfolio.asked.append(request)

    def begin(self) -> bool:
        return True

    def run(self, *_: Any) -> Iterator[None]:
        chunks = len(self.request.problem.stages) // 4
        self.emit(Note(text="the same words"))
        self.incumbents.raise_bound(chunks + (50.0 if self.request.method == "relax" else 30.0), "shown")
        schedule = generate("naive", self.request.problem)
        self.incumbents._best = _Kept(schedule, 100.0 + 100.0 / chunks - self.request.time_limit_s / 1000)
        self.emit(Incumbent(method="shown", schedule=Programs.from_schedule(schedule)))
        return iter(())

    def by_rules(self, most: int | None = None, until: float = 0.0) -> float:
        chunks = len(self.request.problem.stages) // 4
        if most is None:
            FakePortfolio.with_rules.append(self.request)
        else:
            FakePortfolio.in_rules.append((chunks, most))
        return 100.0 + 100.0 / chunks

    def by_annealing(self, seconds: float, kind: Predicate, nth: int) -> None:
        FakePortfolio.annealed.append((len(self.request.problem.stages) // 4, seconds, kind, nth))


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.setattr(placement_search, "Portfolio", FakePortfolio)
    monkeypatch.setattr(PlacementSearch, "_offer_published", lambda *_: None)
    for name in ("asked", "with_rules", "in_rules", "annealed"):
        monkeypatch.setattr(FakePortfolio, name, [], raising=False)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("threads", [1, 2])
def test_from_all_placements_for_a_moment_to_the_best_for_long(threads):
    frames = run(pipeline(), method="auto", time_limit_s=60.0, threads=threads)
    looks = [request for request in FakePortfolio.asked if request.method == "adaoffload"]
    first, *deep = [request for request in FakePortfolio.asked if request.method == "auto"]
    assert [first, *looks] == FakePortfolio.with_rules
    assert len(looks) == 6  # 2, 3 and 4 chunks, looped and V-shaped; one chunk is what is given
    assert sum(request.time_limit_s for request in looks) == pytest.approx(60 * tuning.FIRST_LOOK_SHARE, rel=0.2)
    # In rules on seven placements, on the half of them, on the half of these: each time for a third of their share.
    a_round = tuning.RULES_OPS_PER_S * 60 * tuning.RULES_SHARE / 3 * (tuning.COUNTED_SHARE if threads == 1 else threads)
    seven, four, two = (round(a_round * each) for each in (1 / 7, 1 / 7 + 1 / 4, 1 / 7 + 1 / 4 + 1 / 2))
    assert sorted(FakePortfolio.in_rules, key=lambda each: (each[1], each[0])) == [
        *((chunks, seven) for chunks in (1, 2, 2, 3, 3, 4, 4)),
        *((chunks, four) for chunks in (3, 3, 4, 4)),
        *((chunks, two) for chunks in (4, 4)),
    ]
    assert [len(request.problem.stages) for request in deep[:3]] == [16, 16, 16]
    assert all(request.placements == "keep" for request in deep)
    assert deep[2].time_limit_s > 12.0
    if threads == 1:
        ran = [request for request in FakePortfolio.asked[1:] if request.method != "dispatch"]
        assert sum(request.time_limit_s for request in ran) <= 60.0 * (1 - tuning.RULES_SHARE) + 1e-6
    assert bounds(frames)[-1] == 32.0  # the least of the placements' own, but of one chunk, which `relax` has searched
    assert notes(frames) == ["the same words"]
    assert {(chunks, kind, nth) for chunks, _, kind, nth in FakePortfolio.annealed} == {
        (4, is_modelled, 0),
        (4, is_listed, 1),
    }


def test_however_busy_the_machine_naive_is_not_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first look takes longer than its share, and time is up when the bounds of all placements are known."""
    problem, frames = pipeline(), list[Any]()
    search = PlacementSearch(
        Request(problem=problem, method="auto", placements="all", time_limit_s=300.0, threads=2), frames.append
    )
    monkeypatch.setattr(tuning, "FIRST_LOOK_SHARE", 1e-9)
    monkeypatch.setattr(search.contenders, "list_all", lambda named: search.clock.stop())
    search.run()
    assert schedules(frames, problem)[-1].makespan_ms < generate("naive", problem, "makespan").makespan_ms


def test_rules_are_searched_side_by_side_and_lead_further_than_a_first_look(monkeypatch):
    monkeypatch.setattr(tuning, "RULES_OPS_PER_S", 2e6)  # so that it ends by its count, also on a busy machine
    frames: list[Any] = []
    problem = Problem.load(EXAMPLES / "zero-bubble" / "zb-8x24-half.json")
    request = Request(problem=problem, method="auto", placements="all", time_limit_s=20.0, threads=3)
    search = PlacementSearch(request, frames.append)
    search.clock.last(200.0)
    search.begin()
    for phase in search.phases():
        first_ms = search.contenders.best_ms
        phase.run(phase.share)
        if phase.name == "rules":
            break
    found = schedules(frames, problem)
    assert search.contenders.best_ms < first_ms
    assert found[-1].makespan_ms == search.contenders.best_ms
    assert found[-1].rules is not None
    assert all(check(schedule.problem, schedule) == [] for schedule in found)
    assert all(b.makespan_ms < a.makespan_ms for a, b in pairwise(found))


def test_where_rules_lead_to_nothing_their_time_is_left_to_the_rest():
    request = Request(problem=pipeline(), method="auto", placements="all", time_limit_s=20.0, threads=1)
    search = PlacementSearch(request, list[Any]().append)
    search.contenders.all = []
    assert search._search_in_rules(0.3) == 0.0


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("threads", [1, 2])
def test_relax_searches_the_placements_of_the_least_bounds_up_to_the_best(threads):
    run(pipeline(offload_ms=None), method="auto", time_limit_s=600.0, threads=threads)
    relaxed = [request.problem for request in FakePortfolio.asked if request.method == "relax"]
    assert [len(problem.stages) for problem in relaxed] == [4, 8]  # next would be the best one
    seconds = 600.0 * tuning.ANNEALING_SHARE * (tuning.COUNTED_SHARE if threads == 1 else 1.0)
    seconds *= threads / 2  # both starts have the same time
    assert all(each[:2] == (4, pytest.approx(seconds)) for each in FakePortfolio.annealed)
    assert {(kind, nth) for _, _, kind, nth in FakePortfolio.annealed} == {(is_modelled, 0), (is_listed, 1)}


def test_solve_writes_what_check_accepts_for_the_problem_asked_about(command):
    with_layers().save("p.json")
    # The gap ends each search, but not with the given stages: device 2 works for 108 ms there, and 94 can be reached.
    solve = ("solve", "p.json", "--placements", "all", "--method", "adaoffload", "--time-limit", "60", "--gap", "0.12")
    code, out, _ = command(*solve, "-o", "s.json")
    placed = Schedule.load("s.json").placement
    assert code == 0
    assert f" with {placed} (of 11: embedding and head count), bubble " in out
    assert sum(placed.layers) == 11
    assert command("check", "p.json", "s.json")[0] == 0
    figures = json.loads(command(*solve, "--json", "-o", "s.json")[1])
    assert figures["placement"] == Schedule.load("s.json").placement.model_dump(mode="json", exclude_none=True)


def test_the_budgets_of_an_estimate_are_not_taken_for_two_stages_of_parameters() -> None:
    """Lists of `overlap_factor` come from an estimate, whose budgets are those of one way."""
    shares = {"forward_exchange": 0.4, "backward_exchange": 0.4}
    layers = [problems.stage(sizes=(2, 1)) | shares] * 12
    row = problems.pipeline(3, 6, 40, layers[0], layers=layers)
    one = Placement(chunks=1, layers=(4, 4, 4)).apply(row.replace(overlap_factor=0.7))
    lists = one.replace(overlap_factor=[[0.7] * 3] * 3)
    for problem, ways in ((one, {1, 2}), (lists, {1})):
        request = Request(problem=problem, time_limit_s=1.5, threads=1, method="adaoffload", placements="all")
        search = PlacementSearch(request, lambda frame: None)
        search.contenders.list_all(None)
        assert {len(each.problem.all_routes) for each in search.contenders.all} == ways
