"""Each step of section 4.1, and each backend, leaves the optimum of the MILP as it is."""

import importlib.util
import re
import sys
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.examples import examples
from support.oracles.enumeration import EXHAUSTIVE, SPAN, best_of_all, problem_of, stage
from support.oracles.milp import Solver

from optpipe import Problem, Schedule
from optpipe.evaluate.objective import Objective
from optpipe.process.child import Child
from optpipe.process.protocol import Incumbent, Note, Programs, Request
from optpipe_solver.milp.backends import PIP_SIZE, UnavailableError, find_backend, is_licensed
from optpipe_solver.milp.model import Model, all_orders, no_cycles_of_three
from optpipe_solver.milp.rows import FALSE, TRUE, Rows
from optpipe_solver.milp.variables import ALL, WITHOUT_STEPS

SWITCHES = {
    "all": ALL,
    "order none": replace(ALL, order="none"),
    "order entry": replace(ALL, order="entry"),
    "two a pair": replace(ALL, one_per_pair=False),
    "all orders": replace(ALL, determined=False),
    "no triangles": replace(ALL, triangles="none"),
    "all triangles": replace(ALL, triangles="all"),
    "cold": replace(ALL, warm_start=False),
    "one big-M": replace(ALL, tight=False),
    "no workload": replace(ALL, workload=False),
    "plain": WITHOUT_STEPS,
    "plain, all triangles": replace(WITHOUT_STEPS, triangles="all"),
    "plain but in order of entry": replace(WITHOUT_STEPS, order="entry"),
    "plain but in one order": replace(WITHOUT_STEPS, order="stages"),
}
EXAMPLES = Path(__file__).parents[2] / "examples" / "problems"
BACKENDS = {"gurobi": "gurobipy", "pulp": "pulp", "pulp:HiGHS": "pulp"}


@pytest.fixture(params=BACKENDS)
def other(request: pytest.FixtureRequest) -> str:
    """A backend that is not the default."""
    name: str = request.param
    if importlib.util.find_spec(BACKENDS[name]) is None:
        pytest.skip(f"{BACKENDS[name]} is not installed")
    return name


FULL_DUPLEX = EXHAUSTIVE["a shared link"].model_copy(update={"transfer_mode": "full_duplex"})
EACH = [(SPAN, "span"), *((problem, "makespan") for problem in EXHAUSTIVE.values()), (EXHAUSTIVE["two chunks"], "span")]


@pytest.mark.parametrize(
    ("switches", "problem", "objective"),
    [
        *((switches, *each) for switches in SWITCHES for each in EACH),
        *(("order entry", problem, "span") for problem in EXHAUSTIVE.values()),
        *(("all", FULL_DUPLEX, objective) for objective in ("makespan", "span")),
    ],
)
def test_no_switch_changes_the_optimum(solver: Solver, switches: str, problem: Problem, objective: Objective) -> None:
    """Of every sort of problem: shared links, two chunks and two directions among them."""
    finds_the_best_of_all_programs(solver, problem, objective, switches=SWITCHES[switches])


def finds_the_best_of_all_programs(milp: Solver, problem: Problem, objective: Objective, **asked: object) -> None:
    best, _ = best_of_all(problem, objective)
    values, bound = milp.solve(problem, objective, **asked)
    assert values[-1] == pytest.approx(best)
    assert bound == pytest.approx(best)


def test_triangles_of_all_orders_are_of_each_variable() -> None:
    """Transfers of a link, drops and reloads among the ops of a device."""
    v = Model(EXHAUSTIVE["both offload"], "makespan", 60.0, WITHOUT_STEPS).variables
    nodes = [set(order.values()) for order in all_orders(v)]
    transfers = (v.offload_before, v.reload_before, v.offload_before_reload)
    for literals in (v.op_before, *transfers, v.drop_before, v.return_before):
        assert literals
        assert any(set(literals.values()) & of_order for of_order in nodes)


def test_triangles_leave_no_cycle_of_three_and_all_orders() -> None:
    rows = Rows()
    pairs = {pair: rows.new_literal() for pair in combinations("abc", 2)}
    no_cycles_of_three(rows, pairs | {(y, x): ~literal for (x, y), literal in pairs.items()})
    allowed = [
        all(np.dot(value, np.array(values)[index]) >= at_least - 1e-9 for index, value, at_least in rows.each())
        for values in product((0.0, 1.0), repeat=3)
    ]
    assert sum(allowed) == 6


@st.composite
def programs(draw: st.DrawFn) -> tuple[Rows, int]:
    """Four literals and six times, in an order that none contradicts; some rows hold only with literals."""
    rows = Rows()
    literals = [rows.new_literal() for _ in range(4)]
    times = [rows.new_variable(draw(st.integers(0, 3)), 30.0) for _ in range(6)]
    either = st.sampled_from(literals).flatmap(lambda literal: st.sampled_from([literal, ~literal]))
    for later, earlier in draw(st.lists(st.sampled_from([*combinations(reversed(times), 2)]), min_size=4, max_size=14)):
        span = draw(st.integers(0, 3)), draw(st.one_of(st.sampled_from([TRUE, FALSE]), either))
        rows.add_follows(later, earlier, draw(st.integers(0, 4)), span, tuple(draw(st.lists(either, max_size=2))))
    for clause in draw(st.lists(st.lists(either, min_size=1, max_size=3), max_size=4)):
        rows.add_clause(*clause)
    return rows, draw(st.sampled_from(times))


def least(rows: Rows, objective: int) -> float:
    """The least value of a variable, by trying all binaries; infinite where no values satisfy all rows."""
    free, best = np.flatnonzero(rows.binary), np.inf
    for values in product((0.0, 1.0), repeat=len(free)):
        x = np.array(rows.lower)
        x[free] = values
        x = rows.earliest(x)
        if (x <= np.array(rows.upper) + 1e-9).all() and all(
            np.dot(value, x[index]) >= at_least - 1e-9 for index, value, at_least in rows.each()
        ):
            best = min(best, float(x[objective]))
    return best


@settings(max_examples=examples(200))
@given(programs())
def test_reduced_rows_have_the_same_optimum(program: tuple[Rows, int]) -> None:
    rows, objective = program
    reduced, kept = rows.reduced(objective)
    assert reduced.length <= rows.length
    assert least(reduced, kept.tolist().index(objective)) == least(rows, objective)


def test_a_request_says_which_triangles_are_rows() -> None:
    rows = []
    for triangles in ("none", "compute", "all"):
        asked = Request(problem=EXHAUSTIVE["both offload"], method="milp", solver="highs", triangles=triangles)
        frames = Child("optpipe_solver.engines", asked).frames()
        reports = [frame.text for frame in frames if isinstance(frame, Note) and frame.method and not frame.ongoing]
        rows.append(int(re.findall(r" (\d+) rows", reports[0])[0]))
    assert rows[0] < rows[1] < rows[2]


def test_windows_have_no_triangles() -> None:
    asked = Request(problem=EXHAUSTIVE["both offload"], method="milp", solver="highs", threads=1, milp_ops=1)
    sizes = []
    for triangles in ("none", "all"):
        frames = Child("optpipe_solver.engines", asked.model_copy(update={"triangles": triangles})).frames()
        texts = [frame.text for frame in frames if isinstance(frame, Note) and "windows" in frame.text]
        sizes.append(re.findall(r" (\d+) rows", texts[0])[0])
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("name", EXHAUSTIVE)
def test_every_backend_has_the_same_optimum(solver: Solver, other: str, name: str) -> None:
    finds_the_best_of_all_programs(solver, EXHAUSTIVE[name], "makespan", solver=other)


@pytest.mark.parametrize("name", ["highs", *BACKENDS])
def test_a_start_raises_no_bound(solver: Solver, name: str) -> None:
    """A start leaves some variables open, and the best that they allow is no bound of the whole: this start is far from
    the optimum."""
    pytest.importorskip(BACKENDS.get(name, "numpy"))
    problem = problem_of([stage(0, (2, 2, 1), 1, 1, (1, 1, 1)), stage(1, (2, 2, 1), 1, 1)], [2, 2], 3)
    offloads = "0F0 0B0 0W0 0F1 0O1 0D1 0R1 0B1 0W1 0F2 0O2 0D2 0R2 0B2 0W2"
    start = Schedule.parse(problem, [offloads.split(), ["1F0", "1B0", "1W0", "1F1", "1B1", "1W1", "1F2", "1B2", "1W2"]])
    values, bound = solver.solve(problem, solver=name, warm_start=Programs.from_schedule(start))
    assert start.makespan_ms > values[-1] == bound


@pytest.mark.parametrize("name", ["gurobi", "pulp:gurobi"])
def test_what_is_too_large_for_pips_licence_of_gurobi_highs_solves(solver: Solver, name: str) -> None:
    pytest.importorskip("gurobipy", exc_type=ImportError)
    if is_licensed("gurobi"):
        pytest.skip("there is a licence")
    problem = problem_of([stage(d, (10, 10, 8), 5, 2, (12, 12, 5)) for d in range(4)], [15] * 4, 8)
    texts = [frame.text for frame in solver.frames(problem, solver=name, time_limit_s=3.0) if isinstance(frame, Note)]
    assert any(text.endswith("HiGHS solves it instead") for text in texts)
    assert any(text.startswith("milp: HiGHS: ") for text in texts)


def test_windows_shrink_to_what_the_licence_is_for(solver: Solver) -> None:
    """Of 96 compute ops; some windows of 30 have more than 2,000 rows."""
    pytest.importorskip("gurobipy")
    if is_licensed("gurobi"):
        pytest.skip("there is a licence")
    problem = Problem.load(EXAMPLES / "shared-pcie-4x8.json")
    frames = solver.frames(problem, solver="gurobi", time_limit_s=10.0, milp_ops=1)
    texts = [frame.text for frame in frames if isinstance(frame, Note)]
    assert not any("HiGHS" in text for text in texts)
    size = re.fullmatch(r"milp: \d+ windows, .*; the last by Gurobi of (\d+) variables, (\d+) rows", texts[0])
    assert size
    assert max(map(int, size.groups())) <= PIP_SIZE


def test_a_solver_that_pulp_lacks_is_a_note(solver: Solver) -> None:
    pytest.importorskip("pulp")
    frames = solver.frames(EXHAUSTIVE["two chunks"], solver="pulp:mipcl")
    (note,) = [frame.text for frame in frames if isinstance(frame, Note) and not frame.method]
    assert note.startswith("solver = 'pulp:mipcl': PuLP does not find this solver; it finds ")
    assert note.endswith("; HiGHS solves it instead")
    assert [frame for frame in frames if isinstance(frame, Incumbent)]


@pytest.mark.parametrize("name", ["cbc", "CBC", "pulp", "PuLP:Cbc", "PULP_CBC_CMD", "pulp:pulp_cbc_cmd", "HiGHS"])
def test_a_solver_may_be_written_as_people_do(solver: Solver, name: str) -> None:
    pytest.importorskip("pulp")
    frames = solver.frames(EXHAUSTIVE["two chunks"], solver=name)
    notes = [frame for frame in frames if isinstance(frame, Note)]
    assert all(note.method for note in notes)  # nothing to complain about
    assert notes[0].text.startswith("milp: HiGHS: " if name == "HiGHS" else "milp: PuLP's PULP_CBC_CMD: optimal")


@pytest.mark.parametrize("name", ["best", "pulp:best", "highs:1", "", "gurobi:", "auto:", "pulp:", "cbc:"])
def test_an_unknown_solver_is_one_sentence(name: str) -> None:
    with pytest.raises(ValidationError, match=r"or one of PuLP's solvers such as pulp:cbc was expected \(installed: "):
        Request(problem=SPAN, solver=name)


@pytest.mark.parametrize(("solver", "package"), [("gurobi", "gurobipy"), ("pulp", "pulp")])
def test_a_backend_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch, solver: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UnavailableError,
        match=rf"^solver = '{solver}': {package} is not installed \(pip install 'optpipe\[{solver}\]'\)$",
    ):
        find_backend(solver)
