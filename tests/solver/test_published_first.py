"""From the first second, no answer is longer than a published schedule that fits on the stages that may be used."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import problems
from support.examples import examples
from support.frames import bounds, schedules
from support.problems.strategies import looped
from support.problems.strategies import problems as any_problems

from optpipe import OptPipeError, Problem, Result, Schedule, check, comparison
from optpipe.evaluate.objective import length_ms
from optpipe.options import Placements, SearchOptions
from optpipe.process.protocol import Frame, OtherStages, Remedies, Request
from optpipe_cli.compare import best_published
from optpipe_solver import clock, first, systems, tuning
from optpipe_solver.bounds.least_memory import infeasibility
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.portfolio import PlacementSearch, Portfolio, offer_remedies, portfolio
from optpipe_solver.portfolio.remedies import _recomputed
from optpipe_solver.systems import SYSTEMS, in_entry_orders, variants

EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"
MEMORY = st.sampled_from([0.6, 1.0, 1.5, 3.0, 100.0])
PLACEMENTS = st.sampled_from(["keep", "all"])
OBJECTIVES = st.sampled_from(["makespan", "span"])


@st.composite
def posed(draw: Any) -> Problem:
    """A problem of any kind, chunks and layers among them, with much or little memory."""
    problem = draw(st.one_of(any_problems(beyond=True), looped()))
    if len(problem.all_routes) == 1 and draw(st.booleans()):
        problem = problem.replace(layers=[stage.model_dump(exclude={"device"}) for stage in problem.stages])
    return problem.with_memory_for(draw(MEMORY))


def published(problem: Problem, placements: Placements) -> list[Schedule]:
    """Every published schedule that fits, also with the parameters that a search tries."""
    found = []
    names = dict.fromkeys([*SYSTEMS, *variants(problem)])
    for method, which in [*((name, placements) for name in SYSTEMS), *((name, "keep") for name in names)]:
        with contextlib.suppress(OptPipeError):
            found += [each for each in in_entry_orders(method, problem, which) if not check(each.problem, each)]
    return found


def answered(problem: Problem, placements: Placements, objective: str, is_first: bool) -> list[Frame]:
    """What a search of a second emits at its beginning, or the service's first answer."""
    frames: list[Frame] = []
    request = Request(
        problem=problem, placements=placements, objective=objective, time_limit_s=1.0, threads=1, method="auto"
    )
    if is_first:
        first.answer(request, frames.append)
    else:
        (PlacementSearch if placements == "all" else Portfolio)(request, frames.append).begin()
    return frames


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(
    ("name", "placements"), [("bpipe-8x16", "keep"), ("shared-pcie-4x8", "keep"), ("zero-bubble/zb-8x24-half", "all")]
)
def test_nor_where_the_first_schedules_of_list_scheduling_are_longer(name, placements, is_first):
    problem = Problem.load(EXAMPLES / f"{name}.json")
    shortest = min(each.makespan_ms for each in published(problem, placements))
    assert next(STREAMS["adaoffload"](problem, "makespan")).makespan_ms > shortest
    found = schedules(answered(problem, placements, "makespan", is_first), problem)
    assert found[-1].makespan_ms <= shortest


@settings(max_examples=examples(40), deadline=None)
@given(problem=posed(), placements=PLACEMENTS, objective=OBJECTIVES, is_first=st.booleans())
def test_no_answer_is_longer_than_a_published_schedule_that_fits(problem, placements, objective, is_first):
    frames = answered(problem, placements, objective, is_first)
    found = [each for each in schedules(frames, problem) if not check(each.problem, each)]
    reference = published(problem, placements)
    assert found or not reference, "something fits and nothing was found"
    if reference:
        shortest = min(length_ms(each, objective) for each in reference)
        assert min(length_ms(each, objective) for each in found) <= shortest * (1 + 1e-9)
        assert max(bounds(frames)) <= shortest * (1 + 1e-9)
    if placements == "keep" and infeasibility(problem) is None:
        assert found, "one micro-batch at a time fits"


@settings(max_examples=examples(20), deadline=None)
@given(problem=posed(), objective=OBJECTIVES)
def test_where_stages_are_kept_the_best_published_on_others_is_named(problem, objective):
    frames: list[Frame] = []
    Portfolio(Request(problem=problem, objective=objective), frames.append).look_at_other_stages()
    others = [each for each in published(problem, "all") if each.placement]
    assert len(frames) == bool(others)
    for frame in frames:
        schedule = frame.schedule.schedule(problem)
        assert check(schedule.problem, schedule) == []
        assert length_ms(schedule, objective) == min(length_ms(each, objective) for each in others)


def cost(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[str]:
    """Let each published schedule take seconds of the processor, and a hundred times as long beside other work. Returns
    those that are tried, in a list that grows."""
    tried: list[str] = []

    def counted(method: str, *others: Any) -> Iterator[Schedule]:
        tried.append(method)
        yield from in_entry_orders(method, *others)

    now = {"thread_time": lambda: seconds * len(tried), "monotonic": lambda: 100 * seconds * len(tried)}
    monkeypatch.setattr(systems, "in_entry_orders", counted)
    monkeypatch.setattr(clock, "time", SimpleNamespace(**now))
    return tried


@pytest.mark.parametrize("placements", ["keep", "all"])
@pytest.mark.parametrize(("limit_s", "part", "most"), [(0.05, 1, 1), (1.0, 2, 4), (60.0, 8, 8)])
def test_what_comes_first_takes_the_processor_for_the_time_limit_at_most(monkeypatch, placements, limit_s, part, most):
    """However long that is beside other work. In a search of all stages the own ones have half of the limit."""
    tried = cost(monkeypatch, 0.25)
    search = (PlacementSearch if placements == "all" else Portfolio)(
        Request(problem=SHORT, placements=placements, time_limit_s=limit_s), lambda _: None
    )
    search.begin()
    on_own, others = len(tried), len(list(systems.on_other_stages(SHORT)))
    if placements == "keep":
        search.look_at_other_stages()
        assert (on_own, len(tried)) == (most, most + min(most, others))
    else:
        assert part < on_own <= part + most


def test_who_had_no_time_to_try_all_published_schedules_claims_nothing_of_them(monkeypatch):
    """On other stages each is longer here than on the problem's own."""
    problem, others = Problem.load(EXAMPLES / "fastlink-16x64.json"), ["po-f", "v-min"]
    best = best_published(problem, "keep", "makespan")
    cost(monkeypatch, 0.75)
    assert best_published(problem, "keep", "makespan") is None
    monkeypatch.setattr(portfolio, "on_other_stages", lambda _: [(name, None) for name in others])
    for first_s, is_cut in ((2.0, False), (0.7, True)):
        monkeypatch.setattr(tuning, "FIRST_S", first_s)
        frames: list[Frame] = []
        Portfolio(Request(problem=problem), frames.append).look_at_other_stages()
        *notes, other = frames
        texts = ["not all published schedules on other stages were tried, for lack of time"]
        assert [note.text for note in notes] == texts * is_cut
        result = Result.from_schedule(best, SearchOptions(placements="keep"))
        result = replace(result, other_stages=other.schedule.schedule(problem))
        assert "no published schedule that was tried is shorter (po-f: " in result.advice


def test_what_was_not_tried_at_first_is_tried_before_the_search(monkeypatch):
    monkeypatch.setattr(tuning, "FIRST_S", 0.0)
    monkeypatch.setattr(PlacementSearch, "phases", lambda self: iter(()))
    problem = layered(1000)
    frames: list[Frame] = []
    PlacementSearch(Request(problem=problem, placements="all", time_limit_s=600.0), frames.append).run()
    best = schedules(frames, problem)[-1]
    assert best.makespan_ms <= min(each.makespan_ms for each in published(problem, "all")) * (1 + 1e-9)
    assert len(best.problem.stages) > 4


SHORT = problems.pipeline(4, 8, 100, problems.stage((10, 10, 8), (5, 2)), p2p_ms=1.0)


@pytest.mark.parametrize("method", ["1f1b", "adaoffload"])
def test_who_names_another_method_gets_that_alone(method):
    frames: list[Frame] = []
    search = Portfolio(Request(problem=SHORT, method=method, time_limit_s=1e-6), frames.append)
    search.run()
    search.look_at_other_stages()
    assert {schedule.method for schedule in schedules(frames, SHORT)} == {method}
    assert not any(isinstance(frame, OtherStages) for frame in frames)


def test_a_comparison_begins_with_what_it_compares(monkeypatch):
    """Also with parameters that a search leaves out."""
    starts = []

    def search(problem: Problem, options: SearchOptions, start: Schedule | None) -> list[Result]:
        starts.append((options.method, options.placements, start and start.method))
        return [Result("unknown")]

    monkeypatch.setattr(comparison, "search", search)
    rows = comparison.compare(SHORT, ["1f1b", "gis:group=4", "auto", "milp"]).rows
    best = next(row for row in rows if row.fits)
    assert [start for *_, start in starts] == ["1f1b", best.schedule.method, None, None]
    assert [each[:2] for each in starts] == [(name, each) for name in ("auto", "milp") for each in ("keep", "all")]


SMALLER = "micro-batches of 1/{} the size (optpipe model --tp N says which tensor parallelism does as much)"


def layered(memory: int, **costs: Any) -> Problem:
    """Four devices with two layers each; a layer's activation has 10 bytes."""
    layer = problems.stage((1, 1, 1), (10, 4), **costs)
    whole = problems.stage((2, 2, 2), (20, 8), **{name: tuple(2 * x for x in value) for name, value in costs.items()})
    return problems.pipeline(4, 8, memory, whole, layers=[layer] * 8, p2p_ms=0.1)


def remedies(problem: Problem, **asked: Any) -> dict[str, tuple[str, float | None]]:
    """The changes that help, with the method and the length of the best schedule."""
    frames: list[Frame] = []
    search = Portfolio(Request(problem=problem, time_limit_s=100.0, threads=2, **asked), frames.append)
    search.run()
    assert search.is_infeasible
    offer_remedies(search.request, frames.append, search.clock)
    last = [frame for frame in frames if isinstance(frame, Remedies)][-1]
    return {each.change: (each.method, each.value_ms) for each in last.remedies}


def test_where_nothing_fits_each_change_that_helps_has_its_length():
    """A device has 16 bytes and its two layers 20: with one layer a stage, with checkpoints of 2 bytes and the largest
    layer whole, or with micro-batches of half the size they fit."""
    found = remedies(layered(16, recompute=(1.0, 2)))
    again, smaller = "recompute full in every backward, layer by layer", SMALLER.format(2)
    assert set(found) == {again, "placements = all", smaller}
    for name, problem, placements, work in (
        (again, _recomputed(layered(16, recompute=(1.0, 2)), "full"), "keep", 4),
        ("placements = all", layered(16), "all", 3),
    ):
        simple = published(problem, placements) or [next(STREAMS["naive"](problem, "makespan"))]
        shortest = min(each.makespan_ms for each in simple)
        assert 8 * work * 2 <= found[name][1] <= shortest * (1 + 1e-9), "each op of two layers and eight micro-batches"
    assert list(found.values())[-1] == ("", None), "the problem has no times for smaller micro-batches"


def test_what_does_not_help_is_not_among_the_remedies():
    assert list(remedies(layered(9, recompute=(1.0, 2)))) == [SMALLER.format(4)]
    assert remedies(layered(1)) == {}
    ample = problems.stage((1, 1, 1), (10, 4), offload=(1.0, 1.0, 10))
    host = problems.pipeline(1, 2, 10, [ample | {"device": 0}] * 2, device={"host_memory_bytes": 0})
    assert "more host memory to offload to" in remedies(host)


def test_layers_that_a_peer_may_take_are_recomputed_without_it():
    content = layered(16, recompute=(1.0, 2)).to_dict()
    for n, device in enumerate(content["devices"]):
        device["peer"] = 3 - n
    for costs in (*content["stages"], *content["layers"]):
        costs |= {"evict_ms": 1.0, "load_ms": 1.0, "evict_bytes": costs["activation_bytes"] - 2}
    assert "recompute full in every backward, layer by layer" in remedies(Problem.from_dict(content))


def test_a_recomputed_layer_takes_what_the_cost_model_takes():
    """The change is what `model --recompute full` writes, but for the room of the largest layer."""
    problem = layered(100, recompute=(1.0, 2))
    changed = _recomputed(problem, "full")
    assert [stage.activation_bytes for stage in changed.stages] == [4] * 4
    assert [stage.backward_input_ms for stage in changed.stages] == [4.0] * 4
    assert [device.activation_budget_bytes for device in changed.devices] == [92] * 4


@pytest.mark.parametrize("placements", [None, "keep", "all"])
def test_stages_are_free_by_default_where_layers_say_what_they_are_made_of(placements):
    options = SearchOptions(placements=placements)
    assert options.placements_of(SHORT) == (placements or "keep")
    assert options.placements_of(layered(16)) == (placements or "all")
