"""What the ranks run in `test_levels`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Microbatches, Pipeline, PlannedSteps, StepReport
from support.ranks.cases import Gradients, loss_fn, numbers, own_stages, refusals
from support.ranks.microbatches import Turn, batch

PLACEMENT = [0, 1]
KEEPS = ["cheap", "selective", "full"]


class Way(NamedTuple):
    """What becomes of one activation: the number of its level, None if it is not recomputed; and whether what is kept
    of it leaves."""

    level: int | None = None
    leaves: bool = False


class Trained(NamedTuple):
    """One step, on one rank."""

    report: StepReport
    gradients: Gradients
    certified_bytes: int
    certified_host_bytes: int


def program(problem: Problem, stage: int, ways: Sequence[Way]) -> list[str]:
    """All forwards, then all backwards."""
    first, then = [], []
    for j, way in enumerate(ways):
        level = None if way.level is None else problem.stages[stage].all_levels[way.level]
        leaves = way.leaves and (level is None or level.can_offload)
        first += [f"{stage}F{j}", *([f"{stage}O{j}", f"{stage}D{j}"] if leaves else [])]
        again = [] if level is None else [f"{stage}C{j}" + (f".{way.level}" if way.level else "")]
        then += [*([f"{stage}R{j}"] if leaves else []), *again, f"{stage}B{j}", f"{stage}W{j}"]
    return first + then


def trained(turn: Turn, all_ways: Sequence[Sequence[Way]]) -> tuple[Problem, list[Trained]]:
    """Profiles micro-batches of these sizes, then runs the same step in each of the ways; the stages have dropout."""
    rank, modules = dist.get_rank(), own_stages(PLACEMENT, dropout=0.1)
    inputs, targets = map(Microbatches, batch(turn, 1))
    steps = []
    with Pipeline(modules, PLACEMENT, loss_fn, len(turn.sizes), recompute=KEEPS) as pipe:
        problem = pipe.profile(inputs, targets, activation_budget_bytes=10**9, repeats=1)
        for ways in all_ways:
            pipe.load(Schedule.parse(problem, [program(problem, s, ways) for s in range(2)]))
            for module in modules.values():
                module.zero_grad()
            torch.manual_seed(rank)
            report = pipe.step(inputs, targets)
            assert pipe.plan is not None
            certificate = pipe.plan.certificate
            steps.append(
                Trained(report, numbers(modules), certificate.device[rank].bytes, certificate.host[rank].bytes)
            )
    return problem, steps


def refused(schedule: Schedule, given: Sequence[Any]) -> list[str]:
    """What is told of arguments that are wrong, and of a schedule with a level that a pipeline does not offer."""

    def make(recompute: Any) -> Pipeline:
        return Pipeline(own_stages(PLACEMENT), PLACEMENT, loss_fn, schedule.problem.microbatches, recompute=recompute)

    told = refusals(*(lambda each=each: make(each) for each in given))  # type: ignore[misc]
    with make(("full",)) as pipe, make(("cheap",)) as other:
        return told + refusals(lambda: pipe.load(schedule), lambda: PlannedSteps(other))
