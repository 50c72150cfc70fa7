"""OptPipe's MILP against `check` (on random problems), to the byte, and its refusals. `test_milp_switches` compares it
with every program there is."""

from __future__ import annotations

import re
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.frames import notes, schedules
from support.oracles.enumeration import EXHAUSTIVE, LATE_START, best_of_all, problem_of, stage
from support.oracles.milp import Solver
from support.problems.small import lasting, problems_of_every_sort

from optpipe import Problem, Schedule, check
from optpipe.evaluate.objective import Objective
from optpipe.lift import lift
from optpipe.process.protocol import Bound, End, Incumbent, Note, Programs
from optpipe_solver import milp
from optpipe_solver.bounds import trivial_bound
from optpipe_solver.milp.backends import TOLERANCE
from optpipe_solver.milp.model import Model
from optpipe_solver.milp.rows import Literal, Rows
from optpipe_solver.milp.search import assignment
from optpipe_solver.milp.variables import MIB, PLAIN, Switches, Units


def test_what_the_model_lacks_is_said(solver: Solver) -> None:
    parts = stage(0, (2, 2, 1), 2, 1, (2, 2, 2), (1, 1), parts=2)
    assert notes(solver.frames(problem_of([parts], [3], 2)))[-1] == (
        "milp: its optimum is no bound, as the model has no recompute, no single parts of activations; method auto "
        "has no such limits"
    )


def test_each_search_says_how_it_ended(solver: Solver) -> None:
    assert re.fullmatch(
        r"milp: HiGHS: optimal after \d+\.\d s and \d+ nodes, best 24 ms, bound 24 ms; \d+ variables, \d+ rows, with "
        "micro-batches in the order in which they enter",
        notes(solver.frames(EXHAUSTIVE["both offload"]))[-1],
    )


def test_a_problem_with_more_ops_than_the_limit_is_not_searched(solver: Solver) -> None:
    problem = EXHAUSTIVE["both offload"]  # 12 compute ops
    start, note, end = solver.frames(problem, milp_ops=11)
    assert isinstance(start, Incumbent)
    assert start.method == "adaoffload"
    assert "no search, as the problem has 12 compute ops, and milp_ops = 11" in notes([note])[0]
    assert end == End()
    assert all("HiGHS: optimal" in text for text in notes(solver.frames(problem, milp_ops=12)))


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


@settings(max_examples=examples(40))
@given(problem=problems_of_every_sort().map(lasting), objective=st.sampled_from(["makespan", "span"]))
def test_every_incumbent_runs_and_fits(solver: Solver, problem: Problem, objective: Objective) -> None:
    assume(milp.unsupported(problem) is None)
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
    schedule = schedules(solver.frames(problem), problem)[-1]
    model = Model(problem, "makespan", schedule.makespan_ms, switches)
    x = np.array(model.rows.lower)
    start = assignment(model.variables, schedule)
    assert set(start) == set(np.flatnonzero(model.rows.binary).tolist())
    x[list(start)] = list(start.values())
    x = model.rows.earliest(x)
    x[model.variables.length] = schedule.makespan_ms * model.scale
    assert all(np.dot(value, x[index]) >= at_least - 1e-9 for index, value, at_least in model.rows.each())
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
    start, *reports, end = solver.frames(problem)
    assert end == End()
    assert isinstance(start, Incumbent)
    assert start.method == "adaoffload"
    assert "milp: HiGHS: infeasible after " in notes(reports)[0]


def test_what_is_supported() -> None:
    away = stage(0, (2, 2, 1), 2, 1, (3, 3, 2))
    small = problem_of([away], [2], 3)
    assert milp.unsupported(small) is milp.unsupported(small.model_copy(update={"microbatches": 1000})) is None
    assert "some take none" in str(milp.unsupported(problem_of([stage(0, (2, 2, 0), 2, 1)], [2], 3)))
    for host_memory, fits in ((6, True), (5, False)):
        limited = problem_of([away], [2], 3, devices=[{"host_memory_bytes": host_memory}])
        assert (milp.unsupported(limited) is None) == fits


# The MILP counts bytes in units: what fits in units fits, and no bound is above a schedule that fits to the byte.
BYTES = st.one_of(st.integers(1, 30), st.integers(1, 2**46), st.integers(10**10 - 3, 10**10 + 3))
SIZES = st.integers(1, 2**18)  # in units
LEAST = 5 * TOLERANCE  # a solver may be off by one TOLERANCE in a row, and by one in each binary


@st.composite
def capacities(draw: st.DrawFn) -> tuple[list[tuple[int, bool]], int]:
    """Up to eight sizes, some of them equal or negative, of literals or their negations; and a limit: the sum of some
    of them, one more or one less."""
    kinds = draw(st.lists(SIZES, min_size=1, max_size=4))
    sizes = [draw(st.sampled_from(kinds)) * draw(st.sampled_from([1, 1, -1])) for _ in range(draw(st.integers(1, 8)))]
    limit = sum(draw(st.lists(st.sampled_from(sizes), max_size=len(sizes)))) + draw(st.integers(-1, 1))
    return [(size, draw(st.booleans())) for size in sizes], limit


@settings(max_examples=examples(150))
@given(capacities())
def test_rows_hold_exactly_where_the_sizes_fit(capacity: tuple[list[tuple[int, bool]], int]) -> None:
    sizes, limit = capacity
    rows = Rows()
    literals = [rows.new_literal() for _ in sizes]
    rows.add_capacity([(size, Literal(x.var, sign)) for (size, sign), x in zip(sizes, literals, strict=True)], limit)
    for values in product((0.0, 1.0), repeat=len(sizes)):
        x = np.array(values)
        held = sum(size for (size, sign), truth in zip(sizes, values, strict=True) if sign == bool(truth))
        missing = [(at_least - np.dot(value, x[index]), value) for index, value, at_least in rows.each()]
        assert (max((lacks for lacks, _ in missing), default=0.0) <= 1e-9) == (held <= limit)
        assert held <= limit or any(lacks > LEAST * (1 + np.abs(value).sum()) for lacks, value in missing)


@pytest.mark.parametrize("backend", ["highs", "gurobi"])
@pytest.mark.parametrize("odd", [0, 1])
def test_a_byte_less_than_three_activations_holds_two(solver: Solver, backend: str, odd: int) -> None:
    """Three of slowlink-8x16's stages. With an odd byte sizes are rounded, and 3 may seem to fit, or not to fit."""
    if backend == "gurobi":
        pytest.importorskip("gurobipy")
    size = 10_000_000_000 + odd
    costs = [stage(d, (12, 12, 11), size, 4_000_000_000, (40, 40, size)) for d in range(3)]
    for limit in (3 * size - 1, 3 * size - 4 * MIB, 3 * size):
        problem = problem_of(costs, [limit] * 3, 3)
        assert Units(problem).lossless == (not odd)
        values, bound = solver.solve(problem, solver=backend)
        best, other = (135.0, 163.0) if limit == 3 * size else (163.0, 135.0)
        if not odd or limit == 3 * size - 4 * MIB:
            assert values[-1] == bound == best
        else:
            assert bound <= best <= values[-1]
            assert {bound, values[-1]} <= {best, other}


@st.composite
def tiny_problems(draw: st.DrawFn) -> Problem:
    """Memory of the first device is at a corner: the sum of some sizes, or a byte beside it. It is for one activation
    and less than two, so that the length depends on what may leave in time."""
    activation, kept, moved = sorted((draw(BYTES), draw(BYTES), draw(BYTES)), reverse=True)
    if draw(st.booleans()):
        kept, moved = moved, kept
    sums = {sum(some) for n in range(1, 4) for some in combinations([activation, kept, moved] * 2, n)}
    memory = draw(st.sampled_from(sorted(sums))) + draw(st.integers(-1, 1))
    stages = [stage(0, (2, 2, 1), activation, kept, (1, 2, moved)), stage(1, (3, 2, 1), 1, 1)]
    return problem_of(stages, [min(max(memory, activation), 2 * activation - 1), 1], 2)


@pytest.mark.parametrize("examples", [20, pytest.param(300, marks=pytest.mark.soak)])
def test_no_byte_makes_a_bound_wrong(solver: Solver, examples: int) -> None:
    """Against every program there is: the bound is below the best, and equal to it where no size is rounded."""
    optima, is_lossless = set(), set()

    @settings(max_examples=examples)
    @given(tiny_problems())
    def holds(problem: Problem) -> None:
        best, _ = best_of_all(problem, "makespan")
        values, bound = solver.solve(problem)  # each schedule is checked to the byte
        assert all(frame.method for frame in solver.frames(problem) if isinstance(frame, Note))
        assert trivial_bound(problem) <= bound <= best * (1 + 1e-9)
        assert values[-1] >= best * (1 - 1e-9)
        if Units(problem).lossless:
            assert values[-1] == pytest.approx(best)
            assert bound == pytest.approx(best)
        optima.add(best)
        is_lossless.add(Units(problem).lossless)

    holds()
    assert len(optima) > 1  # bytes matter
    assert is_lossless == {False, True}
