"""The published schedules in a search: which of them are for a problem's own stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from optpipe.errors import InputError
from optpipe.problem import Problem
from optpipe_solver.methods import METHODS
from optpipe_solver.systems import SYSTEMS, parse


def is_system(method: str) -> bool:
    """Whether the method names a published schedule, whatever its parameters. Raises `InputError` for what is no method at all."""
    name = method.partition(":")[0]
    if method not in METHODS and name not in SYSTEMS:
        raise InputError(f"method = {method!r}: the methods are {', '.join(dict.fromkeys((*METHODS, *SYSTEMS)))}")
    if method not in METHODS:
        parse(method)
    return method not in METHODS


def seeds(problem: Problem) -> Iterator[str]:
    """The systems that run on the problem's own stages, each with every choice of its parameters that is its paper's."""
    for name, system in SYSTEMS.items():
        with suppress(InputError):
            system.placement(problem, "keep")
            yield name
