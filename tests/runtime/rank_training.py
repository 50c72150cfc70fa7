"""What the ranks do in `test_training`: replicas, clipping, optimizers, scaled losses, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rank_cases import Gradients, batch, loss_fn, make_stages
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline


class Seen(NamedTuple):
    """Of one step on one rank: losses where there are some, gradients, the norm that clipping saw, and the peak of activations."""

    losses: list[float] | None
    gradients: Gradients
    norm: float
    peak_bytes: int


@cache
def mesh() -> DeviceMesh:
    """Two replicas of two ranks each: ranks 0 and 1, ranks 2 and 3."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipe"))


def whole(tensor: Tensor) -> Any:
    """Collective where it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()).numpy().copy()


def gradients(modules: dict[int, nn.Module]) -> Gradients:
    named = ((s, name.removeprefix("module."), p) for s, module in modules.items() for name, p in module.named_parameters())
    return {f"{s}.{name}": whole(p.grad) for s, name, p in named if p.grad is not None}


def wrapped(module: nn.Module, how: str, **options: Any) -> nn.Module:
    replicas = mesh()["replica"]
    if how == "ddp":
        return DistributedDataParallel(module, process_group=replicas.get_group(), **options)
    if how == "fsdp":
        for part in list(module.children()):
            fully_shard(part, mesh=replicas, **options)
        fully_shard(module, mesh=replicas, **options)
    return module


def replicated(schedules: Sequence[Sequence[Schedule]], how: str, max_norm: float = 0.0, **options: Any) -> list[Seen]:
    """Each replica trains a step with each of its schedules on its half of the batch."""
    group, replica = mesh()["pipe"].get_group(), dist.get_rank() // 2
    number, m = dist.get_rank(group), schedules[0][0].problem.microbatches
    placement = [stage.device for stage in schedules[0][0].problem.stages]
    modules = {s: wrapped(module, how, **options) for s, module in enumerate(make_stages(len(placement))) if placement[s] == number}
    optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=0.1)
    seen = []
    with Pipeline(modules, placement, loss_fn, m, group=group) as pipe:
        for step, schedule in enumerate(schedules[replica]):
            pipe.load(schedule)
            optimizer.zero_grad()
            inputs, targets = (part.chunk(2)[replica] for part in batch(step, 2 * m))
            report = pipe.step(inputs, targets)
            norm = pipe.clip_grad_norm_(max_norm) if max_norm else 0.0
            seen.append(Seen(report.losses, gradients(modules), norm, report.peak_activation_bytes))
            optimizer.step()
    return seen


def plain(
    stages: int, microbatches: int, steps: int, replica: int | None = None, max_norm: float = 0.0
) -> tuple[list[list[float]], list[Gradients], list[float]]:
    """The same in one process: over the whole batch, or a replica's half of it. Losses, gradients, and the norms that clipping saw."""
    torch.set_num_threads(1)
    modules = make_stages(stages)
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses: list[list[float]] = []
    found, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = (
            batch(step, microbatches) if replica is None else (part.chunk(2)[replica] for part in batch(step, 2 * microbatches))
        )
        losses.append([])
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            for module in modules:
                x = module(x)
            loss = loss_fn(x, y)
            torch.autograd.backward(loss / microbatches)
            losses[-1].append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(parameters, max_norm).item() if max_norm else 0.0)
        found.append(gradients(dict(enumerate(modules))))
        optimizer.step()
    return losses, found, norms
