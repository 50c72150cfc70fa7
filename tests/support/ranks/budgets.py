"""What the ranks run in `test_budgets`: a profile with the budget of a GPU that has so many bytes free, and a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline, step_runner
from optpipe_runtime.execute.messages import messages_reserve
from optpipe_runtime.ranks.parts import local
from support.ranks import inner
from support.ranks.cases import batch, loss_fn
from support.ranks.reductions import policy
from support.ranks.replicas import wrapped

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
        modules = {s: wrapped(module, "fsdp", ranks["replica"], **policy(True)) for s, module in modules.items()}
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
        rank = pipe._rank
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
            report.gathered_certified_bytes - sum(map(rank.replicas.parameter_bytes, modules)),
        )
