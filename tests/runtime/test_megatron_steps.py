"""Megatron's own combined 1F1B has the order of our `combined-1f1b`, and Megatron's optimizer goes on from our steps as
from its own.

`make stacks` runs it in an environment with the package.
"""

import numpy as np
import pytest
import torch
from support.ranks import cases, megatron, megatron_steps
from support.ranks.megatron import require_same
from support.ranks.megatron_model import A2A, MICROBATCHES, Division
from support.ranks.worker import Ranks

from optpipe.model.ops import Kind, Op, Pair
from optpipe_solver import systems

pytestmark = pytest.mark.stacks


def sides(op: Op | Pair) -> list[tuple[int, int] | None]:
    """Stage and micro-batch of a forward, and of a whole backward."""
    found = {one.kind: (one.stage, one.microbatch) for one in (op if isinstance(op, Pair) else [op])}
    assert found.keys() <= {Kind.F, Kind.BW}
    return [found.get(Kind.F), found.get(Kind.BW)]


@pytest.mark.parametrize("delaying", [False, True])
def test_megatron_runs_combined_1f1b_in_our_order(delaying: bool, four_ranks: Ranks) -> None:
    """On two stages of two chunks, the experts of each on two ranks; with the losses and gradients of its interleaved
    1F1B."""
    placement, division = (0, 1, 0, 1), Division(expert=2)
    options = A2A | {"bf16": True, "overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": delaying}
    problem = cases.problem(placement, MICROBATCHES).replace(overlap_factor=0.8)
    ours = systems.generate("combined-1f1b", problem)
    expected = four_ranks(megatron.theirs, placement=placement, division=division, options=A2A, in_ddp=True)
    found = four_ranks(megatron_steps.combined, placement=placement, division=division, options=options)
    for rank, (own, its) in enumerate(zip(found, expected, strict=True)):
        order = [tuple(sides(op)) for op in ours.programs[rank // 2]]
        assert own.ops == [order, order], f"rank {rank}"
        assert (own.delayed > 0) == delaying
        require_same(f"rank {rank}", [own.outcome], its, tolerance=1e-12)


@pytest.mark.parametrize(
    ("sharded", "dtype"), [(False, torch.float32), (False, torch.bfloat16), (True, torch.bfloat16)]
)
def test_megatrons_optimizer_goes_on_from_our_steps(sharded: bool, dtype: torch.dtype, four_ranks: Ranks) -> None:
    """Two replicas of two stages: three steps have the losses, norms and parameters of those by Megatron's 1F1B."""
    schedules = [None, *megatron.systems_of("1f1b", "zb-h1", "1f1b-recompute")]
    by_rank = four_ranks(megatron_steps.trained, schedules=schedules, placement=(0, 1), sharded=sharded, dtype=dtype)
    for rank, (expected, *found) in enumerate(by_rank):
        assert len({tuple(losses) for losses in expected.losses}) == (megatron_steps.STEPS if rank > 1 else 1)
        for schedule, own in zip(schedules[1:], found, strict=True):
            assert own.losses == expected.losses
            assert own.norms == expected.norms
            for name, values in own.parameters.items():
                np.testing.assert_array_equal(values, expected.parameters[name], f"{schedule.method}, {name}")
