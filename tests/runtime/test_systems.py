"""Every published schedule, run: one training step on 2 and on 4 ranks has the losses and gradients of a plain run.

In float64. Losses are the same to the bit, and so are gradients where a stage's micro-batches add theirs in the same
order; where the order is another, or two copies of a stage are summed, they are equal within 1e-9.
"""

from collections.abc import Callable

import numpy as np
import pytest
from support.problems.published import Case, published
from support.ranks import systems as rank_systems
from support.ranks.systems import Outcome
from support.ranks.worker import Ranks

from optpipe.model.ops import Kind, Op, Pair

EVICTION = {Kind.E, Kind.L, Kind.A, Kind.V}


@pytest.mark.parametrize(("pool", "microbatches"), [("ranks", (5, 4)), ("four_ranks", (8,))], indirect=["pool"])
def test_every_system_trains_as_a_plain_run(pool: Ranks, microbatches: tuple[int, ...]) -> None:
    found = published(pool.world, microbatches)
    by_rank = pool(rank_systems.run_all, schedules=[case.schedule for case in found])
    plain = {layout: rank_systems.plain(layout) for layout in {case.layout for case in found}}
    for case, *outcomes in zip(found, *by_rank, strict=True):
        require_same(case, outcomes, plain[case.layout])
    evicts = EVICTION if pool.world > 2 else set()  # of two stages, BPipe evicts nothing
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
