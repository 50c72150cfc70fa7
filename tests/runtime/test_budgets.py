"""By default activations may take what is free on a GPU beside all else that a step allocates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from support.ranks import inner
from support.ranks.cases import batch, loss_fn
from support.ranks.programs import ONE_F_ONE_B
from support.ranks.reductions import MIXED
from support.ranks.replicas import wrapped
from support.ranks.worker import Ranks
from torch.distributed.device_mesh import init_device_mesh

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.execute.messages import messages_reserve
from optpipe_runtime.pipeline import step_runner
from optpipe_runtime.torch_private.tensors import local

FREE = 10**8


class Budgeted(NamedTuple):
    """Bytes: the budget, what is set aside for messages, what the gradients take that a step has left, and what it
    needed at most for whole ones of sharded parameters."""

    budget: int
    messages: int
    left: int
    whole: int


def profiled(program: Sequence[Sequence[str]], sharded: bool) -> Budgeted:
    """Two tensor-parallel ranks a stage; or, `sharded`, two replicas of two such ranks with both stages, gathered in
    bfloat16 and reduced in float32."""
    shape = (2, 1, 2) if sharded else (1, 2, 2)
    ranks = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "pipe", "tensor"))
    replica, number, _ = ranks.get_coordinate() or (0, 0, 0)
    placement = [0, 0] if sharded else [0, 1]
    modules = {
        s: inner.parallel(module, ranks["tensor"])
        for s, module in enumerate(inner.make_stages())
        if placement[s] == number
    }
    if sharded:
        modules = {s: wrapped(module, "fsdp", ranks["replica"], **MIXED) for s, module in modules.items()}
    m = 4
    data = [part.chunk(2)[replica] for part in batch(0, 2 * m)]
    groups = {"group": ranks["pipe"].get_group(), "inner": ranks["tensor"]}
    with Pipeline(modules, placement, loss_fn, m, **groups) as pipe:
        with (
            patch.multiple(step_runner, require_budget=lambda rank: None),
            patch.multiple(
                torch.cuda,
                mem_get_info=lambda device: (FREE, FREE),
                memory_reserved=lambda device: 0,
                memory_allocated=lambda device: 0,
            ),
        ):
            problem = pipe.profile(*data, repeats=1)
        pipe.load(Schedule.parse(problem, program))
        report = pipe.step(*data, trace=True)
        rank = pipe.runner.rank
        found = [
            local(p.grad).untyped_storage()
            for module in modules.values()
            for p in module.parameters()
            if p.grad is not None
        ]
        return Budgeted(
            problem.devices[number].activation_budget_bytes,
            messages_reserve(number, rank.layout, rank.io),
            sum({storage._cdata: storage.nbytes() for storage in found}.values()),
            report.gathered_certified_bytes - sum(rank.replicas.sharded[s].parameter_bytes for s in modules),
        )


BOTH_STAGES = [[f"{s}{kind}{j}" for j in range(4) for s, kind in ((0, "F"), (1, "F"), (1, "BW"), (0, "BW"))]]


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_count_as_large_as_backwards_leave_them(four_ranks: Ranks, sharded: bool) -> None:
    """Those of an embedding whose rows are spread over two ranks have all rows on each. FSDP adds up whole gradients in
    the type of the parameters and, aside, in that of the reduction; then come those of the shards."""
    program = BOTH_STAGES if sharded else ONE_F_ONE_B
    for rank, found in enumerate(four_ranks(profiled, program=program, sharded=sharded)):
        stages = inner.make_stages() if sharded else inner.make_stages()[rank // 2 : rank // 2 + 1]
        parts, gradients = map(sum, zip(*map(inner.part_bytes, stages), strict=True))
        if sharded:
            assert found.whole == gradients // 2 + gradients
            assert found.left == parts // 2
        else:
            assert (found.whole, found.left) == (0, gradients)
        assert found.budget == int(0.9 * (FREE - found.messages - found.whole - found.left))
