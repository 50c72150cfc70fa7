"""The solver that is installed: the core asks it for its modules and its names, and imports none of them."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol, cast

from optpipe.errors import SolverError

GROUP = "optpipe.solvers"  # of entry points; the value of each is a module like `Solver`


class Solver(Protocol):
    """What the core asks of a solver's module, which loads nothing heavy."""

    SEARCH: str  # the module that answers a `Request` as `python -m MODULE`
    COMPARE: str  # likewise a `CompareRequest`
    FIRST: str  # the module with first schedules: `answer(request, emit)`, as `COMPARE` has, and `warm_up()`
    COMPILE: str  # the module that compiles as `python -m MODULE` what the others run, once on a machine
    SYSTEMS: str  # the module with `is_system(method)`, which raises `InputError` for what is no method
    ENGINES: tuple[str, ...]  # the methods that search
    EXHAUSTIVE: tuple[str, ...]  # those of them that search on after a schedule is proven
    OWN: tuple[str, ...]  # the methods that nobody has without OptPipe

    def milp_complaint(self, solver: str) -> str | None:
        """Say what was expected if this is not a solver of MILPs that can be asked for; None if it is."""


def require_method(method: str) -> None:
    """Raises InputError if it is neither a method nor a published schedule, or its parameters are wrong."""
    import_module(installed().SYSTEMS).is_system(method)


@cache
def installed() -> Solver:
    """The solver of the first entry point. Raises SolverError if there is none."""
    declared = [*entry_points(group=GROUP)]
    project = Path(__file__).parents[1] / "pyproject.toml"  # of the repository, if this runs from its folder
    if not declared and project.is_file():
        listed = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"][GROUP]
        declared = [EntryPoint(name, module, GROUP) for name, module in listed.items()]
    if not declared:
        raise SolverError(f"no solver is installed: no package has an entry point in the group {GROUP}")
    return cast(Solver, import_module(declared[0].value))
