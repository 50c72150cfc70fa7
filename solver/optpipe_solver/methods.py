"""The solver's entry point (`optpipe.solvers.Solver`): its modules, and the names of its methods. Imports nothing
heavy."""

from __future__ import annotations

import re
from importlib.util import find_spec

SEARCH, COMPARE, FIRST = "optpipe_solver", "optpipe_solver.compare", "optpipe_solver.first"
COMPILE, SYSTEMS = "optpipe_solver.compiling", "optpipe_solver.systems"
MILP = "milp"
RELAX = "relax"  # proves bounds, and finds no schedules
ENGINES = ("dispatch", "anneal", "lns", "cpsat", MILP, RELAX)
EXHAUSTIVE = (MILP,)
HEURISTICS = ("naive", "adaoffload")  # each fits where any schedule without evictions does; the best last
METHODS = ("auto", *HEURISTICS, *ENGINES)
OWN = ("auto", *ENGINES, "adaoffload", "algorithm-1")

# PuLP's solvers as people write them: in any case, with or without PuLP's own prefixes and suffixes.
PULP_SOLVERS = (
    *("cbc", "coin", "coinmp", "choco", "copt", "cplex", "cuopt", "fscip", "glpk", "gurobi", "highs", "mipcl"),
    *("mosek", "sas94", "sascas", "scip", "xpress"),
)


def usual_name(solver: str) -> str:
    """A solver of PuLP's by its usual name, such as `cbc` for `PULP_CBC_CMD`."""
    return re.sub(r"_(cmd|py|dll)$", "", solver.lower().removeprefix("pulp_"))


def milp_complaint(solver: str) -> str | None:
    """Say what was expected if this is not a solver of MILPs that can be asked for; None if it is."""
    kind, colon, within = solver.partition(":")
    one_of_pulp = usual_name(within if colon else kind) in PULP_SOLVERS
    if (kind.lower() == "pulp" and one_of_pulp) if colon else (one_of_pulp or kind.lower() in ("auto", "pulp")):
        return None
    packages = {"highs": "highspy", "gurobi": "gurobipy", "pulp": "pulp"}
    installed = ", ".join(name for name, package in packages.items() if find_spec(package))
    return (
        "auto, highs, gurobi, pulp or one of PuLP's solvers such as pulp:cbc was expected "
        f"(installed: {installed or 'none'})"
    )
