"""The choice of a backend."""

from __future__ import annotations

from collections.abc import Callable

from optpipe.errors import InputError
from optpipe_solver.milp.task import Minimize, Task, UnavailableError


def minimize(solver: str, task: Task, tell: Callable[[str], None]) -> str:
    """Solves with the backend of that name or, if it is not available, says why and solves with HiGHS.

    Returns the name of the solver that did it. Raises InputError if the name is unknown.
    """
    try:
        backend(solver)(task)
    except UnavailableError as reason:
        tell(f"{reason}; HiGHS solves it instead")
        solver = "highs"
        backend(solver)(task)
    return solver


def backend(solver: str) -> Minimize:
    """The backend of that name: `auto`, `highs`, `gurobi`, `pulp` or `pulp:NAME`.

    `auto` is Gurobi if the user has a licence: the one that comes with gurobipy is for small models, and not for
    production. Otherwise it is HiGHS.
    """
    name, _, within = solver.partition(":")
    if solver == "auto":
        return backend("gurobi" if _gurobi_licensed() else "highs")
    # Each backend loads a native library that may be missing, and only one of them is needed.
    try:
        if solver == "highs":
            from optpipe_solver.milp import highs

            return highs.minimize
        if solver == "gurobi":
            from optpipe_solver.milp import gurobi

            return gurobi.minimize
        if name == "pulp":
            from optpipe_solver.milp import pulp

            return pulp.solver(within)
    except ImportError as error:
        raise UnavailableError(
            f"solver = {solver!r}: {error.name} is not installed (pip install 'optpipe[{name}]')"
        ) from None
    raise InputError(f"solver = {solver!r}: the solvers are auto, highs, gurobi, pulp and pulp:NAME")


def _gurobi_licensed() -> bool:
    try:
        from optpipe_solver.milp import gurobi
    except ImportError:
        return False
    return gurobi.licensed()
