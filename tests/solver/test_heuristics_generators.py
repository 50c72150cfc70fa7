"""The papers' schedules: their shapes where these are known, and how good they are where memory is short."""

from __future__ import annotations

import contextlib
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import pipeline as make_pipeline
from support.problems import stage as problem_stage
from support.problems.strategies import looped, problems

from optpipe import InputError, Problem, certify, check
from optpipe.dispatch.simulate import Simulator
from optpipe.dispatch.starts import first_rules
from optpipe.evaluate.objective import length_ms
from optpipe_solver import systems, tuning
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.bounds.least_memory import infeasibility, least_memory
from optpipe_solver.clock import Clock
from optpipe_solver.heuristics import STREAMS, generate
from optpipe_solver.methods import HEURISTICS

GB = 10**9


def pipeline(
    placement: list[int], microbatches: int, memory: float, ms: tuple[float, ...], p2p_ms: float = 1.0, **costs: Any
) -> Problem:
    """Stages by device, with F, B, W and, if given, offload time; `memory` in activations."""
    away = {"offload": (ms[3], ms[3], 5 * GB)} if len(ms) > 3 else {}
    stages = [problem_stage(ms[:3], (5 * GB, 2 * GB), device=d, **away, **costs) for d in placement]
    return make_pipeline(max(placement) + 1, microbatches, int(memory * 5 * GB), stages, p2p_ms=p2p_ms)


@settings(max_examples=examples(40), deadline=None)
@given(problems())
def test_they_are_whole_schedules_of_any_problem(problem):
    for name in HEURISTICS:
        for schedule in islice(STREAMS[name](problem, "makespan"), 12):
            assert check(problem, schedule) == []
            assert schedule.method == name
            assert schedule.makespan_ms >= trivial_bound(problem) - 1e-9


@st.composite
def tight_problems(draw):
    """Any problem, with hardly more memory than the least."""
    problem = draw(problems(max_stages=5, max_microbatches=5))
    content = problem.to_dict()
    for device in content["devices"]:
        host = draw(st.sampled_from([None, 0, 5, 25, 60]))
        device |= {} if host is None else {"host_memory_bytes": host}
    for device, needed in zip(content["devices"], least_memory(Problem.from_dict(content)), strict=True):
        device["activation_budget_bytes"] = needed + draw(st.sampled_from([0, 0, 1, 5, 20]))
    return Problem.from_dict(content)


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


def test_naive_needs_the_memory_of_one_micro_batch():
    problem = pipeline([0, 1, 1, 0], 3, 2, (10, 10, 8))
    schedule = generate("naive", problem)
    assert [peak.bytes for peak in certify(problem, schedule).device] == [10 * GB, 10 * GB]
    assert schedule.makespan_ms == 3 * (4 * 10 + 4 * 18 + 4 * 1)


def test_zero_bubble_reaches_the_bound_where_memory_is_ample():
    problem = pipeline(list(range(8)), 24, 16, (10, 10, 10), p2p_ms=0.0)
    assert generate("adaoffload", problem).makespan_ms == trivial_bound(problem) == 790.0


@pytest.mark.parametrize(
    ("problem", "at_most"),
    [
        (pipeline(list(range(8)), 16, 3, (10, 10, 8, 12)), 590),  # bound 525; 1F1B, which does not fit, 684
        (pipeline(list(range(8)), 16, 3.8, (12, 12, 11, 40)), 1045),  # the link is the bottleneck
        (pipeline([*range(4), *range(3, -1, -1)], 8, 3, (5, 5, 5, 2.5), p2p_ms=0.0), 260),  # a V, bound 255
        (pipeline([*range(8)] * 2, 16, 6, (5, 5, 5, 2.5), p2p_ms=0.0), 530),  # two chunks, bound 515
        (
            pipeline(
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
    memory = [int(share * problem.microbatches * size) + 30 for size in held]
    problem = problem.replace(
        devices=[
            device.model_copy(update={"activation_budget_bytes": size})
            for device, size in zip(problem.devices, memory, strict=True)
        ]
    )
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
    whole, parts = (pipeline(list(range(8)), 16, 3.8, (12, 12, 11, 40), **some) for some in ({}, costs))
    best = {
        name: min(schedule.makespan_ms for schedule in islice(STREAMS["adaoffload"](problem, "makespan"), 40))
        for name, problem in (("whole", whole), ("parts", parts))
    }
    assert best["parts"] <= 0.9 * best["whole"]


def test_a_search_descends_however_many_starts_fail_before(monkeypatch):
    monkeypatch.setattr(tuning, "DESCENT_FAILURES", 2)
    problem = pipeline([0, 1], 4, 2, (10, 10, 8, 12))
    starts = len(list(first_rules(Simulator(problem, is_compiled=False))))
    assert len(list(STREAMS["adaoffload"](problem, "makespan"))) > starts > 10


def test_the_objective_is_what_gets_small():
    problem = pipeline(list(range(4)), 8, 3, (10, 10, 8, 12))
    by_span, by_makespan = (generate("adaoffload", problem, objective) for objective in ("span", "makespan"))
    assert length_ms(by_span, "span") <= length_ms(by_makespan, "span")
    assert length_ms(by_makespan, "makespan") <= length_ms(by_span, "makespan")
