"""Costs and memory change while a schedule is in use: the search goes on from it, at once and no worse than it is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import optpipe
from optpipe import Problem, Schedule, certify, check
from optpipe.process.protocol import Incumbent, Note, Programs, Request
from optpipe_solver import heuristics
from optpipe_solver.portfolio import Portfolio

EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"
NAMES = ("shared-pcie-4x8", "recompute-4x12", "vshape-4x8")


def drifted(problem: Problem, share: float, seed: int) -> Problem:
    """Every stage's times, each by up to so much."""
    noise = random.Random(seed)
    content = problem.model_dump(mode="json", exclude_none=True)
    for stage in content["stages"]:
        stage |= {name: ms * (1 + noise.uniform(-share, share)) for name, ms in stage.items() if name.endswith("_ms")}
    return Problem.from_dict(content)


def with_memory(problem: Problem, share: float) -> Problem:
    content: dict[str, Any] = problem.model_dump(mode="json", exclude_none=True)
    for device in content["devices"]:
        device["activation_budget_bytes"] = int(share * device["activation_budget_bytes"])
    return Problem.from_dict(content)


@pytest.mark.parametrize("name", NAMES)
def test_after_costs_have_drifted_the_first_result_is_the_old_schedule_re_timed(name):
    old = heuristics.generate("adaoffload", Problem.load(EXAMPLES / f"{name}.json"), "makespan")
    now = drifted(old.problem, 0.1, seed=1)
    re_timed = Schedule(now, old.programs, old.links)
    assert check(now, re_timed) == []
    search = optpipe.improve(now, method="adaoffload", time_limit_s=600.0, warm_start=old)
    first = next(search)
    search.cancel()
    *_, last = first, *search
    assert first.method == "adaoffload"
    assert first.makespan_ms == pytest.approx(re_timed.makespan_ms)
    assert last.makespan_ms <= re_timed.makespan_ms * (1 + 1e-9)
    assert last.notes == ()


@pytest.mark.parametrize("name", NAMES)
def test_with_less_memory_it_is_still_valid(name):
    old = heuristics.generate("adaoffload", Problem.load(EXAMPLES / f"{name}.json"), "makespan")
    less = with_memory(old.problem, 0.9)
    assert check(less, Schedule(less, old.programs, old.links)) != []
    frames: list[object] = []
    Portfolio(
        Request(problem=less, method="naive", warm_start=Programs.from_schedule(old), time_limit_s=10.0), frames.append
    ).run()
    found = [frame.schedule.schedule(less, frame.method) for frame in frames if isinstance(frame, Incumbent)]
    assert found[0].method == "adaoffload"  # repaired, before anything else is there
    assert not any(isinstance(frame, Note) for frame in frames)
    assert all(check(less, schedule) == [] for schedule in found)
    assert all(
        peak.bytes <= device.activation_budget_bytes
        for peak, device in zip(certify(less, found[-1]).device, less.devices, strict=True)
    )


def test_a_better_schedule_for_the_changed_problem_is_still_found():
    problem = Problem.load(EXAMPLES / "slowlink-8x16.json")
    poor = heuristics.generate("naive", problem, "makespan")
    now = drifted(problem, 0.1, seed=2)
    search = optpipe.improve(now, method="adaoffload", time_limit_s=600.0, warm_start=poor)
    first, better = next(search), next(search)
    search.cancel()
    assert first.method == "naive"
    assert better.method == "adaoffload"
    assert better.makespan_ms < first.makespan_ms
