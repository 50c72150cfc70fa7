"""A schedule with more or fewer micro-batches: its order is valid, and a steady state stays what it is."""

from __future__ import annotations

from collections import Counter
from itertools import islice, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.problems import pipeline, stage
from support.strategies import problems_with_schedules

from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.reuse.adapt import adapt
from optpipe.reuse.microbatches import recut
from optpipe.schedule import Schedule, check


def one_f_one_b(problem: Problem) -> Schedule:
    p, m = len(problem.devices), problem.microbatches
    programs = []
    for s in range(p):
        warm = min(m, p - s)
        ops = [f"{s}F{j}" for j in range(warm)]
        for j in range(m):
            ops.append(f"{s}BW{j}")
            if warm + j < m:
                ops.append(f"{s}F{warm + j}")
        programs.append(ops)
    return Schedule.parse(problem, programs)


def offloading(problem: Problem) -> Schedule:
    """Two devices on one link: each activation leaves behind its forward and comes back behind the next forward."""
    m = problem.microbatches
    programs = []
    for s in range(2):
        ops = [f"{s}F0", f"{s}O0"]
        for j in range(m):
            ops += [f"{s}F{j + 1}", f"{s}D{j}", f"{s}O{j + 1}"] if j + 1 < m else [f"{s}D{j}"]
            ops += [f"{s}R{j}", f"{s}BW{j}"]
        programs.append(ops)
    moved = ["0O0", "1O0"]
    for j in range(m):
        later = [f"0O{j + 1}", f"1O{j + 1}"] if j + 1 < m else []
        moved += [*later, f"1R{j}", f"0R{j}"]
    return Schedule.parse(problem, programs, {"pcie": moved})


@pytest.mark.parametrize("after", [4, 9, 12, 13, 31, 64])
def test_one_forward_one_backward_stays_what_it_is(after: int) -> None:
    problem = pipeline(4, 12, 5, stage((1, 1, 1), (1, 1)))
    found = next(recut(problem.replace(microbatches=after), one_f_one_b(problem)))
    assert found.programs == one_f_one_b(problem.replace(microbatches=after)).programs


@pytest.mark.parametrize("after", [5, 9, 24])
def test_a_shared_links_order_changes_with_its_programs(after: int) -> None:
    costs = stage((1, 1, 1), (1, 1), offload=(0.4, 0.4, 1))
    problem = pipeline(2, 8, 4, costs, device={"link": "pcie"})
    schedule, wanted = offloading(problem), problem.replace(microbatches=after)
    assert check(problem, schedule) == []
    found = next(recut(wanted, schedule))
    assert check(wanted, found) == []
    assert found.makespan_ms == pytest.approx(offloading(wanted).makespan_ms)
    adapted = adapt(wanted, schedule)
    assert adapted is not None
    assert adapted.makespan_ms <= found.makespan_ms


@given(problems_with_schedules(), st.integers(1, 9))
@settings(max_examples=examples(100))
def test_what_is_adapted_is_valid(both: tuple[Problem, Schedule], after: int) -> None:
    problem, schedule = both
    if len(problem.all_routes) > 1:
        return
    wanted = problem.replace(microbatches=after)
    for found in islice(recut(wanted, schedule), 3):
        ops = Counter(op for program in found.programs for op in program.ops())
        assert max(ops.values()) == 1
        forwards = {(op.stage, op.microbatch) for op in ops if op.kind == Kind.F}
        assert forwards == set(product(range(len(wanted.stages)), range(after)))
    adapted = adapt(wanted, schedule)
    assert adapted is None or check(wanted, adapted) == []


def test_an_order_that_does_not_repeat_gives_its_rules() -> None:
    problem = pipeline(1, 3, 9, stage((1, 1, 1), (1, 1)))
    backwards = Schedule.parse(problem, [["0F2", "0F1", "0F0", "0BW2", "0BW1", "0BW0"]])
    wanted = problem.replace(microbatches=5)
    assert list(recut(wanted, backwards)) == []
    found = adapt(wanted, backwards)
    assert found is not None
    assert check(wanted, found) == []
    assert found.makespan_ms == 15
