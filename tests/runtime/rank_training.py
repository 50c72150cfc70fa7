"""What the ranks do in `test_training`: replicas, clipping, optimizers, scaled losses, checkpoints."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_cases import LENGTH, WIDTH, WORDS, Gradients, batch, loss_fn, make_stages, own_stages
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from optpipe.errors import InputError, OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline


class Odd(nn.Module):
    """A stage with running means, and with a layer that it does not use."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.unused = nn.Sequential(*layers), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


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
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()


def parameters(modules: dict[int, nn.Module]) -> Gradients:
    return {f"{s}.{name.removeprefix('module.')}": whole(p) for s, module in modules.items() for name, p in module.named_parameters()}


def gradients(modules: dict[int, nn.Module]) -> Gradients:
    named = ((s, name.removeprefix("module."), p) for s, module in modules.items() for name, p in module.named_parameters())
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
    stages: int, microbatches: int, steps: int, replica: int | None = None, max_norm: float = 0.0, norm_type: float = 2.0
) -> tuple[list[list[float]], list[Gradients], list[float]]:
    """The same in one process: over the whole batch, or a replica's half of it. Losses, gradients, and the norms that clipping saw."""
    torch.set_num_threads(1)
    modules = make_stages(stages)
    every = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(every, lr=0.1)
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
        norms.append(nn.utils.clip_grad_norm_(every, max_norm, norm_type).item() if max_norm else 0.0)
        found.append(gradients(dict(enumerate(modules))))
        optimizer.step()
    return losses, found, norms


def clipped(schedules: Sequence[Schedule], max_norm: float, norm_type: float) -> list[Seen]:
    """A step with each schedule on two ranks."""
    rank, m = dist.get_rank(), schedules[0].problem.microbatches
    modules = own_stages([0, 1])
    optimizer = torch.optim.SGD(modules[rank].parameters(), lr=0.1)
    seen = []
    with Pipeline(modules, [0, 1], loss_fn, m) as pipe:
        for step, schedule in enumerate(schedules):
            pipe.load(schedule)
            optimizer.zero_grad()
            report = pipe.step(*batch(step, m))
            norm = pipe.clip_grad_norm_(max_norm, norm_type)
            seen.append(Seen(report.losses, gradients(modules), norm, report.peak_activation_bytes))
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
    group, replica = mesh()["pipe"].get_group(), dist.get_rank() // 2
    number, m = dist.get_rank(group), schedule.problem.microbatches
    inner = odd_stages()[number]
    module = wrapped(inner, how, **options)
    data = [tuple(part.chunk(2)[replica] for part in batch(step, 2 * m)) for step in range(2)]
    with Pipeline({number: module}, [0, 1], loss_fn, m, group=group) as pipe:
        pipe.tie(tied(inner, number))
        problem = pipe.profile(*data[0], memory_bytes=10**9, repeats=1)
        pipe.load(Schedule(problem, schedule.programs))
        losses = [pipe.evaluate(*data[0]).losses]
        for inputs, targets in data:
            pipe.step(inputs, targets)
            means = [float(mean) for mean in inner.get_submodule("layers.1").running_mean] if number == 0 else []  # type: ignore[union-attr]
            losses.append(pipe.evaluate(inputs, targets).losses)
        found, norm = gradients({number: module}), pipe.clip_grad_norm_(0.1)
        stage = problem.stages[number]
        sizes = stage.activation_bytes, stage.weight_grad_bytes, stage.checkpoint_bytes or 0, stage.offload_bytes or 0
        return Odds(sizes, losses, found, norm, gradients({number: module}), means)


def plain_odds(microbatches: int) -> tuple[Gradients, float, Gradients]:
    """Gradients of two accumulated steps in one process, the norm, and the clipped gradients."""
    torch.set_num_threads(1)
    modules = odd_stages()
    tied(modules[1], 1).data = tied(modules[0], 0).data
    modules[1].get_submodule("layers.2").weight = tied(modules[0], 0)
    for step in range(2):
        for x, y in zip(*(part.chunk(microbatches) for part in batch(step, microbatches)), strict=True):
            for module in modules:
                x = module(x)
            torch.autograd.backward(loss_fn(x, y) / microbatches)
    found = gradients(dict(enumerate(modules)))
    norm = nn.utils.clip_grad_norm_(list(dict.fromkeys(p for module in modules for p in module.parameters())), 0.1)
    return found, norm.item(), gradients(dict(enumerate(modules)))


class Collectives(TorchDispatchMode):
    """Counts what passes between replicas on FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name in ("allgather", "reduce_scatter"):
            self.count[name] += name in str(func)
        return func(*args, **kwargs or {})


def uneven(first: Schedule, better: Schedule) -> tuple[list[int], list[Gradients], list[dict[str, int]]]:
    """On FSDP: only the first replica is offered a better schedule, and only its batch changes its shape, in the second step. Versions,
    gradients, and the collectives of each step."""
    group, replica = mesh()["pipe"].get_group(), dist.get_rank() // 2
    number, m = dist.get_rank(group), first.problem.microbatches
    modules = {number: wrapped(make_stages(2)[number], "fsdp")}
    versions, found, made = [], [], []
    with Pipeline(modules, [0, 1], loss_fn, m, group=group) as pipe:
        pipe.load(first)
        if dist.get_rank() == 0:
            pipe.offer(better)
        for step in range(2000):  # until the swap: how many steps the preparation takes is not the test
            modules[number].zero_grad()
            inputs, targets = (part.chunk(2)[replica] for part in batch(step, 2 * m))
            if step == 1 and replica == 0:
                inputs, targets = inputs[:, : LENGTH // 2].contiguous(), targets[:, : LENGTH // 2].contiguous()
            with Collectives() as collectives:
                versions.append(pipe.step(inputs, targets).version)
            made.append(dict(collectives.count))
            found.append(gradients(modules))
            newest = torch.tensor(versions[-1])
            dist.all_reduce(newest, op=dist.ReduceOp.MAX)
            if newest == 2 and step > 1:
                break
    return versions, found, made


def hooked(schedule: Schedule, steps: int) -> tuple[list[int], int]:
    """With a communication hook on DDP, which sets gradients to one: how many numbers it saw, each time; and how many there are."""
    group, replica = mesh()["pipe"].get_group(), dist.get_rank() // 2
    number, m = dist.get_rank(group), schedule.problem.microbatches
    module, seen = wrapped(make_stages(2)[number], "ddp"), []
    assert isinstance(module, DistributedDataParallel)

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and takes no strings
        seen.append(bucket.buffer().numel())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(torch.ones_like(bucket.buffer()))
        return done

    module.register_comm_hook(None, hook)
    with Pipeline({number: module}, [0, 1], loss_fn, m, group=group) as pipe:
        pipe.load(schedule)
        for step in range(steps):
            pipe.step(*(part.chunk(2)[replica] for part in batch(step, 2 * m)))
    assert all(bool((p.grad == 1).all()) for p in module.parameters())
    return seen, sum(p.numel() for p in module.parameters())


def undone(first: Schedule, larger: Schedule, how: str, **options: Any) -> tuple[list[int], Gradients]:
    """One rank of the first replica runs out of memory late in its first step by another schedule. Versions, and the step's gradients."""
    group, replica = mesh()["pipe"].get_group(), dist.get_rank() // 2
    number, m = dist.get_rank(group), first.problem.microbatches
    modules = {number: wrapped(make_stages(2)[number], how, **options)}
    full: list[bool] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if replica == 0 and pipe.version == 2:
            full.append(len(full) == m - 1)
            if full[-1]:
                raise MemoryError("no more")
        return loss_fn(output, target)

    versions = []
    with Pipeline(modules, [0, 1], loss, m, group=group) as pipe:
        for step, schedule in enumerate((first, larger)):
            pipe.load(schedule)
            modules[number].zero_grad()
            versions.append(pipe.step(*(part.chunk(2)[replica] for part in batch(step, 2 * m))).version)
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
    group, m = mesh()["pipe"].get_group(), schedule.problem.microbatches
    number = dist.get_rank(group)
    told = []

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


def autocast(schedule: Schedule, states: Sequence[bool]) -> tuple[list[list[float] | None], Gradients]:
    """A step with autocast or without, one after the other, gradients added up, in which what passes between stages has another type."""
    m, rank = schedule.problem.microbatches, dist.get_rank()
    modules, losses = {rank: perceptrons()[rank]}, []
    with Pipeline(modules, [0, 1], loss_fn, m) as pipe:
        pipe.load(schedule)
        for step, enabled in enumerate(states):
            with torch.autocast("cpu", torch.bfloat16, enabled):
                losses += [pipe.step(*batch(step, m)).losses, pipe.evaluate(*batch(step, m)).losses]
    return losses, gradients(modules)


def plain_autocast(microbatches: int, states: Sequence[bool]) -> tuple[list[list[float]], Gradients]:
    torch.set_num_threads(1)
    modules = dict(enumerate(perceptrons()))
    losses: list[list[float]] = []
    for step, enabled in enumerate(states):
        losses.append([])
        for x, y in zip(*(part.chunk(microbatches) for part in batch(step, microbatches)), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled):
                loss = loss_fn(modules[1](modules[0](x)), y)
            torch.autograd.backward(loss / microbatches)
            losses[-1].append(loss.item())
        losses.append(losses[-1])
    return losses, gradients(modules)


def perceptrons() -> list[nn.Module]:
    torch.manual_seed(2)
    return [nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)), nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WORDS))]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda own: torch.optim.AdamW(own, lr=1e-2, weight_decay=0.1),
    "adamw fused": lambda own: torch.optim.AdamW(own, lr=1e-2, fused=True),
    "adamw foreach": lambda own: torch.optim.AdamW(own, lr=1e-2, foreach=True),
    "momentum": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda own: torch.optim.Adafactor(own, lr=1e-2),
}


class Habits(NamedTuple):
    """How somebody trains: every `accumulate` steps the optimizer, then the scheduler; gradients are set to None or to zero."""

    optimizer: str
    accumulate: int = 1
    to_none: bool = True


def optimized(habits: Habits, modules: dict[int, nn.Module], steps: int, run: Callable[[int], Any]) -> Gradients:
    """Trains by `run(step)` and returns the parameters."""
    optimizer = OPTIMIZERS[habits.optimizer]([p for module in modules.values() for p in module.parameters()])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for step in range(steps):
        run(step)
        if (step + 1) % habits.accumulate == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=habits.to_none)
    return parameters(modules)


def habitual(schedule: Schedule, all_habits: Sequence[Habits], steps: int) -> list[Gradients]:
    m = schedule.problem.microbatches
    found = []
    for habits in all_habits:
        modules = own_stages([0, 1])
        with Pipeline(modules, [0, 1], loss_fn, m) as pipe:
            pipe.load(schedule)
            found.append(optimized(habits, modules, steps, lambda step: pipe.step(*batch(step, m))))
    return found


def plainly(habits: Habits, microbatches: int, steps: int) -> Gradients:
    torch.set_num_threads(1)
    modules = dict(enumerate(make_stages(2)))

    def run(step: int) -> None:
        for x, y in zip(*(part.chunk(microbatches) for part in batch(step, microbatches)), strict=True):
            torch.autograd.backward(loss_fn(modules[1](modules[0](x)), y) / microbatches)

    return optimized(habits, modules, steps, run)


def scaled(schedule: Schedule, overflow: int) -> tuple[list[float], list[list[float] | None], Gradients]:
    """Four steps with a loss scale that overflows once, on rank 1 only: the scales, the losses, the parameters."""
    m, rank = schedule.problem.microbatches, dist.get_rank()
    modules = own_stages([0, 1])
    optimizer = torch.optim.SGD(modules[rank].parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**16, process_group=dist.group.WORLD)
    scaler.scale(torch.zeros(()))  # the scale is made at its first use, and only the last rank computes a loss
    scales, losses = [], []
    with Pipeline(modules, [0, 1], lambda output, target: scaler.scale(loss_fn(output, target)), m) as pipe:
        pipe.load(schedule)
        for step in range(4):
            optimizer.zero_grad()
            report = pipe.step(*batch(step, m))
            if step == overflow and rank == 1:
                next(modules[1].parameters()).grad[0] = torch.inf  # type: ignore[index]
            losses.append(report.losses and [loss / scaler.get_scale() for loss in report.losses])
            scaler.unscale_(optimizer)
            pipe.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    return scales, losses, parameters(modules)


def plainly_skipping(microbatches: int, skipped: int, max_norm: float) -> tuple[list[list[float]], Gradients]:
    """The same without a scale, and without the optimizer's step that overflows."""
    torch.set_num_threads(1)
    modules = dict(enumerate(make_stages(2)))
    every = [p for module in modules.values() for p in module.parameters()]
    optimizer = torch.optim.SGD(every, lr=0.1)
    losses: list[list[float]] = []
    for step in range(4):
        optimizer.zero_grad()
        losses.append([])
        for x, y in zip(*(part.chunk(microbatches) for part in batch(step, microbatches)), strict=True):
            loss = loss_fn(modules[1](modules[0](x)), y)
            torch.autograd.backward(loss / microbatches)
            losses[-1].append(loss.item())
        nn.utils.clip_grad_norm_(every, max_norm)
        if step != skipped:
            optimizer.step()
    return losses, parameters(modules)


def checkpointed(
    schedule: Schedule, folder: str, steps: range, resume: bool, save: bool, how: str = "alone", dropout: float = 0.0
) -> tuple[list[Any], Gradients]:
    """Trains some steps of a training, from the checkpoint or from the start; losses, and the parameters at the end."""
    placement = [stage.device for stage in schedule.problem.stages]
    group = mesh()["pipe"].get_group() if how != "alone" else None
    number, m = dist.get_rank(group), schedule.problem.microbatches
    modules = {s: wrapped(module, how) for s, module in enumerate(make_stages(len(placement), dropout)) if placement[s] == number}
    model = nn.ModuleDict({str(s): module for s, module in modules.items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    by_name = StateDictOptions(flatten_optimizer_state_dict=True)
    losses = []
    if resume:
        for module in modules.values():
            nn.init.zeros_(next(module.parameters()))  # all comes from the checkpoint

    def states() -> dict[str, Any]:
        own, its = get_state_dict(model, optimizer, options=by_name)
        random = {f"random.{number}": torch.get_rng_state()} if dropout else {}
        return {"model": own, "optimizer": its, "scheduler": scheduler.state_dict(), **random}

    with Pipeline(modules, placement, loss_fn, m, group=group) as pipe:
        pipe.load(schedule)
        if resume:
            state = states()
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=by_name)
            scheduler.load_state_dict(state["scheduler"])
            if dropout:
                torch.set_rng_state(state[f"random.{number}"])
        for step in steps:
            optimizer.zero_grad()
            losses.append(pipe.step(*batch(step, m)).losses)
            optimizer.step()
            scheduler.step()
        if save:
            dcp.save(states(), checkpoint_id=folder)
    return losses, parameters(modules)


def script(text: str, folder: str) -> str:
    """Runs a script that believes to begin and to end its process group, with `folder` for its files; returns what it prints."""
    begin, end = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = dist.destroy_process_group = lambda *_: None
    said, tempfile.tempdir = io.StringIO(), folder
    try:
        with contextlib.redirect_stdout(said):
            exec(compile(text, "docs/training.md", "exec"), {})
    finally:
        dist.init_process_group, dist.destroy_process_group, tempfile.tempdir = begin, end, None
    return said.getvalue()
