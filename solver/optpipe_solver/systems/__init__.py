"""The published schedules, each as its paper has it: `generate(name, problem)`. They ask neither whether memory suffices nor for the time
ops take, unless the paper does; `check` says whether one fits."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from optpipe.child import Placements
from optpipe.errors import InputError
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe_solver.systems import bpipe, chronos, classic, dualpipe, pipeoffload, v_shape, zero_bubble
from optpipe_solver.systems.system import System

__all__ = ["SYSTEMS", "System", "generate", "parse"]

SYSTEMS: dict[str, System] = {
    system.name: system for family in (classic, dualpipe, pipeoffload, chronos, zero_bubble, v_shape, bpipe) for system in family.SYSTEMS
}

_METHOD = re.compile(r"([a-z0-9-]+)(?::([a-z]+=[0-9]{1,9}(?:,[a-z]+=[0-9]{1,9})*))?")


def parse(method: str) -> tuple[str, dict[str, int]]:
    """A system's name and its parameters, such as `gis:group=5`. Raises `InputError` for what is no system or no parameter of it."""
    match = _METHOD.fullmatch(method)
    name, listed = match.groups() if match else (method, None)
    if name not in SYSTEMS:
        raise InputError(f"method = {method!r}: the published schedules are {', '.join(SYSTEMS)}")
    parameters = {key: int(number) for key, number in (pair.split("=") for pair in (listed.split(",") if listed else []))}
    for key in parameters:
        if key not in SYSTEMS[name].parameters:
            has = ", ".join(SYSTEMS[name].parameters) or "none"
            raise InputError(f"method = {method!r}: {name} has no parameter {key} (its parameters: {has})")
    return name, parameters


def generate(method: str, problem: Problem, placements: Placements = "keep") -> Schedule:
    """The schedule of a system, e.g. `1f1b` or `gis:group=5`, on the problem's own stages; with `placements="all"`, where these are not
    what the system runs on, on the same model as stages that are.

    Raises `InputError` for what the paper excludes, such as other stages than it is for.
    """
    name, parameters = parse(method)
    system = SYSTEMS[name]
    placement = system.placement(problem, placements)
    placed = placement.apply(problem) if placement else problem
    given: dict[str, Any] = dict(parameters)
    return replace(system.build(placed, **given), method=method, placement=placement)
