"""A schedule of yesterday's figures becomes one of today's: valid always, in the old order as far as memory admits."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import GROUPS, stage
from support.problems import pipeline as make_pipeline
from support.problems.strategies import problems, schedules

from optpipe import Problem, Schedule, check
from optpipe.reuse import repair
from optpipe_solver.bounds.least_memory import least_memory
from optpipe_solver.heuristics import generate

OFFLOAD = {"offload_ms": 12.0, "reload_ms": 12.0, "offload_bytes": 500}


def pipeline(devices: int, microbatches: int, memory: int, size: int = 500, **costs: Any) -> Problem:
    each = stage((10, 10, 8), (size, 200)) | costs
    return make_pipeline(devices, microbatches, memory, each, p2p_ms=1.0)


@st.composite
def drifted(draw: Any) -> tuple[Problem, Schedule]:
    """A problem, and a schedule of one with other times and bytes, more memory and perhaps other abilities."""
    before = draw(problems(beyond=True))
    schedule = draw(schedules(before))
    content = before.to_dict()
    for costs in content["stages"]:
        for name in [name for name in costs if name.endswith("_ms")]:
            costs[name] = (np.array(costs[name]) * draw(st.sampled_from([0.0, 0.8, 1.0, 1.3]))).tolist()
        costs["activation_bytes"] = (np.array(costs["activation_bytes"]) + draw(st.integers(0, 3))).tolist()
        for ability in GROUPS.values():
            if draw(st.booleans()):
                for name in (*ability, *(["offload_parts"] if "offload_ms" in ability else [])):
                    costs.pop(name, None)
    if draw(st.booleans()):
        content.pop("overlap_factor", None)
    for device, least in zip(content["devices"], least_memory(Problem.from_dict(content)), strict=True):
        device["activation_budget_bytes"] = least + draw(st.sampled_from([0, 1, 5, 20, 100]))
    return Problem.from_dict(content), schedule


@settings(max_examples=examples(300), deadline=None)
@given(drifted())
def test_what_comes_back_is_valid_whatever_has_changed(pair):
    problem, schedule = pair
    found = repair(problem, schedule)
    assert found is None or check(problem, found) == []


def test_times_alone_change_nothing_but_the_clock():
    before = pipeline(4, 8, 1500, **OFFLOAD)
    schedule = generate("adaoffload", before)
    after = pipeline(4, 8, 1500, **{**OFFLOAD, "forward_ms": 13.0, "offload_ms": 15.0})
    found = repair(after, schedule)
    assert found is not None
    assert found.programs == schedule.programs
    assert found.problem == after


def test_what_can_no_longer_leave_stays():
    before, after = pipeline(4, 8, 1500, **OFFLOAD), pipeline(4, 8, 1500)
    found = repair(after, generate("adaoffload", before))
    assert found is not None
    assert check(after, found) == []


def test_of_another_pipeline_nothing_can_be_made():
    schedule = generate("adaoffload", pipeline(4, 8, 10**6))
    assert repair(pipeline(3, 8, 10**6), schedule) is None
    assert repair(pipeline(5, 8, 10**6), schedule) is None


def test_where_nothing_fits_there_is_none():
    assert repair(pipeline(4, 8, 499), generate("adaoffload", pipeline(4, 8, 10**6))) is None


def test_a_forward_without_a_backward_cannot_be_repaired():
    ample, tight = (pipeline(1, 1, memory) for memory in (1000, 100))
    assert repair(tight, Schedule.parse(ample, [["0F0"]])) is None
