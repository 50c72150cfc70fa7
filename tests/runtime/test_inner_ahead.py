"""Ranks with inner peers begin a step before other ranks have ended the one before."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.close import require_close
from support.ranks.cases import LENGTH, Gradients, batch, loss_fn, plain_training, problem
from support.ranks.inner import make_stages, mesh, parallel
from support.ranks.programs import SPLIT
from support.ranks.replicas import gradients
from support.ranks.worker import Ranks
from torch import Tensor

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline

PATIENCE = timedelta(seconds=100)


class Turn(NamedTuple):
    """One step. `ahead`: the last stage's ranks begin it only when the first stage's have begun their first forward.
    `length`: of sequences. `evaluating`: only the second peer of the first stage has changed its mode."""

    ahead: bool = True
    length: int = LENGTH
    evaluating: bool = False


def data(step: int, turn: Turn) -> tuple[Tensor, Tensor]:
    inputs, targets = (part[:, : turn.length].contiguous() for part in batch(step, 4))
    return inputs, targets


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


def test_no_rank_waits_for_others_than_its_peers_between_two_steps(four_ranks: Ranks) -> None:
    """The last stage begins a step when the first stage computes in it: did all meet before each step, this never
    ended. Where the batch of all ranks has another shape, or the module of one peer another mode, the step that has
    begun is undone, on all peers, and runs again."""
    turns = [
        Turn(ahead=False),
        Turn(),
        Turn(),
        Turn(ahead=False, length=LENGTH // 2),
        Turn(length=LENGTH // 2),
        Turn(ahead=False, length=LENGTH // 2, evaluating=True),
        Turn(ahead=False, length=LENGTH // 2),
        Turn(length=LENGTH // 2),
    ]
    ranks = four_ranks(trained, programs=SPLIT, turns=turns)
    for step, plain in enumerate(plain_training(make_stages(), map(data, range(len(turns)), turns), 4)):
        largest = max(float(abs(gradient).max()) for gradient in plain.gradients.values())
        for first, last in ((ranks[0], ranks[2]), (ranks[1], ranks[3])):
            assert last[step][0] == pytest.approx(plain.losses, rel=1e-4)
            require_close(first[step][1] | last[step][1], plain.gradients, rtol=1e-3, atol=1e-5 * largest)
