"""The published schedules in a search: which of them apply to a problem's own stages, and with what parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from math import ceil

from optpipe.errors import InputError, did_you_mean
from optpipe.model.problem import Problem
from optpipe_solver import tuning
from optpipe_solver.methods import METHODS
from optpipe_solver.systems import SYSTEMS, parse
from optpipe_solver.systems.order import count_chunks, count_devices

CHOICES: dict[str, tuple[str, Callable[[int, int], Iterable[int]]]] = {  # by devices and chunks a device
    "gis": ("group", lambda p, _: range(ceil(p / 2), p + 1)),
    "chronos-recomp": ("recomputed", lambda _, v: range(1, v + 1)),
    "chronos-zero2": ("group", lambda p, _: range(2, p + 1)),
    "1f1b-recompute": ("every", lambda p, _: range(1, p + 1)),
}


def is_system(method: str) -> bool:
    """Whether the method is a published schedule. Raises InputError if it is no method, or its parameters are wrong."""
    if method in METHODS:
        return False
    name = method.partition(":")[0]
    if name not in SYSTEMS:
        names = dict.fromkeys((*METHODS, *SYSTEMS))
        raise InputError(f"method = {method!r}: the methods are {', '.join(names)}{did_you_mean(name, names, '; ')}")
    parse(method)
    return True


def variants(problem: Problem) -> Iterator[str]:
    """Yield the systems that run on the problem's own stages, with choices of their parameters."""
    devices, chunks = count_devices(problem), count_chunks(problem)
    for name, system in SYSTEMS.items():
        with suppress(InputError):
            system.placement(problem, "keep")
            yield name
            if name in CHOICES:
                parameter, values = CHOICES[name]
                choices = list(values(devices, chunks))
                step = -(-len(choices) // tuning.VARIANTS) or 1
                yield from (f"{name}:{parameter}={value}" for value in choices[::step])
