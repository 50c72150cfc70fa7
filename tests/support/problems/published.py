"""A schedule of every system and heuristic, for any number of ranks."""

from __future__ import annotations

from typing import NamedTuple

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Layout
from optpipe_solver import heuristics, systems
from support.ranks import cases as rank_cases


class Case(NamedTuple):
    """A schedule by the name of what made it."""

    name: str
    schedule: Schedule

    @property
    def layout(self) -> Layout:
        return Layout.from_problem(self.schedule.problem)

    @property
    def kinds(self) -> set[Kind]:
        return {op.kind for program in self.schedule.programs for op in program.ops()}


def published(ranks: int, microbatches: tuple[int, ...]) -> list[Case]:
    """A schedule of every system, for the first number of micro-batches that it takes; memory for three activations
    where it counts."""
    peers = [ranks - 1 - d if d < ranks // 2 else None for d in range(ranks)]
    ample = [
        rank_cases.problem(range(ranks), m, peers, offload_parts=2).replace(overlap_factor=0.8) for m in microbatches
    ]
    on_host = {"gradient_out_ms": 1.0, "update_ms": 1.0, "parameters_in_ms": 1.0}
    ample = [
        problem.replace(stages=[stage.model_copy(update=on_host) for stage in problem.stages]) for problem in ample
    ]
    tight = ample[0].replace(
        devices=[device.model_copy(update={"activation_budget_bytes": 300}) for device in ample[0].devices]
    )
    found = [Case(name, heuristics.generate(name, tight)) for name in heuristics.STREAMS]
    return found + [Case(name, first_that_runs(name, ample)) for name in systems.SYSTEMS]


def first_that_runs(name: str, problems: list[Problem]) -> Schedule:
    for problem in problems[:-1]:
        try:
            return systems.generate(name, problem, placements="all")
        except InputError:  # the paper excludes this number of micro-batches
            continue
    return systems.generate(name, problems[-1], placements="all")
