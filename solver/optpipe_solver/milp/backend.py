"""The choice of a backend."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from optpipe_solver.methods import usual_name
from optpipe_solver.milp.task import Minimize, Outcome, Task, UnavailableError


def minimize(solver: str, task: Task, tell: Callable[[str], None]) -> tuple[str, Outcome]:
    """Solves with the backend of that name or, if it is not available, says why and solves with HiGHS.

    Returns the name of the backend that did it, and how it ended.
    """
    began = time.monotonic()
    with _stdout_to_stderr():
        try:
            outcome = find_backend(solver)(task)
        except UnavailableError as reason:
            tell(f"{reason}; HiGHS solves it instead")
            solver, outcome = "highs", find_backend("highs")(task)
    return solver, replace(outcome, seconds=time.monotonic() - began)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Whatever a solver's library prints goes to standard error: standard output is for answers."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def find_backend(solver: str) -> Minimize:
    """The backend of that name, in any case: `auto`, `highs`, `gurobi`, `pulp`, `pulp:NAME`, or the NAME alone.

    `auto` is Gurobi if the user has a licence: the one that comes with gurobipy is for small models, and not for
    production. Otherwise it is HiGHS.
    """
    kind, _, within = solver.partition(":")
    kind = kind.lower()
    if kind == "auto":
        return find_backend("gurobi" if _gurobi_licensed() else "highs")
    # Each backend loads a native library that may be missing, and only one of them is needed.
    try:
        if kind == "highs":
            from optpipe_solver.milp import highs

            return highs.minimize
        if kind == "gurobi":
            from optpipe_solver.milp import gurobi

            return gurobi.minimize
        from optpipe_solver.milp import pulp

        return pulp.find_solver(within if kind == "pulp" else solver)
    except ImportError as error:
        extra = kind if kind in ("highs", "gurobi") else "pulp"
        raise UnavailableError(
            f"solver = {solver!r}: {error.name} is not installed (pip install 'optpipe[{extra}]')"
        ) from None


def is_licensed(solver: str) -> bool:
    """Whether a backend is Gurobi, also PuLP's, with a licence of the user's own."""
    kind, _, within = solver.partition(":")
    name = usual_name(within if kind.lower() == "pulp" else kind)
    return name in ("auto", "gurobi") and _gurobi_licensed()


def _gurobi_licensed() -> bool:
    try:
        from optpipe_solver.milp import gurobi
    except ImportError:
        return False
    return gurobi.licensed()
