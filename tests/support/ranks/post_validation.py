"""Trainings on ranks whose updates are ahead of their norm, and the same ones whose updates wait."""

import math
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

from optpipe.errors import OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.pipeline import post_validation
from optpipe_runtime.stage.runner import StageRunner
from support.ranks.cases import LENGTH, WIDTH, Gradients, own, pipeline
from support.ranks.replicas import Place, mesh, parameters, place, whole, wrapped
from support.ranks.swaps import WAIT, failing, heard

OPTIMIZERS = {
    "adamw": lambda own: torch.optim.AdamW(own, lr=1e-2, weight_decay=0.1),
    "sgd": lambda own: torch.optim.SGD(own, lr=0.1),
    "momentum": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9),
    # changes gradients in place
    "nesterov": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "tensor rate": lambda own: torch.optim.Adam(own, lr=torch.tensor(1e-2)),
}


class Turn(NamedTuple):
    """One step of a training and what comes around it.

    `load`: which schedule, by its place. `memory`: a rank whose first backward runs out of
    memory. `reads`: a rank that reads its optimizer's state alone after the update. `overflow`: a rank with an infinite
    gradient. `updates`: how often the optimizer steps.
    """

    sequences: int = 2
    load: int | None = None
    memory: int | None = None
    evaluate: bool = False
    reads: int | None = None
    overflow: int | None = None
    updates: int = 1


class Habits(NamedTuple):
    """`calm` is `post_validation.CALM`; with 0 every update is ahead of its norm."""

    optimizer: str = "adamw"
    max_norm: float | None = 1.0
    calm: int = 0
    to_none: bool = True
    how: str = "alone"  # or "ddp", "fsdp", "inner"


class Ran(NamedTuple):
    """On one rank: losses, norms, rates, the schedule of each step; parameters, buffers and state at the end."""

    losses: list[list[float] | None]
    norms: list[float]
    rates: list[float]
    parameters: Gradients
    state: Gradients
    methods: list[str]
    logged: list[str]
    runs: int  # of the executor, with those that fail and those that are left out


class Exact(nn.Module):
    """Refuses what is not finite, as models do that look at their numbers."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.isfinite().all():
            raise ValueError("not finite")
        return x


def stages(count: int, alone: bool) -> list[nn.Module]:
    torch.manual_seed(8)
    moods: list[list[nn.Module]] = [[nn.BatchNorm1d(LENGTH), nn.Dropout(0.1)] if alone else [] for _ in range(count)]
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), *mood, nn.GELU(), nn.Linear(WIDTH, WIDTH), Exact()) for mood in moods
    ]


def in_parts(stage: nn.Module, inner: DeviceMesh) -> nn.Module:
    return parallelize_module(stage, inner, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def placed(placement: Sequence[int], how: str) -> tuple[Place, DeviceMesh | None, dict[int, nn.Module]]:
    """This rank, its inner peers, which get the same batch, and its stages."""
    here, inner = place(alone=how == "alone"), mesh()["replica"] if how == "inner" else None
    modules = {
        s: wrapped(module, how) if inner is None else in_parts(module, inner)
        for s, module in own(stages(len(placement), how == "alone"), placement, here.group).items()
    }
    return here if inner is None else here._replace(replica=0), inner, modules


def batch(step: int, sequences: int, microbatches: int, replica: int) -> tuple[Tensor, Tensor]:
    """Losses, and so norms, differ much from step to step."""
    generator = torch.Generator().manual_seed(2 * step + replica)
    inputs, targets = torch.randn(2, sequences * microbatches, LENGTH, WIDTH, generator=generator)
    return inputs, targets * (1 + step % 3)


def trained(
    placement: Sequence[int], schedules: Sequence[Schedule], turns: Sequence[Turn], habits: Habits, validated: bool
) -> Ran:
    """A training; `validated`: by `post_validate`, else each update waits for its norm."""
    m = schedules[0].problem.microbatches
    (group, replica, number, _), inner, modules = placed(placement, habits.how)
    optimizer = OPTIMIZERS[habits.optimizer]([p for module in modules.values() for p in module.parameters()])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(turns))
    torch.manual_seed(number)
    losses, norms, rates, methods = [], [], [], []
    with (
        calm(habits.calm),
        heard() as logged,
        Pipeline(modules, placement, mse_loss, m, group=group, inner=inner) as pipe,
        mock.patch.object(pipe.runner.executor, "run", wraps=pipe.runner.executor.run) as run,
        mock.patch.object(pipe.runner.executor, "skip", wraps=pipe.runner.executor.skip) as skip,
    ):
        pipe.load(schedules[0])
        if validated:
            pipe.post_validate(optimizer, habits.max_norm)
        for step, turn in enumerate(turns):
            data = batch(step, turn.sequences, m, replica)
            if turn.load is not None:
                pipe.load(schedules[turn.load])
            scarce = turn.memory == number
            with failing("backward", 1, torch.OutOfMemoryError("too much")) if scarce else nullcontext():
                losses.append(pipe.step(*data).losses)
            methods.append(pipe.schedule.method)
            if turn.overflow == number:
                next(p for module in modules.values() for p in module.parameters()).grad.mul_(torch.inf)  # type: ignore[union-attr]
            for _ in range(turn.updates):
                if validated:
                    optimizer.step()
                else:
                    norms.append(clipping(pipe, optimizer, habits.max_norm))
                rates.append(float(optimizer.param_groups[0]["lr"]))
            scheduler.step()
            if turn.updates:
                optimizer.zero_grad(set_to_none=habits.to_none)
            if turn.reads == number:
                optimizer.state_dict()
            if turn.evaluate:
                losses.append(pipe.evaluate(*data).losses)
        pipe.synchronize()
        state = {
            f"{k}.{name}": whole(v) for k, own in optimizer.state_dict()["state"].items() for name, v in own.items()
        }
        buffers = {f"{s}.{n}": whole(b) for s, module in modules.items() for n, b in module.named_buffers()}
        found, runs = parameters(modules) | buffers, run.call_count + skip.call_count
        return Ran(losses, norms, rates, found, state, methods, list(logged), runs)


def clipping(pipe: Pipeline, optimizer: torch.optim.Optimizer, max_norm: float | None) -> float:
    """An update as users make it that wait: returns its norm. Leaves the gradients as they were."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    before = [None if p.grad is None else p.grad.clone() for p in own]
    norm = pipe.clip_grad_norm_(max_norm or math.inf)
    if math.isfinite(norm):
        optimizer.step()
    for p, grad in zip(own, before, strict=True):
        p.grad = grad
    return norm


def calm(count: int) -> AbstractContextManager[object]:
    return mock.patch.object(post_validation, "CALM", count)


def ahead(schedule: Schedule, steps: int, validated: bool) -> list[float | None]:
    """Rank 1 does not end a step until rank 0 has begun the next."""
    rank, m, losses = dist.get_rank(), schedule.problem.microbatches, []
    store, begun, run = dist.distributed_c10d._get_default_store(), [0], f"ahead {validated}"
    module = stages(2, alone=True)[rank]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    real_forward, real_weight, weights = StageRunner.forward, StageRunner.weight, [0]

    def forward(self: StageRunner, microbatch: int, *arguments: Any, **options: Any) -> Any:
        if microbatch == 0 and pipe.schedule is not None and begun[0]:
            store.set(f"{run} {begun[0]}", "")
        return real_forward(self, microbatch, *arguments, **options)

    def weight(self: StageRunner, microbatch: int) -> None:
        weights[0] += 1
        if weights[0] % m == 0 and 1 <= begun[0] < steps:
            store.wait([f"{run} {begun[0] + 1}"])
        real_weight(self, microbatch)

    with pipeline({rank: module}, schedule, mse_loss) as pipe:
        pipe.step(*batch(0, 2, m, 0))
        if validated:
            pipe.post_validate(optimizer, 1e3)
        pipe.gather(None)
        weights[0] = 0
        with mock.patch.object(StageRunner, *(("forward", forward) if rank == 0 else ("weight", weight))):
            for step in range(1, steps + 1):
                optimizer.zero_grad()
                begun[0] = step
                losses.append(pipe.step(*batch(step, 2, m, 0)).loss)
                optimizer.step()
    return losses


# What goes wrong


def told_of(schedule: Schedule, what: str) -> list[str]:
    """What a rank is told. Where one is killed, the other leaves `with` by the error."""
    rank, m, told = dist.get_rank(), schedule.problem.microbatches, []
    module = stages(2, alone=True)[rank]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    given: Mapping[str, tuple[Any, Any]] = {"max_norm": (optimizer, -1.0), "differs": (optimizer, 1.0 + rank)}
    with suppress(OptPipeError), pipeline({rank: module}, schedule, mse_loss) as pipe:
        try:
            pipe.post_validate(*given.get(what, (optimizer, 1.0)))
            pipe.step(*batch(0, 2, m, 0))
            if what == "closure":
                optimizer.step(lambda: 0.0)
            if what != "one rank" or rank == 0:
                optimizer.step()
            if what == "killed" and rank == 1:
                os.kill(os.getpid(), 9)
            for step in range(1, 4):
                if what == "raises" and rank == 1 and step == 2:
                    raise KeyError("data")
                pipe.step(*batch(step, 2, m, 0))
                optimizer.step()
        except OptPipeError as error:
            told.append(str(error))
            if what == "killed":
                raise
    return told


# All that may happen, in one training

SEQUENCES, SWAPS, LEAST_STEPS = 8, 3, 9


class RanTogether(NamedTuple):
    """On one rank, by step; parameters at the end. `windows`: in how many steps gradients were reduced in windows."""

    losses: list[float | None]
    methods: list[str]
    norms: list[float]
    parameters: Gradients
    windows: int
    logged: list[str]


def train_together(schedules: Sequence[Schedule], how: str, max_norm: float, steps: int | None = None) -> RanTogether:
    """Two ranks, and two replicas or inner peers of each. With so many `steps` by the first schedule, and updates that
    wait for their norm. Without, until each replica has swapped several times: each is offered schedules by chance, and
    updates are ahead of their norm. In both, batches change their shape, on one replica only, and one update is not
    finite."""
    attacked, placement = steps is None, [stage.device for stage in schedules[0].problem.stages]
    (group, replica, number, _), inner, modules = placed(placement, "fsdp" if how == "windows" else how)
    optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=0.1)
    chance, ran, m = random.Random(replica), RanTogether([], [], [], {}, 0, []), schedules[0].problem.microbatches
    whole = 1 if attacked and how == "windows" else None
    with (
        calm(0),
        heard() as logged,
        Pipeline(modules, placement, mse_loss, m, group=group, inner=inner, whole_gradients=whole) as pipe,
    ):
        pipe.load(schedules[0])
        if attacked:
            pipe.post_validate(optimizer, max_norm)
        while len(ran.methods) < (LEAST_STEPS if steps is None else steps) or (attacked and not _swapped(pipe)):
            step = len(ran.methods)
            assert step < WAIT
            if attacked and number == 0 and not pipe.preparing:
                pipe.offer(chance.choice(schedules))
            more = 2 if replica == 0 and step % 7 in (4, 5) else 1
            ran.losses.append(pipe.step(*batch(step, more, SEQUENCES, replica)).loss)
            ran.methods.append(pipe.schedule.method)
            ran = ran._replace(windows=ran.windows + pipe.runner.rank.reductions.in_windows)
            if step == 6 and number == 1:
                next(p for module in modules.values() for p in module.parameters()).grad.mul_(math.nan)  # type: ignore[union-attr]
            if attacked:
                optimizer.step()
            else:
                ran.norms.append(clipping(pipe, optimizer, max_norm))
            optimizer.zero_grad()
        pipe.synchronize()
        return ran._replace(parameters=parameters(modules), logged=list(logged))


def _swapped(pipe: Pipeline) -> bool:
    least = torch.tensor(pipe.version)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.item() > SWAPS
