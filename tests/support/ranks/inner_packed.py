"""Micro-batches of different shapes on stages that two ranks compute together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from optpipe_runtime import PlannedSteps
from optpipe_runtime.lowering.prepare import one_at_a_time
from support.ranks import cases
from support.ranks.cases import Gradients
from support.ranks.inner import make_stages, mesh, parallel, two_stages
from support.ranks.microbatches import Turn, given, plain_turn
from support.ranks.replicas import gradients

Steps = list[tuple[list[float], Gradients]]  # losses and gradients


def trained(taken: Sequence[Turn], planned: bool) -> Steps:
    """With a schedule for every step, or one that is loaded."""
    stage = dist.get_rank() // 2
    modules = {stage: parallel(make_stages()[stage], mesh()["tensor"])}
    optimizer, seen = cases.sgd(*modules.values()), []
    with two_stages(modules, len(taken[0].sizes)) as pipe:
        if planned:
            train = PlannedSteps(pipe, activation_budget_bytes=10**9)
        else:
            pipe.load(one_at_a_time(pipe.layout.unmeasured()))
        for seed, turn in enumerate(taken):
            optimizer.zero_grad()
            step = train.step if planned else pipe.step
            losses = step(**given(turn, seed, [stage], stage, 2)).losses
            seen.append((losses or [], gradients(modules)))
            optimizer.step()
        if planned:
            train.close()
    return seen


def plain(taken: Sequence[Turn]) -> Steps:
    """The whole model in one process."""
    torch.set_num_threads(1)
    modules = make_stages()
    optimizer, seen = cases.sgd(*modules), []
    for seed, turn in enumerate(taken):
        optimizer.zero_grad()
        losses = plain_turn(modules, turn, seed)
        seen.append((losses, gradients(dict(enumerate(modules)))))
        optimizer.step()
    return seen
