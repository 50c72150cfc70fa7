"""What the ranks run in `test_inner_ahead`: steps of inner peers, some of which begin before others have ended."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from support.ranks.cases import LENGTH, Gradients, batch, loss_fn, problem
from support.ranks.inner import make_stages, mesh, parallel, plain_step
from support.ranks.replicas import gradients

PATIENCE = timedelta(seconds=100)


class Turn(NamedTuple):
    """One step. `ahead`: the last stage's ranks begin it only when the first stage's have begun their first forward.
    `length`: of sequences. `evaluating`: only the second peer of the first stage has changed its mode."""

    ahead: bool = True
    length: int = LENGTH
    evaluating: bool = False


def data(step: int, turn: Turn) -> list[torch.Tensor]:
    return [part[:, : turn.length].contiguous() for part in batch(step, 4)]


def trained(programs: Sequence[Sequence[str]], turns: Sequence[Turn]) -> list[tuple[list[float] | None, Gradients]]:
    stage, peer = dist.get_rank() // 2, dist.get_rank() % 2
    module = parallel(make_stages()[stage], mesh()["tensor"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    store, now, found = dist.distributed_c10d._get_default_store(), [0], []

    def begun(*_: Any) -> None:
        if stage == 0:
            store.set(f"inner_ahead/{now[0]}/{peer}", "begun")

    hook = module.register_forward_pre_hook(begun)
    groups = {"group": mesh()["pipe"].get_group(), "inner": mesh()["tensor"]}
    with Pipeline({stage: module}, [0, 1], loss_fn, 4, **groups) as pipe:
        pipe.load(Schedule.parse(problem((0, 1), 4), programs))
        for step, turn in enumerate(turns):
            now[0] = step
            optimizer.zero_grad()
            module.train(not (turn.evaluating and (stage, peer) == (0, 1)))
            if turn.ahead and stage == 1:
                store.wait([f"inner_ahead/{step}/{peer}"], PATIENCE)
            losses = pipe.step(*data(step, turn)).losses
            found.append((losses, gradients({stage: module})))
            optimizer.step()
    hook.remove()
    for step in range(len(turns)) if stage == 0 else ():
        store.delete_key(f"inner_ahead/{step}/{peer}")
    return found


def plain(turns: Sequence[Turn]) -> list[tuple[list[float] | None, Gradients]]:
    """In one process."""
    torch.set_num_threads(1)
    modules = make_stages()
    every = [p for module in modules for p in module.parameters()]
    optimizer, found = torch.optim.SGD(every, lr=0.1), []
    for step, turn in enumerate(turns):
        optimizer.zero_grad()
        inputs, targets = data(step, turn)
        seen = plain_step(modules, (inputs, targets), 4)
        for p, (_, gradient) in zip(every, _named(modules, seen.gradients), strict=True):
            p.grad = torch.from_numpy(gradient.copy())
        found.append((seen.losses, seen.gradients))
        optimizer.step()
    return found


def _named(modules: Sequence[nn.Module], found: Gradients) -> list[tuple[str, Any]]:
    names = [f"{s}.{name}" for s, module in enumerate(modules) for name, _ in module.named_parameters()]
    return [(name, found[name]) for name in names]
