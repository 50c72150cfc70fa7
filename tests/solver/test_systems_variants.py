"""Published schedules in a search: which run on a problem's own stages, and that none that fits is better than the
answer. Micro-batches that differ may enter in any order: these and list scheduling are tried in several."""

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.frames import bounds, notes, schedules
from support.problems import pipeline, stage, with_budgets
from support.problems.strategies import problems, problems_with_schedules
from support.problems.units import ACTIVATION, peaks, units

from optpipe import InputError, OptPipeError, Problem, Schedule, certify, check
from optpipe.model.ops import Kind
from optpipe.process.protocol import Request
from optpipe_solver import clock, systems, tuning
from optpipe_solver.heuristics import STREAMS
from optpipe_solver.portfolio import PlacementSearch, Portfolio, heuristic_runs
from optpipe_solver.systems import SYSTEMS, System, in_best_order, in_entry_orders, variants

EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"


@pytest.fixture(autouse=True)
def no_engines(monkeypatch):
    """What published schedules alone bring, and the first schedule of each heuristic."""
    monkeypatch.setattr(tuning, "AUTO", ())
    monkeypatch.setattr(tuning, "OPS_PER_S", 1)


def tight() -> Problem:
    """Memory for two activations: what holds more does not fit, and nothing reaches the bound."""
    return with_budgets(units(4, 8), 2000)


def answer(problem: Problem, **asked: Any) -> tuple[Schedule | None, float]:
    """The best incumbent and the best bound of a search in this process."""
    request = Request(problem=problem, **{"threads": 1, "time_limit_s": 60.0, **asked})
    frames: list[object] = []
    search = PlacementSearch if request.placements == "all" else Portfolio
    search(request, frames.append).run()
    assert not any("gives no schedule" in text for text in notes(frames))
    return (schedules(frames, problem) or [None])[-1], max(bounds(frames), default=0.0)


def fitting(problem: Problem, placements: str) -> list[Schedule]:
    """Of every system, with every choice of its parameters that a search tries."""
    found = []
    for name in SYSTEMS:
        with suppress(OptPipeError):
            plain = systems.generate(name, problem, placements)
            for method in variants(plain.problem):
                if method.partition(":")[0] == name:
                    with suppress(InputError):
                        found.append(systems.generate(method, problem, placements))
    return [schedule for schedule in found if check(schedule.problem, schedule) == []]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.json")), ids=lambda path: path.stem)
def test_no_system_that_fits_is_better_than_the_answer(path):
    problem = Problem.load(path)
    for one in (problem, with_budgets(problem, 10**15)):
        best, _ = answer(one)
        assert all(best.makespan_ms <= schedule.makespan_ms * (1 + 1e-9) for schedule in fitting(one, "keep"))


@pytest.mark.timeout(1_000)  # two searches of a minute each, which take longer on a busy machine
@pytest.mark.parametrize(
    ("name", "factor"),
    [
        *((name, factor) for name in ("fastlink-4x8", "figure4-4x6", "vshape-4x8") for factor in (None, 0.8)),
        ("recompute-4x12", None),
        pytest.param("recompute-4x12", 0.8, marks=pytest.mark.soak),
    ],
)
def test_nor_on_the_stages_that_it_needs_where_placements_are_free(name, factor):
    problem = Problem.load(EXAMPLES / f"{name}.json").replace(overlap_factor=factor)
    for one in (problem, with_budgets(problem, 10**15)):
        best, bound = answer(one, placements="all")
        rivals = fitting(one, "all")
        if factor is None:  # one chunk each way is a placement to search only where forwards run beside backwards
            rivals = [
                schedule
                for schedule in rivals
                if schedule.placement is None or schedule.placement.shape != "bidirectional"
            ]
        assert len(rivals) > 0
        assert all(best.makespan_ms <= schedule.makespan_ms * (1 + 1e-9) for schedule in rivals)
        assert all(bound <= schedule.makespan_ms * (1 + 1e-9) for schedule in rivals)


@settings(max_examples=examples(25), deadline=None)
@given(problem=problems(max_devices=4, max_stages=4, max_microbatches=6))
def test_nor_on_any_problem(problem):
    rivals = fitting(problem, "keep")
    assume(rivals)
    best, _ = answer(problem)
    assert all(best.makespan_ms <= schedule.makespan_ms + 1e-6 for schedule in rivals)


def test_each_runs_on_the_stages_it_is_for_with_its_parameters():
    row, looped, back = units(4, 8), units(4, 8, v=2), units(4, 8, v=2, shape="v")
    assert {"gpipe", "1f1b", "zb-h1", "zb-h2"} <= set(variants(row))
    assert "interleaved" not in set(variants(row))
    assert {"interleaved", "chronos:leaving=2", "gis", "gis:leaving=1", "gis:leaving=2"} <= set(variants(looped))
    assert {"zb-v", "v-half", "v-min", "dualpipe-v"} <= set(variants(back))
    assert not {"zb-v", "gpipe"} & set(variants(looped))
    for problem in (row, looped, back):
        for method in variants(problem):
            systems.parse(method)


def test_of_many_choices_some_are_tried():
    groups = [method for method in variants(units(32, 8, v=2)) if method.startswith("chronos-zero2:")]
    assert groups[0] == "chronos-zero2:group=2"
    assert groups[-1] == "chronos-zero2:group=30"
    assert len(groups) <= tuning.VARIANTS


def test_what_needs_stages_of_its_own_gets_them_and_the_bound_is_one_for_all():
    problem = units(4, 8)
    schedule, bound = answer(problem, placements="all", method="zb-v")
    assert str(schedule.placement) == "2 chunks a device, V-shaped"
    assert (schedule.method, schedule.makespan_ms) == ("zb-v", systems.generate("zb-v", problem, "all").makespan_ms)
    assert certify(schedule.problem, schedule).fits
    assert 0 < bound <= min(other.makespan_ms for other in fitting(problem, "all"))


def test_one_that_does_not_fit_its_stages_says_what_it_lacks():
    small = with_budgets(units(4, 8), 1500)
    frames: list[object] = []
    PlacementSearch(Request(problem=small, method="zb-v", placements="all", time_limit_s=5.0), frames.append).run()
    (note,) = notes(frames)
    assert note.startswith("2 chunks a device, V-shaped: zb-v gives no schedule: device ")
    assert note.endswith(" and has 1.5 kB")
    with pytest.raises(InputError, match=r"^method = 'zb-w': the methods are auto, naive, "):
        PlacementSearch(Request(problem=small, method="zb-w", placements="all"), frames.append)


def test_what_does_not_fit_is_no_news_but_what_breaks_is(monkeypatch):
    def broken(problem: Problem) -> Schedule:
        raise ZeroDivisionError("oh")

    def refused(problem: Problem) -> Schedule:
        raise InputError("not today")

    for name, build in (("broken", broken), ("refused", refused)):
        monkeypatch.setitem(SYSTEMS, name, System(name, "a test", build))
    frames: list[object] = []
    Portfolio(Request(problem=tight(), time_limit_s=60.0), frames.append).run()
    assert notes(frames) == ["broken gives no schedule: ZeroDivisionError: oh"]


def test_a_named_method_is_not_joined_by_others(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(heuristic_runs, "variants", lambda problem: asked.append("") or iter(()))
    monkeypatch.setattr(Portfolio, "supports", lambda self, engine: False)
    for method in ("naive", "1f1b", "lns"):
        Portfolio(Request(problem=tight(), method=method), lambda frame: None).run()
        assert bool(asked) == (method == "lns")  # an engine starts from all there is


def test_published_systems_that_were_not_tried_at_first_stop_when_half_of_the_time_is_over(monkeypatch):
    made: list[str] = []

    def slow(method: str, *_: object) -> Iterator[Schedule]:
        made.append(method)
        monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 40.0))
        raise InputError("too late")

    monkeypatch.setattr(tuning, "FIRST_S", 0.0)
    monkeypatch.setattr(systems, "in_entry_orders", slow)
    frames: list[object] = []
    Portfolio(Request(problem=tight(), time_limit_s=60.0), frames.append).run()
    assert len({*made} - {"po-h", "po-f"}) == 1  # these list scheduling tries, too
    assert schedules(frames, tight())


# Orders of entry

LENGTHS = (1.0, 5.0, 2.0, 4.0, 3.0, 1.0, 2.0, 6.0)


def packed(memory: int = 60, **fields: Any) -> Problem:
    """Four devices, eight micro-batches of different weights, each of which may enter at any time."""
    whole, half, quarter = (tuple(int(share * length) for length in LENGTHS) for share in (4, 2, 1))
    lists: dict[str, Any] = {
        **dict.fromkeys(("forward_ms", "backward_input_ms", "backward_weight_ms", "offload_ms", "reload_ms"), LENGTHS),
        **dict.fromkeys(("activation_bytes", "offload_bytes"), whole),
        "saved_for_weight_bytes": half,
        "checkpoint_bytes": quarter,
    }
    return pipeline(4, 8, memory, stage(recompute=(1, 2)) | lists, **fields)


def entries(schedule: Schedule) -> list[int]:
    """The micro-batches in the order in which they enter."""
    return [op.microbatch for op in schedule.programs[0].ops() if op.kind is Kind.F and op.stage == 0]


@given(problems_with_schedules(beyond=True), st.data())
def test_a_renumbered_schedule_takes_the_same_time_and_memory(pair: tuple[Problem, Schedule], data: Any) -> None:
    problem, schedule = pair
    order = np.array(data.draw(st.permutations(range(problem.microbatches))))
    there = schedule.renumbered(problem.entering(np.argsort(order).tolist()), order)
    assert there.makespan_ms == pytest.approx(schedule.makespan_ms)
    assert peaks(there) == peaks(schedule)
    back = there.renumbered(there.problem.entering(order.tolist()), np.argsort(order))
    assert back.problem == problem
    assert back == schedule.with_tables(lambda table: table)  # which leaves out a link's order of no ops


@pytest.mark.parametrize("method", SYSTEMS)
def test_every_published_schedule_is_valid_in_every_order(method: str) -> None:
    problem = packed(memory=1000)
    try:
        schedules = list(in_entry_orders(method, problem, "all"))
    except InputError:  # it needs what this problem has not
        return
    assert schedules[0] == systems.generate(method, problem, "all")
    assert len({tuple(entries(schedule)) for schedule in schedules}) == 5
    for schedule in schedules:
        assert check(schedule.problem, schedule) == []
    assert in_best_order(method, problem, "all").makespan_ms <= max(schedule.makespan_ms for schedule in schedules)


def test_the_best_order_of_1f1b_is_better_than_the_given_one() -> None:
    problem = packed()
    assert in_best_order("1f1b", problem).makespan_ms < systems.generate("1f1b", problem).makespan_ms


def test_one_that_fits_is_preferred() -> None:
    """The heaviest micro-batches together, as in some orders, are too much."""
    most = {max(peaks(each)) for each in in_entry_orders("1f1b", packed())}
    assert len(most) > 1
    problem = packed(memory=round(min(most) * ACTIVATION))
    assert check(problem, in_best_order("1f1b", problem)) == []


@pytest.mark.parametrize("fixed", [False, True])
def test_list_scheduling_tries_orders_unless_the_order_is_fixed(fixed: bool) -> None:
    problem = packed(fixed_order=fixed)
    schedules = list(islice(STREAMS["adaoffload"](problem, "makespan"), 60))
    assert all(check(problem, schedule) == [] for schedule in schedules)
    assert (len({tuple(entries(schedule)) for schedule in schedules}) == 1) == fixed


def test_a_fixed_order_is_kept_by_every_published_schedule() -> None:
    assert [entries(each) for each in in_entry_orders("1f1b", packed(fixed_order=True))] == [list(range(8))]
