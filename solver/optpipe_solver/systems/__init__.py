"""The published schedules, each as its paper has it: `generate(name, problem)`.

They do not ask whether memory suffices, nor how long ops take, unless the paper does; `check` says whether one fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from optpipe.dispatch.descents import entry_orders
from optpipe.errors import InputError, OptPipeError, ScheduleError, did_you_mean
from optpipe.evaluate.objective import NO_SCHEDULE_MS, Objective, length_ms
from optpipe.formats.stacks import STACKS
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.options import Placements, StackName
from optpipe.schedule import Schedule, check
from optpipe_solver import tuning
from optpipe_solver.clock import UNLIMITED, Clock
from optpipe_solver.methods import METHODS
from optpipe_solver.systems import bpipe, chronos, classic, dualpipe, pipeoffload, zero_bubble
from optpipe_solver.systems.system import PUBLISHED, System, count_chunks, count_devices

__all__ = [
    "SYSTEMS",
    "System",
    "fitting",
    "generate",
    "in_best_order",
    "in_entry_orders",
    "is_system",
    "on_other_stages",
    "parse",
    "variants",
]

FAMILIES = (classic, dualpipe, pipeoffload, chronos, zero_bubble, bpipe)  # searches try them so
SYSTEMS: dict[str, System] = {
    name: system
    for family in FAMILIES
    for name, system in PUBLISHED.items()
    if system.build.__module__ == family.__name__
}
CHOICES: dict[str, tuple[str, Callable[[int, int], Iterable[int]]]] = {  # by devices and chunks a device
    "gis": ("leaving", lambda _, v: range(1, v + 1)),
    "interleaved-recompute": ("recomputed", lambda _, v: range(1, v)),
    "chronos": ("leaving", lambda _, v: range(1, v + 1)),
    "chronos-recomp": ("recomputed", lambda _, v: range(1, v + 1)),
    "chronos-zero2": ("group", lambda p, _: range(2, p + 1)),
    "1f1b-recompute": ("every", lambda p, _: range(1, p + 1)),
}
_PARAMETER = re.compile(r"([a-z][a-z_]*)=([0-9]{1,9})")


def parse(method: str) -> tuple[str, dict[str, int]]:
    """Read a system's name and its parameters, such as `gis:group=5`. Raises InputError if either is unknown."""
    name, colon, values = method.partition(":")
    if name not in SYSTEMS:
        near = did_you_mean(name, SYSTEMS, "; ")
        raise InputError(f"method = {method!r}: the published schedules are {', '.join(SYSTEMS)}{near}")
    has, parameters = SYSTEMS[name].parameters, dict[str, int]()
    for pair in values.split(",") if colon else []:
        match = _PARAMETER.fullmatch(pair)
        if not match:
            raise InputError(
                f'method = {method!r}: {pair!r} is no parameter: write a name, "=", and a whole number of up to nine '
                "digits, such as group=5"
            )
        key, number = match.groups()
        if key not in has:
            raise InputError(
                f"method = {method!r}: {name} has no parameter {key} (its parameters: {', '.join(has) or 'none'})"
            )
        if key in parameters:
            raise InputError(f"method = {method!r}: {key} is given twice, a parameter is given once")
        parameters[key] = int(number)
    return name, parameters


def generate(method: str, problem: Problem, placements: Placements = "keep") -> Schedule:
    """Make the schedule of a system, micro-batches in the order of their numbers.

    Parameters
    ----------
    method
        The system and its parameters, such as `1f1b` or `gis:group=5`.
    placements
        `keep`: on the problem's own stages. `all`: if the system does not run on these, on the same model as stages
        that it runs on.

    Raises
    ------
    InputError
        If the paper excludes the problem, such as for other stages than the system is for.
    """
    name, parameters = parse(method)
    placement = SYSTEMS[name].placement(problem, placements)
    schedule = SYSTEMS[name].build(placement.apply(problem) if placement else problem, **parameters)
    return replace(schedule, method=method, placement=placement)


def in_entry_orders(method: str, problem: Problem, placements: Placements = "keep") -> Iterator[Schedule]:
    """Yield a system's schedule for each order in which micro-batches may enter, that of their numbers first.

    Raises InputError as `generate` does.
    """
    schedule = generate(method, problem, placements)
    yield schedule
    placed = schedule.problem
    for order in islice(entry_orders(placed), 1, None):
        yield replace(
            generate(method, placed.entering(order.tolist())).renumbered(placed, order), placement=schedule.placement
        )


def in_best_order(
    method: str, problem: Problem, placements: Placements = "keep", objective: Objective = "makespan"
) -> Schedule:
    """A system's schedule in the best order in which micro-batches may enter: the shortest of those that fit.

    Where none fits, the shortest. Raises InputError as `generate` does.
    """
    schedules = list(in_entry_orders(method, problem, placements))
    if len(schedules) == 1:
        return schedules[0]

    def rank(schedule: Schedule) -> tuple[bool, float]:
        try:
            return bool(check(schedule.problem, schedule)), length_ms(schedule, objective)
        except ScheduleError:  # it cannot run
            return True, NO_SCHEDULE_MS

    return min(schedules, key=rank)


def fitting(
    methods: Iterable[str],
    problem: Problem,
    placements: Placements = "keep",
    clock: Clock = UNLIMITED,
    stack: StackName = "optpipe",
) -> Iterator[Schedule]:
    """Yield the systems' schedules that run on the stack and fit, in each order in which micro-batches may enter.

    Those that are not for this problem are left out. They are all that there are unless the clock is over by the end.
    """
    for method in filter(STACKS[stack].makes, methods):
        with suppress(OptPipeError):  # it is not for this problem, or its schedule cannot run
            schedules = in_entry_orders(method, problem, placements)
            while not clock.over and (schedule := next(schedules, None)):
                fits = schedule.compiled.certificate.fits  # the rest takes ten times as long
                if fits and not STACKS[stack].first_fault(schedule):
                    yield schedule


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


def on_other_stages(problem: Problem) -> Iterator[tuple[str, Placement]]:
    """Yield the systems that are given other stages than the problem's own, where any may be searched, with these."""
    for name, system in SYSTEMS.items():
        with suppress(InputError):
            if placement := system.placement(problem, "all"):
                yield name, placement


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
