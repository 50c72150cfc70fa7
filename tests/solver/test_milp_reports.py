"""What a search with the MILP tells of itself, and of a solver that fails or does not take the model."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from pydantic import ValidationError
from support.enumeration import SPAN, problem_of, stage
from support.milp import Solver, solver_process

from optpipe import Problem
from optpipe.process.protocol import Note, Request
from optpipe_solver.milp.backend import most_rows


@pytest.fixture(scope="module")
def solver() -> Iterator[Solver]:
    with solver_process() as running:
        yield running


def large() -> Problem:
    """More than pip's licence of Gurobi takes, and less than what is solved in windows anyway."""
    return problem_of([stage(d, (10, 10, 8), 5, 2, (12, 12, 5)) for d in range(4)], [15] * 4, 8)


@pytest.mark.parametrize("name", ["pulp:gurobi", "GUROBI_CMD", "pulp_gurobi"])
def test_gurobi_by_way_of_pulp_has_the_licence_of_gurobi(name: str) -> None:
    pytest.importorskip("pulp")
    pytest.importorskip("gurobipy")
    assert most_rows(name) == most_rows("gurobi")
    assert most_rows("pulp:cbc") is None


def test_what_is_too_large_for_gurobi_by_way_of_pulp_is_solved_in_windows(solver: Solver) -> None:
    pytest.importorskip("pulp")
    pytest.importorskip("gurobipy")
    if most_rows("gurobi") is None:
        pytest.skip("there is a licence of Gurobi")
    frames = solver.frames(large(), solver="pulp:gurobi", time_limit_s=2)
    too_large, report = [frame.text for frame in frames if isinstance(frame, Note)]
    assert re.match(r"milp: windows, as the whole model has .*, and Gurobi's pip licence is for 2000", too_large)
    assert re.match(r"milp: \d+ windows? by PuLP's GUROBI: ", report)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PuLP's own
def test_whatever_a_library_of_pulps_raises_highs_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pulp = pytest.importorskip("pulp")
    from optpipe_solver.milp import pulp as by_pulp
    from optpipe_solver.milp.rows import Rows
    from optpipe_solver.milp.task import Limits, Task, UnavailableError

    def fail(*_: object) -> None:
        raise RuntimeError("no licence")

    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", fail)
    rows = Rows()
    rows.variable(0.0, 1.0)
    task = Task(rows, 0, {}, Limits(1e12, 1, 0), lambda x: None, lambda bound: None)
    with pytest.raises(UnavailableError, match=r"^PuLP's PULP_CBC_CMD failed: no licence$"):
        by_pulp.solver("PULP_CBC_CMD")(task)


@pytest.mark.parametrize("name", ["gurobi:", "auto:", "pulp:", "cbc:"])
def test_a_colon_needs_a_name(name: str) -> None:
    with pytest.raises(ValidationError, match="or one of PuLP's solvers such as pulp:cbc was expected"):
        Request(problem=SPAN, solver=name)
