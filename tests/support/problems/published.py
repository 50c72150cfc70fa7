"""A schedule of every system and heuristic, for any number of ranks."""

from contextlib import suppress
from typing import NamedTuple

from optpipe.errors import InputError
from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Layout
from optpipe_solver import heuristics, systems
from support.problems import GROUPS, with_budgets
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
    on_host = dict.fromkeys(GROUPS["update"], 1.0)
    ample = []
    for m in microbatches:
        problem = rank_cases.problem(range(ranks), m, peers, offload_parts=2)
        stages = [stage.model_copy(update=on_host) for stage in problem.stages]
        ample.append(problem.replace(stages=stages, overlap_factor=0.8))
    tight = with_budgets(ample[0], 300)
    found = [Case(name, heuristics.generate(name, tight)) for name in heuristics.STREAMS]
    return found + [Case(name, first_that_runs(name, ample)) for name in systems.SYSTEMS]


def first_that_runs(name: str, problems: list[Problem]) -> Schedule:
    for problem in problems[:-1]:
        with suppress(InputError):  # the paper excludes this number of micro-batches
            return systems.generate(name, problem, placements="all")
    return systems.generate(name, problems[-1], placements="all")
