"""What the ranks run in `test_gpu`: trainings on whatever device the tests compute on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from support.ranks import cases, replicas
from support.ranks.device import KIND, ON_CUDA, device
from support.ranks.optimizer import momentum
from support.ranks.swaps import failing, heard


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast(KIND, dtype=torch.bfloat16)


def _compiled(module: nn.Module) -> nn.Module:
    """By inductor on CUDA, which on CPU would need a compiler for C++."""
    return torch.compile(module, backend="inductor" if ON_CUDA else "aot_eager")


def _wrapped(how: str) -> Callable[[nn.Module], nn.Module]:
    """In the wrapper of replicas, of which this one rank is the only one."""
    return lambda module: replicas.wrapped(module, how, init_device_mesh(KIND, (1,)))


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "autocast": lambda module: module,
    "compiled": _compiled,
    "ddp": _wrapped("ddp"),
    "fsdp": _wrapped("fsdp"),
    "host optimizers": lambda module: module,
}


def trained(way: str, schedules: Sequence[Schedule]) -> tuple[float, float]:
    """Trains both stages on one rank, by one schedule after the other, and the same in plain torch. The largest
    difference of a loss, relative to it, and of a parameter, relative to the largest change of one."""
    inside = _autocast if way == "autocast" else nullcontext
    placement, m = [0, 0], schedules[0].problem.microbatches
    begun = cases.make_stages(2)
    plain, ours = copy.deepcopy(begun), [WAYS[way](module) for module in copy.deepcopy(begun)]
    hosted = {1: momentum} if way == "host optimizers" else None
    theirs = momentum([p for module in plain for p in module.parameters()])
    optimizer = momentum([p for s, module in enumerate(ours) if s not in (hosted or ()) for p in module.parameters()])
    losses: list[tuple[float, float]] = []
    with Pipeline(dict(enumerate(ours)), placement, cases.loss_fn, m, host_optimizers=hosted) as pipe:
        for step, schedule in enumerate(schedules):
            inputs, targets = cases.batch(step, m)
            pipe.load(schedule)
            optimizer.zero_grad()
            theirs.zero_grad()
            with inside():
                found = pipe.step(inputs, targets).losses or []
                outputs = [plain[1](plain[0](x)) for x in inputs.chunk(m)]
                expected = [cases.loss_fn(y, target) for y, target in zip(outputs, targets.chunk(m), strict=True)]
            for loss in expected:
                torch.autograd.backward(loss / m)
            losses += [(a, float(b)) for a, b in zip(found, expected, strict=True)]
            optimizer.step()
            theirs.step()
        pipe.synchronize()
        after = replicas.parameters(dict(enumerate(ours)))
    right, before = (replicas.parameters(dict(enumerate(modules))) for modules in (plain, begun))
    changed = max(float(abs(right[name] - before[name]).max()) for name in right)
    names = dict(zip(right, after, strict=True))  # a compiled module adds to its parameters' names
    off = max(float(abs(after[names[name]] - right[name]).max()) for name in right)
    return max(abs(a - b) / abs(b) for a, b in losses), off / changed


class Measured(NamedTuple):
    """Of a profile by default arguments, on CUDA without a budget."""

    transfer_mode: str
    budget: int
    times_ms: list[float]


def profiled(microbatches: int) -> Measured:
    with Pipeline(dict(enumerate(cases.make_stages(2))), [0, 0], cases.loss_fn, microbatches) as pipe:
        problem = pipe.profile(
            *cases.batch(0, microbatches), activation_budget_bytes=None if ON_CUDA else 10**9, repeats=3
        )
        stage = problem.stages[0]
    times = [stage.forward_ms, stage.backward_input_ms, stage.offload_ms or 0.0, stage.reload_ms or 0.0]
    return Measured(problem.transfer_mode, problem.devices[0].activation_budget_bytes, times)


class Wide(nn.Module):
    """Saves three results of its input's size, and the loss a fourth: 16 MiB each on CUDA, enough to run out of memory
    by them."""

    ROWS, WIDTH = 4096 if ON_CUDA else 64, 1024
    NBYTES = 4 * ROWS * WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(self.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for _ in range(3):
            x = torch.sin(x)
        return x


def wide(microbatches: int) -> tuple[nn.Module, Tensor]:
    x = torch.linspace(0, 1, microbatches * Wide.ROWS, device=device())
    return Wide().to(device()), x[:, None].expand(-1, Wide.WIDTH).contiguous()


def freed(schedule: Schedule) -> tuple[int, int, list[bool]]:
    """The bytes that the drop of an activation frees and its reload takes, as CUDA's allocator counts (on CPU as the
    stage does, which `test_store` compares with the process), and whether the host's pages are locked."""
    module, x = wide(2)
    stage_bytes: dict[str, int] = {}
    with cases.pipeline({0: module}, schedule, mse_loss) as pipe:
        report = [pipe.step(x, torch.zeros_like(x), trace=True) for _ in range(2)][-1]
        locked = [page.is_pinned() for page in pipe.runner.rank.pool.take(1)] if ON_CUDA else [True]
    for before, after in zip(report.trace, report.trace[1:], strict=False):
        kind = after.op.kind.name
        counted = (before.allocated_bytes, after.allocated_bytes) if ON_CUDA else (before.held_bytes, after.held_bytes)
        if kind in "DR" and after.op.microbatch == 0:
            assert None not in counted
            stage_bytes[kind] = int(counted[1] or 0) - int(counted[0] or 0)
    return -stage_bytes["D"], stage_bytes["R"], locked


@contextmanager
def _little_memory(more: int) -> Iterator[None]:
    """In this context the allocator gets no more than it has, and `more` bytes."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device()).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def out_of_memory(little: Schedule, much: Schedule, rank: int = 0) -> tuple[str, bool, list[str]]:
    """A step by `little`, the same by `much`, for which the device's memory is too small on one rank, and a third. The
    schedule that runs in the end, whether gradients are those of the first step, and the log."""
    here, m = dist.get_rank(), little.problem.microbatches
    module, x = wide(m)
    inputs = {"inputs": x} if here == 0 else {}
    targets = {"targets": torch.zeros_like(x)} if here == dist.get_world_size() - 1 else {}
    gradients: list[Tensor] = []
    with Pipeline({here: module}, list(range(dist.get_world_size())), mse_loss, m) as pipe, heard() as logged:
        # One micro-batch and its learning take about ten results at once, eight micro-batches 24 and more.
        short = _little_memory(20 * Wide.NBYTES) if ON_CUDA and here == rank else nullcontext()
        with short:
            for schedule in (little, much, None):
                if schedule is not None:
                    pipe.load(schedule)
                module.zero_grad()
                with _too_much(much, pipe, here == rank):
                    pipe.step(**inputs, **targets)
                gradients.append(module.scale.grad.clone())
        same = all(torch.allclose(gradients[0], gradient, rtol=1e-5) for gradient in gradients[1:])
        return pipe.schedule.method, same, list(logged)


def _too_much(much: Schedule, pipe: Pipeline, here: bool) -> AbstractContextManager[Any]:
    """On CPU nothing runs out of memory, so an op says that it has."""
    if ON_CUDA or not here or pipe.schedule.method != much.method:
        return nullcontext()
    return failing("forward", 3, torch.OutOfMemoryError("too much"))
