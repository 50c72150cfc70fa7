"""What the ranks run in `test_training` with replicas: stages in DDP or FSDP."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from optpipe.errors import InputError, OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.ranks.replicas import Replicas
from support.ranks.cases import LENGTH, WIDTH, WORDS, Gradients, batch, loss_fn, make_stages, plain_step, sgd


class Odd(nn.Module):
    """A stage with running means, and with a layer that it does not use."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.unused = nn.Sequential(*layers), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Seen(NamedTuple):
    """Of one step on one rank: losses where there are some, gradients, and the norm that clipping saw."""

    losses: list[float] | None
    gradients: Gradients
    norm: float = 0.0


@cache
def mesh() -> DeviceMesh:
    """Two replicas of two ranks each: ranks 0 and 1, ranks 2 and 3."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipe"))


class Place(NamedTuple):
    """This rank where two replicas of two ranks train."""

    group: dist.ProcessGroup  # of its pipeline
    replica: int
    number: int  # in the pipeline

    def batch(self, step: int, microbatches: int) -> list[Tensor]:
        """Its half of a batch: inputs and targets."""
        return [part.chunk(2)[self.replica] for part in batch(step, 2 * microbatches)]

    def stages(self, placement: Sequence[int], how: str, **options: Any) -> dict[int, nn.Module]:
        """Those of this rank, of the same model on both replicas."""
        stages = enumerate(make_stages(len(placement)))
        return {s: wrapped(module, how, **options) for s, module in stages if placement[s] == self.number}


def place() -> Place:
    group = mesh()["pipe"].get_group()
    return Place(group, dist.get_rank() // 2, dist.get_rank(group))


def whole(tensor: Tensor) -> Any:
    """Collective where it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().numpy().copy()


def parameters(modules: dict[int, nn.Module]) -> Gradients:
    return {
        f"{s}.{name.removeprefix('module.')}": whole(p)
        for s, module in modules.items()
        for name, p in module.named_parameters()
    }


def gradients(modules: dict[int, nn.Module]) -> Gradients:
    named = (
        (s, name.removeprefix("module."), p) for s, module in modules.items() for name, p in module.named_parameters()
    )
    return {f"{s}.{name}": whole(p.grad) for s, name, p in named if p.grad is not None}


def wrapped(module: nn.Module, how: str, replicas: DeviceMesh | None = None, **options: Any) -> nn.Module:
    if how == "alone":
        return module
    replicas = replicas or mesh()["replica"]
    if how == "ddp":
        return DistributedDataParallel(module, process_group=replicas.get_group(), **options)
    for part in (*module.children(), module):
        (fully_shard if how == "fsdp" else replicate)(part, mesh=replicas, **options)
    return module


def replicated(schedules: Sequence[Sequence[Schedule]], how: str) -> list[Seen]:
    """Each replica trains a step with each of its schedules on its half of the batch."""
    here, problem = place(), schedules[0][0].problem
    placement, m = [stage.device for stage in problem.stages], problem.microbatches
    modules = here.stages(placement, how)
    optimizer = sgd(*modules.values())
    seen = []
    with Pipeline(modules, placement, loss_fn, m, group=here.group) as pipe:
        for step, schedule in enumerate(schedules[here.replica]):
            pipe.load(schedule)
            optimizer.zero_grad()
            report = pipe.step(*here.batch(step, m))
            seen.append(Seen(report.losses, gradients(modules)))
            optimizer.step()
    return seen


class Odds(NamedTuple):
    """What a rank saw of a profile, evaluations before, between and after two accumulated steps, and of clipping."""

    sizes: tuple[int, ...]
    losses: list[list[float] | None]
    gradients: Gradients
    norm: float
    clipped: Gradients
    means: list[float]  # of the norm, after the last step


def odd_stages() -> list[nn.Module]:
    """The head is the embedding's transpose, tied by whoever uses them."""
    torch.manual_seed(5)
    first = Odd(nn.Embedding(WORDS, WIDTH), nn.BatchNorm1d(LENGTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
    last = Odd(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False))
    return [first, last]


def tied(module: nn.Module, stage: int) -> nn.Parameter:
    weight = module.get_submodule("layers.0" if stage == 0 else "layers.2").weight
    assert isinstance(weight, nn.Parameter)
    return weight


def odds(schedule: Schedule, how: str, **options: Any) -> Odds:
    here, m = place(), schedule.problem.microbatches
    number, inner = here.number, odd_stages()[here.number]
    module = wrapped(inner, how, **options)
    data = [here.batch(step, m) for step in range(2)]
    with Pipeline({number: module}, [0, 1], loss_fn, m, group=here.group) as pipe:
        pipe.tie(tied(inner, number))
        problem = pipe.profile(*data[0], activation_budget_bytes=10**9, repeats=1)
        pipe.load(Schedule(problem, schedule.programs))
        losses = [pipe.evaluate(*data[0]).losses]
        for inputs, targets in data:
            pipe.step(inputs, targets)
            means = [float(mean) for mean in inner.get_submodule("layers.1").running_mean] if number == 0 else []  # type: ignore[union-attr]
            losses.append(pipe.evaluate(inputs, targets).losses)
        found, norm = gradients({number: module}), pipe.clip_grad_norm_(0.1)
        stage = problem.stages[number]
        sizes = (
            stage.activation_bytes,
            stage.saved_for_weight_bytes,
            stage.checkpoint_bytes or 0,
            stage.offload_bytes or 0,
        )
        return Odds(sizes, losses, found, norm, gradients({number: module}), means)


def plain_odds(microbatches: int) -> tuple[Gradients, float, Gradients]:
    """Gradients of two accumulated steps in one process, the norm, and the clipped gradients."""
    torch.set_num_threads(1)
    modules = odd_stages()
    tied(modules[1], 1).data = tied(modules[0], 0).data
    modules[1].get_submodule("layers.2").weight = tied(modules[0], 0)
    for step in range(2):
        plain_step(modules, *batch(step, microbatches), microbatches)
    found = gradients(dict(enumerate(modules)))
    norm = nn.utils.clip_grad_norm_(list(dict.fromkeys(p for module in modules for p in module.parameters())), 0.1)
    return found, norm.item(), gradients(dict(enumerate(modules)))


class Collectives(TorchDispatchMode):
    """Counts what passes between replicas on FSDP."""

    def __init__(self, count: Counter[str]) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name, what in {"allgather": "_allgather_base", "reduce_scatter": "reduce_scatter"}.items():
            self.count[name] += what in str(func)  # `allgather_` is that of objects, between the ranks of a pipeline
        return func(*args, **kwargs or {})


@contextmanager
def collectives(pipe: Pipeline) -> Iterator[Counter[str]]:
    """Those of this thread and of the reductions."""
    count: Counter[str] = Counter()

    def reduction(s: int) -> Any:
        read, reduce = Replicas.reduction(pipe._rank.replicas, s)

        def counted() -> None:
            with Collectives(count):
                reduce()

        return read, counted

    with Collectives(count), patch.multiple(pipe._rank.replicas, reduction=reduction):
        yield count


def uneven(first: Schedule, better: Schedule) -> tuple[list[int], list[Gradients], list[dict[str, int]]]:
    """On FSDP: only the first replica is offered a better schedule, and only its batch changes its shape, in the second
    step. Versions, gradients, and the collectives of each step."""
    here, m = place(), first.problem.microbatches
    modules = here.stages([0, 1], "fsdp")
    versions, found, made = [], [], []
    with Pipeline(modules, [0, 1], loss_fn, m, group=here.group) as pipe:
        pipe.load(first)
        if dist.get_rank() == 0:
            pipe.offer(better)
        for step in range(2000):  # until the swap: how many steps the preparation takes is not the test
            modules[here.number].zero_grad()
            inputs, targets = here.batch(step, m)
            if step == 1 and here.replica == 0:
                inputs, targets = inputs[:, : LENGTH // 2].contiguous(), targets[:, : LENGTH // 2].contiguous()
            with collectives(pipe) as count:
                versions.append(pipe.step(inputs, targets).version)
            made.append(dict(count))
            found.append(gradients(modules))
            newest = torch.tensor(versions[-1])
            dist.all_reduce(newest, op=dist.ReduceOp.MAX)
            if newest == 2 and step > 1:
                break
    return versions, found, made


def hooked(schedule: Schedule, steps: int) -> tuple[list[int], int]:
    """With a communication hook on DDP, which sets gradients to one: how many numbers it saw, each time; and how many
    there are."""
    here, m = place(), schedule.problem.microbatches
    (module,) = here.stages([0, 1], "ddp").values()
    seen: list[int] = []
    assert isinstance(module, DistributedDataParallel)

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and takes no strings
        seen.append(bucket.buffer().numel())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(torch.ones_like(bucket.buffer()))
        return done

    module.register_comm_hook(None, hook)
    with Pipeline({here.number: module}, [0, 1], loss_fn, m, group=here.group) as pipe:
        pipe.load(schedule)
        for step in range(steps):
            pipe.step(*here.batch(step, m))
    assert all(bool((p.grad == 1).all()) for p in module.parameters())
    return seen, sum(p.numel() for p in module.parameters())


def undone(first: Schedule, larger: Schedule, how: str, **options: Any) -> tuple[list[int], Gradients]:
    """One rank of the first replica runs out of memory late in its first step by another schedule. Versions, and the
    step's gradients."""
    here, m = place(), first.problem.microbatches
    modules = here.stages([0, 1], how, **options)
    full: list[bool] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if here.replica == 0 and pipe.version == 2:
            full.append(len(full) == m - 1)
            if full[-1]:
                raise MemoryError("no more")
        return loss_fn(output, target)

    versions = []
    with Pipeline(modules, [0, 1], loss, m, group=here.group) as pipe:
        for step, schedule in enumerate((first, larger)):
            pipe.load(schedule)
            modules[here.number].zero_grad()
            versions.append(pipe.step(*here.batch(step, m)).version)
        return versions, gradients(modules)


def bereft(schedule: Schedule, how: str) -> str:
    """Two replicas of one rank each, of which the first is killed in its second step. What the other is told."""
    rank, m, step = dist.get_rank(), schedule.problem.microbatches, 0
    replicas = init_device_mesh("cpu", (2,))
    stages = dict(enumerate(wrapped(module, how, replicas) for module in make_stages(2)))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if step == 1 and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_fn(output, target)

    try:
        with Pipeline(stages, [0, 0], loss, m, group=[dist.new_group([r]) for r in range(2)][rank]) as pipe:
            pipe.load(schedule)
            for step in range(3):
                pipe.step(*(part.chunk(2)[rank] for part in batch(step, 2 * m)))
    except OptPipeError as error:
        return str(error)
    return "it ran"


def refused(schedule: Schedule) -> list[str]:
    """What is told to who wraps a stage in a way that cannot work."""
    group, _, number = place()
    m, told = schedule.problem.microbatches, list[str]()

    def attempt(module: nn.Module, **data: Tensor) -> None:
        try:
            with Pipeline({number: module}, [0, 1], loss_fn, m, group=group) as pipe:
                pipe.load(schedule)
                pipe.step(**data)
        except InputError as error:
            told.append(str(error))

    torch.manual_seed(0)
    attempt(DistributedDataParallel(nn.Linear(2, 2)))
    attempt(fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (4,))))
    attempt(nn.Sequential(wrapped(nn.Linear(2, 2), "ddp")))
    attempt(wrapped(nn.Linear(2, 2), "ddp", static_graph=True))
    inputs, targets = batch(0, m)
    attempt(wrapped(odd_stages()[number], "ddp"), inputs=inputs, targets=targets)
    return told
