"""Every published schedule, run: one training step on 2 and on 4 ranks has the losses and gradients of a plain run.

In float64. Losses are the same to the bit, and so are gradients where a stage's micro-batches add theirs in the same
order; where the order is another, or two copies of a stage are summed, they are equal within 1e-9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from support.ranks import cases as rank_cases
from support.ranks import systems as rank_systems
from support.ranks.systems import Outcome
from support.ranks.worker import Ranks

from optpipe.errors import InputError
from optpipe.model.ops import Kind, Op, Pair
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Layout
from optpipe_solver import heuristics, systems

EVICTION = {Kind.E, Kind.L, Kind.A, Kind.V}


class Case(NamedTuple):
    """A schedule by the name of what made it."""

    name: str
    schedule: Schedule

    @property
    def layout(self) -> Layout:
        return Layout.of(self.schedule.problem)

    @property
    def kinds(self) -> set[Kind]:
        return {op.kind for program in self.schedule.programs for op in program.ops()}


def cases(ranks: int, microbatches: tuple[int, ...]) -> list[Case]:
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


@pytest.mark.parametrize(("pool", "microbatches"), [("ranks", (5, 4)), ("four_ranks", (8,))])
def test_every_system_trains_as_a_plain_run(
    pool: str, microbatches: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    call: Ranks = request.getfixturevalue(pool)
    found = cases(call.world, microbatches)
    by_rank = call(rank_systems.run_all, schedules=[case.schedule for case in found])
    plain = {layout: rank_systems.plain(layout) for layout in {case.layout for case in found}}
    for case, *outcomes in zip(found, *by_rank, strict=True):
        require_same(case, outcomes, plain[case.layout])
    evicts = EVICTION if call.world > 2 else set()  # of two stages, BPipe evicts nothing
    assert set().union(*(case.kinds for case in found)) == set(Kind) - EVICTION | evicts
    assert any(isinstance(item, Pair) for case in found for program in case.schedule.programs for item in program)


def require_same(case: Case, outcomes: list[Outcome], plain: Outcome) -> None:
    assert {j: loss for outcome in outcomes for j, loss in outcome.losses.items()} == plain.losses, case.name
    gradients = {name: grad for outcome in outcomes for name, grad in outcome.gradients.items()}
    place = {s: k for route in case.layout.routes for k, s in enumerate(route)}
    assert len(gradients) == len(plain.gradients) * len(case.layout.routes), case.name
    for name, grad in gradients.items():
        stage, parameter = name.split(".", 1)
        expected, what = plain.gradients[f"{place[int(stage)]}.{parameter}"], f"{case.name}, {name}"
        if adds_in_order(case, int(stage)):
            np.testing.assert_array_equal(grad, expected, err_msg=what)
        else:
            np.testing.assert_allclose(grad, expected, rtol=1e-9, atol=1e-12, err_msg=what)


def adds_in_order(case: Case, stage: int) -> bool:
    """Whether a stage's micro-batches, all of them, add their gradients in order: those of norms at B, others at W."""

    def added(wanted: Callable[[Op], bool]) -> list[int]:
        return [
            op.microbatch
            for program in case.schedule.programs
            for op in program.ops()
            if op.stage == stage and wanted(op)
        ]

    everyone = list(range(case.layout.microbatches))
    return all(
        added(lambda op, kinds=kinds: op.kind in kinds) == everyone for kinds in ({Kind.B, Kind.BW}, {Kind.W, Kind.BW})
    )
