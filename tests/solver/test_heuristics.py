"""Heuristics fit wherever any schedule does, are good where memory is short, and pair what saves time together."""

import contextlib
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import pipeline, stage, with_budgets
from support.problems.strategies import looped, problems, problems_with_schedules

from optpipe import InputError, Problem, certify, check
from optpipe.dispatch.descents import first_rules
from optpipe.dispatch.simulate import Simulator
from optpipe.evaluate.objective import length_ms
from optpipe.process.protocol import Note, Request
from optpipe_solver import systems, tuning
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.bounds.least_memory import infeasibility, least_memory
from optpipe_solver.clock import Clock
from optpipe_solver.heuristics import STREAMS, generate, join_pairs
from optpipe_solver.methods import HEURISTICS
from optpipe_solver.portfolio import Portfolio
from optpipe_solver.schedule_facts import is_modelled

GB = 10**9


def offloading(
    placement: list[int], microbatches: int, memory: float, ms: tuple[float, ...], p2p_ms: float = 1.0, **costs: Any
) -> Problem:
    """Stages by device, with F, B, W and, if given, offload time; `memory` in activations."""
    away = {"offload": (ms[3], ms[3], 5 * GB)} if len(ms) > 3 else {}
    stages = [stage(ms[:3], (5 * GB, 2 * GB), device=d, **away, **costs) for d in placement]
    return pipeline(max(placement) + 1, microbatches, int(memory * 5 * GB), stages, p2p_ms=p2p_ms)


@st.composite
def tight_problems(draw):
    """Any problem, with hardly more memory than the least."""
    problem = draw(problems(max_stages=5, max_microbatches=5))
    hosts = [{"host_memory_bytes": draw(st.sampled_from([None, 0, 5, 25, 60]))} for _ in problem.devices]
    devices = [device.model_copy(update=host) for device, host in zip(problem.devices, hosts, strict=True)]
    problem = problem.replace(devices=devices)
    return with_budgets(problem, [least + draw(st.sampled_from([0, 0, 1, 5, 20])) for least in least_memory(problem)])


@settings(max_examples=examples(400), deadline=None)
@given(tight_problems())
def test_heuristics_fit_wherever_any_schedule_does(problem):
    for name in HEURISTICS:
        assert check(problem, next(STREAMS[name](problem, "makespan"))) == []


@settings(max_examples=examples(20), deadline=None)
@given(problems())
def test_a_stream_ends_when_time_is_up(problem):
    for stream in STREAMS.values():
        assert 1 <= len(list(stream(problem, "makespan", Clock(0.0)))) <= 2


def test_zero_bubble_reaches_the_bound_where_memory_is_ample():
    problem = offloading(list(range(8)), 24, 16, (10, 10, 10), p2p_ms=0.0)
    assert generate("adaoffload", problem).makespan_ms == trivial_bound(problem) == 790.0


@pytest.mark.parametrize(
    ("problem", "at_most"),
    [
        (offloading(list(range(8)), 16, 3, (10, 10, 8, 12)), 590),  # bound 525; 1F1B, which does not fit, 684
        (offloading(list(range(8)), 16, 3.8, (12, 12, 11, 40)), 1045),  # the link is the bottleneck
        (offloading([*range(4), *range(3, -1, -1)], 8, 3, (5, 5, 5, 2.5), p2p_ms=0.0), 260),  # a V, bound 255
        (offloading([*range(8)] * 2, 16, 6, (5, 5, 5, 2.5), p2p_ms=0.0), 530),  # two chunks, bound 515
        (
            offloading(
                list(range(4)),
                12,
                1.75,
                (10, 10, 9),
                0.5,
                saved_for_weight_bytes=4 * GB,
                recompute_ms=10.0,
                checkpoint_bytes=GB // 2,
            ),
            540,
        ),
    ],
    ids=["fastlink", "slowlink", "v-shape", "loop", "recompute"],
)
def test_adaoffload_is_near_the_bound_where_1f1b_does_not_fit(problem, at_most):
    schedule = generate("adaoffload", problem)
    assert check(problem, schedule) == []
    assert schedule.makespan_ms <= at_most
    steady = systems.generate("1f1b", problem, "all")
    assert not certify(steady.problem, steady).fits


def pipe_offload_ms(problem: Problem) -> float:
    """The makespan of the better of PO-H and PO-F on the problem's stages and within its memory, infinity where there
    is none."""
    lengths = [float("inf")]
    for name in ("po-h", "po-f"):
        with contextlib.suppress(InputError):
            schedule = systems.generate(name, problem)
            if certify(problem, schedule).fits:
                lengths.append(schedule.makespan_ms)
    return min(lengths)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "examples" / "problems").glob("*.json")), ids=lambda path: path.stem
)
def test_adaoffload_is_never_worse_than_pipe_offload_at_the_same_memory(path):
    problem = Problem.load(path)
    assert generate("adaoffload", problem).makespan_ms <= pipe_offload_ms(problem)


@settings(max_examples=examples(20), deadline=None)
@given(looped(), st.floats(0.2, 1.0))
def test_nor_on_any_other_problem(problem, share):
    held = [sum(problem.stages[s].activation_bytes for s in problem.stages_on(d)) for d in range(len(problem.devices))]
    problem = with_budgets(problem, [int(share * problem.microbatches * size) + 30 for size in held])
    if infeasibility(problem) is None:
        assert generate("adaoffload", problem).makespan_ms <= pipe_offload_ms(problem) * (1 + 1e-12)


def test_in_optpipes_figure_4_adaoffload_is_shorter_than_pipe_offload():
    problem = Problem.load(Path(__file__).parents[2] / "examples" / "problems" / "figure4-4x6.json")
    assert generate("adaoffload", problem).makespan_ms == trivial_bound(problem) == 21
    assert pipe_offload_ms(problem) == 24


def test_where_pipe_offload_is_better_than_list_scheduling_it_comes_second():
    problem = Problem.load(Path(__file__).parents[2] / "examples" / "problems" / "shared-pcie-4x8.json")
    first, second = islice(STREAMS["adaoffload"](problem, "makespan"), 2)
    assert second.makespan_ms == pipe_offload_ms(problem) < first.makespan_ms
    assert {first.method, second.method} == {"adaoffload"}


def test_on_a_slow_link_every_activation_leaves_in_part():
    costs = {"offload_parts": 4}
    whole, parts = (offloading(list(range(8)), 16, 3.8, (12, 12, 11, 40), **some) for some in ({}, costs))
    best = {
        name: min(schedule.makespan_ms for schedule in islice(STREAMS["adaoffload"](problem, "makespan"), 40))
        for name, problem in (("whole", whole), ("parts", parts))
    }
    assert best["parts"] <= 0.9 * best["whole"]


def test_a_search_descends_however_many_starts_fail_before(monkeypatch):
    monkeypatch.setattr(tuning, "DESCENT_FAILURES", 2)
    problem = offloading([0, 1], 4, 2, (10, 10, 8, 12))
    starts = len(list(first_rules(Simulator(problem, is_compiled=False))))
    assert len(list(STREAMS["adaoffload"](problem, "makespan"))) > starts > 10


def test_the_objective_is_what_gets_small():
    problem = offloading(list(range(4)), 8, 3, (10, 10, 8, 12))
    by_span, by_makespan = (generate("adaoffload", problem, objective) for objective in ("span", "makespan"))
    assert length_ms(by_span, "span") <= length_ms(by_makespan, "span")
    assert length_ms(by_makespan, "makespan") <= length_ms(by_span, "makespan")


def overlapping(factor: float | None, memory: int = 100) -> Problem:
    return pipeline(3, 12, memory, stage((10, 10, 10), (5, 5)), overlap_factor=factor)


@settings(max_examples=examples(200), deadline=None)
@given(problems_with_schedules())
def test_what_is_paired_is_valid(pair):
    problem, schedule = pair
    together = join_pairs(schedule)
    assert together is None or check(problem, together) == []


def test_pairs_shorten_what_can_run_together():
    apart, together = (generate("adaoffload", overlapping(factor)) for factor in (None, 0.7))
    assert any("+" in text for program in together.programs for text in program.texts())
    assert together.makespan_ms < 0.9 * apart.makespan_ms


def test_without_a_factor_or_room_nothing_is_joined():
    for problem in (overlapping(None), overlapping(0.7, memory=5)):
        assert join_pairs(next(STREAMS["adaoffload"](problem, "makespan"))) is None


def test_engines_start_from_the_best_without_pairs():
    split, joined = (generate("adaoffload", overlapping(factor)) for factor in (None, 0.7))
    apart = replace(split, problem=joined.problem)
    assert joined.makespan_ms < apart.makespan_ms
    incumbents = Portfolio(Request(problem=joined.problem), print).incumbents
    for schedule in (joined, apart):
        assert incumbents.offer(schedule) is None
    assert incumbents.best == joined
    assert incumbents.best_of(is_modelled) == apart


@pytest.mark.parametrize("engine", ["dispatch", "lns", "cpsat", "milp"])
def test_an_engine_asked_for_by_name_says_that_it_makes_no_pairs(engine):
    notes: list[object] = []
    assert Portfolio(Request(problem=overlapping(None), method=engine), notes.append).supports(engine)
    assert notes == []
    assert Portfolio(Request(problem=overlapping(0.8), method=engine), notes.append).supports(engine)
    assert notes == [Note(text=f"{engine} makes no pairs: some heuristics and published schedules do")]
