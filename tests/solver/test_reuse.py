"""A schedule of yesterday's figures becomes one of today's: valid, in the old order as far as memory admits, and short.
A search begins with it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.frames import notes
from support.frames import schedules as schedules_of
from support.problems import GROUPS, stage, with_budgets
from support.problems import pipeline as make_pipeline
from support.problems.strategies import problems, schedules

from optpipe import Problem, Schedule, check, reuse
from optpipe.process.protocol import Programs, Request
from optpipe.reuse import adapt, by_rules, repair
from optpipe_solver import heuristics, systems
from optpipe_solver.bounds.least_memory import least_memory
from optpipe_solver.heuristics import generate
from optpipe_solver.portfolio import Portfolio

EXAMPLES = Path(__file__).parents[2] / "examples/problems"
OFFLOAD = {"offload_ms": 12.0, "reload_ms": 12.0, "offload_bytes": 500}
AMPLE = Problem.load(EXAMPLES / "ample-8x24.json")
OVERLAPPING = AMPLE.replace(microbatches=2, overlap_factor=0.8)
ONE_BY_ONE = [[f"{s}F0", f"{s}F1", f"{s}BW0", f"{s}BW1"] for s in range(8)]
PAIRED = Schedule.parse(OVERLAPPING, [*ONE_BY_ONE[:-1], ["7F0", "7F1+7BW0", "7BW1"]])


def pipeline(devices: int, microbatches: int, memory: int, **costs: Any) -> Problem:
    return make_pipeline(devices, microbatches, memory, stage((10, 10, 8), (500, 200)) | costs, p2p_ms=1.0)


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


@pytest.mark.parametrize("name", ["shared-pcie-4x8", "recompute-4x12", "vshape-4x8"])
def test_times_alone_change_nothing_but_the_clock(name: str) -> None:
    old = generate("adaoffload", Problem.load(EXAMPLES / f"{name}.json"))
    slower = [{**s.model_dump(exclude_none=True), "forward_ms": 1.1 * s.forward_ms} for s in old.problem.stages]
    now = old.problem.replace(stages=slower)
    for found in (repair(now, old), first_of_search(now, old)):
        assert (found.programs, found.links, found.problem) == (old.programs, old.links, now)
        assert check(now, found) == []


def first_of_search(problem: Problem, start: Schedule) -> Schedule:
    """What a search has first that is given a schedule of other figures."""
    frames: list[object] = []
    Portfolio(Request(problem=problem, warm_start=Programs.from_schedule(start)), frames.append).begin()
    assert notes(frames) == []
    return schedules_of(frames, problem)[0]


@pytest.mark.parametrize("name", ["shared-pcie-4x8", "recompute-4x12", "vshape-4x8"])
def test_with_less_memory_a_search_begins_with_what_is_repaired(name: str) -> None:
    old = heuristics.generate("adaoffload", Problem.load(EXAMPLES / f"{name}.json"))
    less = with_budgets(old.problem, [int(0.9 * device.activation_budget_bytes) for device in old.problem.devices])
    assert check(less, Schedule(less, old.programs, old.links)) != []
    assert check(less, first_of_search(less, old)) == []


def test_what_can_no_longer_leave_stays():
    before, after = pipeline(4, 8, 1500, **OFFLOAD), pipeline(4, 8, 1500)
    found = repair(after, generate("adaoffload", before))
    assert found is not None
    assert check(after, found) == []


@pytest.mark.parametrize("other", [pipeline(3, 8, 10**6), pipeline(5, 8, 10**6), pipeline(4, 8, 499)])
def test_of_another_pipeline_or_where_nothing_fits_none_can_be_made(other: Problem) -> None:
    assert repair(other, generate("adaoffload", pipeline(4, 8, 10**6))) is None


def test_a_forward_without_a_backward_cannot_be_repaired():
    ample, tight = (pipeline(1, 1, memory) for memory in (1000, 100))
    assert repair(tight, Schedule.parse(ample, [["0F0"]])) is None


SHORTER = tuple(device.model_copy(update={"activation_budget_bytes": 128 * 10**9}) for device in AMPLE.devices)


@pytest.mark.parametrize(
    ("changed", "bound_ms"),  # what the first and the last device cannot do without
    [({"devices": SHORTER}, 790), ({"microbatches": 18}, 610), ({"microbatches": 36}, 1150)],
)
def test_rules_lead_to_a_short_schedule_where_an_order_does_not(changed: dict[str, Any], bound_ms: float) -> None:
    wanted = AMPLE.replace(**changed)
    found = adapt(wanted, systems.generate("zb-h1", AMPLE))
    assert found is not None
    assert check(wanted, found) == []
    assert bound_ms <= found.makespan_ms <= 1.05 * bound_ms


def test_rules_say_nothing_of_pairs() -> None:
    assert by_rules(OVERLAPPING, Schedule.parse(OVERLAPPING, ONE_BY_ONE), "makespan") is not None
    assert check(OVERLAPPING, PAIRED) == []
    assert by_rules(OVERLAPPING, PAIRED, "makespan") is None


def test_an_order_of_many_ops_is_not_repaired_and_that_is_reported(monkeypatch: Any, caplog: Any) -> None:
    slower = OVERLAPPING.replace(p2p_ms=2.0)
    assert adapt(slower, PAIRED) is not None
    monkeypatch.setattr(reuse, "MOST_REPAIRED", 31)
    assert adapt(slower, PAIRED) is None
    assert "not repaired: of 32 ops, more than 31 would take too long" in caplog.text
