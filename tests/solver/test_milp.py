"""OptPipe's MILP against every program there is (on tiny problems), against `check` (on random ones), and its
refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.oracles.enumeration import EXHAUSTIVE, LATE_START, best_of_all, problem_of, stage
from support.oracles.milp import Solver, solver_process

from optpipe import Problem, Schedule, check
from optpipe.evaluate.objective import Objective
from optpipe.lift import lift
from optpipe.process.protocol import Bound, End, Incumbent, Note, Programs
from optpipe_solver import milp
from optpipe_solver.milp.model import Model
from optpipe_solver.milp.search import assignment
from optpipe_solver.milp.variables import PLAIN, Switches


@pytest.fixture(scope="module")
def solver() -> Iterator[Solver]:
    with solver_process() as running:
        yield running


@pytest.mark.parametrize("name", EXHAUSTIVE)
def test_the_optimum_is_the_best_of_all_programs(solver: Solver, name: str) -> None:
    problem = EXHAUSTIVE[name]
    best, tried = best_of_all(problem, "makespan")
    values, bound = solver.solve(problem)
    assert tried > 10
    assert values[-1] == pytest.approx(best)
    assert bound == pytest.approx(best)


def test_what_the_model_lacks_is_said(solver: Solver) -> None:
    parts = stage(0, (2, 2, 1), 2, 1, (2, 2, 2), (1, 1), parts=2)
    notes = [frame.text for frame in solver.frames(problem_of([parts], [3], 2)) if isinstance(frame, Note)]
    assert notes[-1] == (
        "milp: its optimum is no bound, as the model has no recompute, no single parts of activations; method auto "
        "has no such limits"
    )


def test_each_search_says_how_it_ended(solver: Solver) -> None:
    problem = EXHAUSTIVE["both offload"]
    *_, note = [frame for frame in solver.frames(problem) if isinstance(frame, Note)]
    assert note.method == "milp"
    assert re.fullmatch(
        r"milp: HiGHS: optimal after \d+\.\d s and \d+ nodes, best 24 ms, bound 24 ms; \d+ variables, \d+ rows, with "
        "micro-batches in the order in which they enter",
        note.text,
    )


def test_a_problem_with_more_ops_than_the_limit_is_not_searched(solver: Solver) -> None:
    problem = EXHAUSTIVE["both offload"]  # 12 compute ops
    start, note, end = solver.frames(problem, milp_ops=11)
    assert isinstance(start, Incumbent)
    assert start.method == "adaoffload"
    assert isinstance(note, Note)
    assert "no search, as the problem has 12 compute ops, and milp_ops = 11" in note.text
    assert end == End()
    notes = [frame.text for frame in solver.frames(problem, milp_ops=12) if isinstance(frame, Note)]
    assert all("HiGHS: optimal" in note for note in notes)


OVERTAKING = {
    "the second device starts with micro-batch 1; with micro-batch 0 its span is 34 ms": (
        problem_of([stage(0, (1, 2, 3), 1, 1, (9, 9, 1)), stage(1, (3, 1, 3), 1, 1, (9, 1, 1))], [2, 2], 3, 4.0),
        "span",
        33.0,
    ),
    "all stay": (LATE_START, "span", 20.0),
    "a backward overtakes another; in the paper's fixed order it takes 22 ms": (
        problem_of([stage(0, (1, 1, 1), 1, 1, (9, 1, 1)), stage(1, (3, 1, 1), 1, 1)], [2, 2], 3, 2.0),
        "makespan",
        21.0,
    ),
}


@pytest.mark.parametrize(("problem", "objective", "optimum"), OVERTAKING.values(), ids=OVERTAKING)
def test_the_optimum_may_need_micro_batches_that_overtake(
    solver: Solver, problem: Problem, objective: Objective, optimum: float
) -> None:
    values, bound = solver.solve(problem, objective)
    assert values[-1] == bound == optimum


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Two or three stages on one or two devices, tight or ample memory, every kind of link."""
    number = st.integers(1, 4)
    placement = draw(st.sampled_from([[0], [0, 1], [0, 1, 0], [0, 1, 1]]))
    stages = []
    for device in placement:
        size = draw(number)
        away = (draw(number), draw(number), draw(st.integers(1, size))) if draw(st.booleans()) else None
        stages.append(
            stage(device, (draw(number), draw(number), draw(number)), size, draw(st.integers(0, size + 1)), away)
        )
    needs = [
        sum(max(s["activation_bytes"], s["saved_for_weight_bytes"]) for s in stages if s["device"] == d)
        for d in sorted(set(placement))
    ]
    return problem_of(
        stages,
        [need + draw(st.integers(0, 6)) for need in needs],
        draw(st.integers(1, 3)),
        float(draw(st.integers(0, 4))),
        devices=[{"link": "pcie"} if draw(st.booleans()) else {} for _ in needs],
        transfer_mode=draw(st.sampled_from(["half_duplex", "full_duplex"])),
    )


@settings(max_examples=examples(40))
@given(problem=problems(), objective=st.sampled_from(["makespan", "span"]))
def test_every_incumbent_runs_and_fits(solver: Solver, problem: Problem, objective: Objective) -> None:
    assert milp.unsupported(problem) is None
    values, bound = solver.solve(problem, objective, time_limit_s=1)
    assert values
    assert values == sorted(values, reverse=True)
    assert bound <= values[-1] * (1 + 1e-9)


@pytest.mark.parametrize(
    "name", ["both offload", "full duplex", "two chunks", "a shared link", "three micro-batches, no offload"]
)
@pytest.mark.parametrize("switches", [Switches(order="entry"), PLAIN], ids=["all", "plain"])
def test_a_warm_start_satisfies_every_row(solver: Solver, name: str, switches: Switches) -> None:
    problem = EXHAUSTIVE[name]
    incumbents = [frame for frame in solver.frames(problem) if isinstance(frame, Incumbent)]
    schedule = incumbents[-1].schedule.schedule(problem, "milp")
    model = Model(problem, "makespan", schedule.makespan_ms, switches)
    x = np.array(model.rows.lower)
    given = assignment(model.variables, schedule)
    assert set(given) == set(np.flatnonzero(model.rows.binary).tolist())
    x[list(given)] = list(given.values())
    x = model.rows.earliest(x)
    x[model.variables.length] = schedule.makespan_ms * model.scale
    begins, index, value = model.rows.matrix()
    sums = [value[a:b] @ x[index[a:b]] for a, b in pairwise(begins)]
    assert (np.array(sums) >= np.array(model.rows.at_least) - 1e-9).all()
    assert (x <= np.array(model.rows.upper) + 1e-9).all()
    assert check(problem, lift(problem, model.starts(x))) == []


def test_a_warm_start_may_move_some_parts_only(solver: Solver) -> None:
    """The model moves whole activations, so it is no start for the search, but still what is to be beaten."""
    parts = stage(0, (2, 2, 1), 2, 1, (2, 2, 2)) | {"offload_parts": 2}
    problem = problem_of([parts], [3], 2)
    one_part = Schedule.parse(problem, [["0F0", "0O0", "0D0", "0F1", "0BW1", "0R0", "0BW0"]])
    assert check(problem, one_part) == []
    values, _ = solver.solve(problem, warm_start=Programs.from_schedule(one_part))
    assert all(value < one_part.makespan_ms for value in values)


def test_a_warm_start_that_is_no_schedule_does_no_harm(solver: Solver) -> None:
    values, _ = solver.solve(EXHAUSTIVE["both offload"], warm_start=Programs(programs=("0F0 0B0", "nonsense")))
    assert values[-1] == 24.0


def test_no_bound_where_the_model_cannot_express_every_choice(solver: Solver) -> None:
    """BW needs less memory than B where the weight gradient needs more than the activation; the model has no BW."""
    problem = problem_of([stage(0, (2, 2, 1), 2, 3, (3, 3, 2)), stage(1, (2, 2, 1), 1, 1)], [3, 2], 2)
    assert not any(isinstance(frame, Bound) for frame in solver.frames(problem))


def test_a_device_without_memory_is_no_fault(solver: Solver) -> None:
    """Only BW would fit, which the model does not have."""
    problem = problem_of([stage(0, (1, 1, 1), 1), stage(1, (1, 1, 1), 0, 5)], [1, 0], 1)
    start, *notes, end = solver.frames(problem)
    assert end == End()
    assert isinstance(start, Incumbent)
    assert start.method == "adaoffload"
    assert "milp: HiGHS: infeasible after " in str(notes[0])


def test_what_is_supported() -> None:
    unsupported = milp.unsupported
    small = problem_of([stage(0, (2, 2, 1), 2, 1, (3, 3, 2))], [2], 3)
    large = small.model_copy(update={"microbatches": 1000})
    assert unsupported(small) is None
    assert unsupported(large) is None
    assert "some take none" in str(unsupported(problem_of([stage(0, (2, 2, 0), 2, 1)], [2], 3)))
    for host_memory, fits in ((6, True), (5, False)):
        devices = [{"host_memory_bytes": host_memory}]
        limited = problem_of([stage(0, (2, 2, 1), 2, 1, (3, 3, 2))], [2], 3, devices=devices)
        assert (unsupported(limited) is None) == fits
