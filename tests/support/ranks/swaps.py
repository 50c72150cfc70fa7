"""What the ranks run in `test_swaps`: training while schedules change, and schedules that go wrong."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from optpipe.errors import OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline, StepReport
from optpipe_runtime.lowering.plan import Plan
from optpipe_runtime.memory import host_memory
from optpipe_runtime.memory.host_memory import HostMemory
from optpipe_runtime.stage.runner import StageRunner
from support.ranks.cases import LENGTH, WIDTH, Gradients, Plain, numbers, own, pipeline, plain_training, sgd

SEQUENCES = 12
WAIT = 2000  # steps within which an offer must have been taken


class Step(NamedTuple):
    losses: list[float]
    gradients: Gradients
    method: str


def stages(count: int, moody: bool = False) -> list[nn.Module]:
    """`moody`: with random numbers and running means."""
    torch.manual_seed(8)
    moods = [[nn.BatchNorm1d(LENGTH), nn.Dropout(0.1)] if moody else [] for _ in range(count)]
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), *mood, nn.GELU(), nn.Linear(WIDTH, WIDTH)).double() for mood in moods
    ]


def own_stages(placement: Sequence[int], moody: bool = False) -> dict[int, nn.Module]:
    return own(stages(len(placement), moody), placement)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, SEQUENCES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, targets


def plain(count: int, steps: int, microbatches: int) -> list[Plain]:
    return plain_training(stages(count), map(batch, range(steps)), microbatches, loss=mse_loss)


def chaos(placement: Sequence[int], schedules: Sequence[Schedule]) -> list[Step]:
    """A training of which each step runs another schedule: the first half loaded, the others offered, and between two
    steps nobody knows whether the offer is there yet."""
    modules, found = own_stages(placement), []
    optimizer = sgd(*modules.values())
    half = len(schedules) // 2
    with pipeline(modules, schedules[0], mse_loss) as pipe:

        def step() -> None:
            optimizer.zero_grad()
            report = pipe.step(*batch(len(found)))
            found.append(Step(report.losses or [], numbers(modules), pipe.schedule.method))
            optimizer.step()

        step()
        for schedule in schedules[1:half]:
            pipe.load(schedule)
            step()
        for schedule in schedules[half:]:
            if pipe.number == 0:
                pipe.offer(schedule)
            while found[-1].method != schedule.method:
                assert len(found) < WAIT
                step()
    return found


# Schedules that go wrong


def failing(op: str, nth: int, error: BaseException) -> AbstractContextManager[object]:
    real: Callable[..., Any] = getattr(StageRunner, op)
    left = [nth]

    def call(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error
        return real(*arguments, **options)

    return mock.patch.object(StageRunner, op, call)


class Trouble(NamedTuple):
    """A schedule that runs out of memory in the `nth` call of an op of `StageRunner` on one rank."""

    schedule: Schedule
    rank: int
    op: str
    nth: int


class Undone(NamedTuple):
    """How a step came out that was undone and repeated, and the same step without."""

    method: str
    version: int
    expected: Step
    found: Step
    logged: list[str]


def undone(placement: Sequence[int], first: Schedule, troubles: Sequence[Trouble]) -> list[Undone]:
    """A step by `first`; then the same by schedules that run out of memory. Gradients add to ones."""
    modules, found = own_stages(placement, moody=True), []
    state = {s: {name: value.clone() for name, value in module.state_dict().items()} for s, module in modules.items()}
    with pipeline(modules, first, _doubling) as pipe, heard() as logged:

        def step() -> tuple[Step, int]:
            for s, module in modules.items():
                module.load_state_dict(state[s])
                for parameter in module.parameters():
                    parameter.grad = torch.ones_like(parameter)
            torch.manual_seed(7)
            report = pipe.step(*batch(0))
            return _seen(pipe, report, modules), report.version

        expected, _ = step()
        for schedule, rank, op, nth in troubles:
            pipe.load(schedule)
            with failing(op, nth if pipe.number == rank else 0, torch.OutOfMemoryError("too much")):
                seen, version = step()
            found.append(Undone(pipe.schedule.method, version, expected, seen, list(logged)))
    return found


def _doubling(output: Tensor, target: Tensor) -> Tensor:
    """Changes the batch, as losses do that mask it in place."""
    return mse_loss(output, target.mul_(2))


def _seen(pipe: Pipeline, report: StepReport, modules: Mapping[int, nn.Module]) -> Step:
    buffers = {
        f"{s}.{name}": value.numpy().copy() for s, module in modules.items() for name, value in module.named_buffers()
    }
    return Step(report.losses or [], numbers(dict(modules)) | buffers, pipe.schedule.method)


@contextmanager
def heard(name: str = "optpipe.runtime") -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def paced(
    placement: Sequence[int], schedules: Mapping[str, Schedule], ms: Mapping[str, float]
) -> tuple[list[str], list[str]]:
    """Steps of given times and some noise: `quick`, `slow` offered twice, `better`, `slow` loaded."""
    modules, ran = own_stages(placement), []
    noise = np.random.default_rng(3 + dist.get_rank())
    with Pipeline(modules, placement, mse_loss, schedules["quick"].problem.microbatches) as pipe, heard() as logged:
        real = pipe.runner.executor.run

        def run(plan: Plan, *arguments: Any, **options: Any) -> StepReport:
            step_ms = ms[plan.schedule.method] + noise.uniform(0, 0.04) + (40.0 if len(ran) % 4 == 3 else 0.0)
            return replace(real(plan, *arguments, **options), step_ms=step_ms)

        pipe.runner.executor.run = run  # type: ignore[method-assign]

        def step(times: int = 1) -> None:
            for _ in range(times):
                pipe.step(*batch(0))
                ran.append(pipe.schedule.method)

        def offer(name: str) -> None:
            if pipe.number == 0:
                pipe.offer(schedules[name])
            step()
            while pipe.preparing:
                step()

        pipe.load(schedules["quick"])
        step(12)
        offer("slow")
        step(12)
        offer("slow")
        step(2)
        offer("better")
        step(24)
        pipe.load(schedules["slow"])
        step(24)
    return ran, list(logged)


class Cut(NamedTuple):
    steps: list[Step]
    counts: list[int]  # of micro-batches, of the pipeline's problem after each step
    logged: list[str]


def recut(placement: Sequence[int], schedules: Sequence[Schedule], unfit: Schedule) -> Cut:
    """Schedules for other numbers of micro-batches, loaded, then offered; and one that does not divide a batch."""
    modules, steps, counts = own_stages(placement), [], []
    first = schedules[0]
    with Pipeline(modules, placement, mse_loss, first.problem.microbatches) as pipe, heard() as logged:
        pipe.problem = first.problem

        def step() -> None:
            for module in modules.values():
                module.zero_grad()
            report = pipe.step(*batch(0))
            steps.append(Step(report.losses or [], numbers(modules), pipe.schedule.method))
            counts.append(pipe.problem.microbatches)

        for schedule in schedules:
            pipe.load(schedule)
            step()
        for schedule in (*schedules, unfit):
            if pipe.number == 0:
                pipe.offer(schedule)
            step()
            while pipe.preparing:
                step()
    return Cut(steps, counts, list(logged))


def offered_beside(first: Schedule, away: Schedule, error: str) -> tuple[list[int], list[str], list[bool]]:
    """`away` is offered, for which host memory is allocated slowly: for as long as three steps take. With an `error`
    rank 1 then gets none. Versions, what the log says, and whether each allocation was in the thread of the steps."""
    modules, versions, rank = own_stages([0, 1]), [], dist.get_rank()
    three_steps, in_steps = threading.Event(), []
    real, steps = host_memory.allocate, threading.current_thread()

    def slow(nbytes: int, device: torch.device) -> HostMemory:
        in_steps.append(threading.current_thread() is steps)
        if not in_steps[-1]:
            assert three_steps.wait(60)
        if error and rank == 1:
            raise OptPipeError(error)
        return real(nbytes, device)

    with (
        mock.patch.object(host_memory, "allocate", slow),
        pipeline(modules, first, mse_loss) as pipe,
        heard() as logged,
    ):
        pipe.step(*batch(0))
        if rank == 0:
            pipe.offer(away)
        while len(versions) < WAIT and pipe.version == 1:
            versions.append(pipe.step(*batch(0)).version)
            if len(versions) == 4:  # the offer is shared in the first
                three_steps.set()
            if not pipe.preparing and three_steps.is_set():
                break
        versions.append(pipe.step(*batch(0)).version)
        return versions, list(logged), in_steps
