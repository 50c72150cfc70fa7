"""What the benchmark `gpu` runs: all stages of a GPT on one device, and one of them between emulated neighbours."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

import torch
from torch import Tensor

from benchmarks.gpu.neighbours import emulate
from benchmarks.gpu.schedules import alone, halved, kept
from benchmarks.single import single_rank
from examples import gpt
from optpipe.errors import InputError
from optpipe.model.ops import COMPUTE, Kind
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule, certify
from optpipe_runtime.execute.report import StepReport
from optpipe_runtime.memory.engines import Clock
from optpipe_runtime.pipeline import Pipeline

WARM_UP, STEPS, ROUNDS = 2, 3, 2  # schedules alternate: steps before, steps that count, and how often
PARTS = 2  # of an activation, of which one is offloaded
ENOUGH = 2**50  # bytes of activations, on CPU
QUEUES, MOST_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32  # CUDA reads it when it starts
COUNTERS = "num_alloc_retries", "num_device_alloc"  # of torch.cuda.memory_stats; the second counts cudaMalloc


@dataclass(frozen=True)
class GpuSetup:
    """A GPT in `stages` stages, of which `emulated` also runs between emulated neighbours, whose messages take
    `p2p_ms`."""

    device: torch.device
    size: gpt.Size
    stages: int = 4
    emulated: int = 0
    microbatches: int = 8
    p2p_ms: float = 0.5


@dataclass
class Steps:
    """Measured steps of device `device` of a schedule, after warm-up."""

    schedule: Schedule
    device: int = 0
    reports: list[StepReport] = field(default_factory=list)
    allocations: Counter[str] = field(default_factory=Counter)  # by the driver, over all steps, on CUDA
    base_bytes: int | None = None  # allocated before a step, on CUDA

    @property
    def ms(self) -> float:
        return median(report.step_ms for report in self.reports)

    @property
    def typical(self) -> StepReport:
        """The step with the median time."""
        return sorted(self.reports, key=lambda report: report.step_ms)[len(self.reports) // 2]

    @property
    def span_ms(self) -> float:
        """The median time from the start of the first compute op to the end of the last."""
        return median(
            max(time.end_ms for time in ops) - min(time.start_ms for time in ops)
            for ops in ([time for time in report.trace if time.op.kind in COMPUTE] for report in self.reports)
        )

    def op_ms(self, kind: Kind, stage: int, part: int) -> float:
        """The median time of these ops."""
        wanted = (kind, stage, part)
        return median(
            time.end_ms - time.start_ms
            for report in self.reports
            for time in report.trace
            if (time.op.kind, time.op.stage, time.op.part) == wanted
        )

    @cached_property
    def certified_bytes(self) -> int:
        """The certified peak of activations."""
        return certify(self.schedule.problem, self.schedule).device[self.device].bytes

    @property
    def peak_bytes(self) -> int:
        """On CUDA the peak of device memory, weights included; on CPU that of activations."""
        return max(report.cuda_peak_bytes or report.peak_activation_bytes or 0 for report in self.reports)


@dataclass(frozen=True)
class GpuMeasurements:
    """All measurements. Pairs are of a schedule that keeps everything and of one that offloads half."""

    problem: Problem
    inside: tuple[Steps, Steps]  # all stages in this process
    copies: Steps  # copies with nothing beside them
    stage: tuple[Steps, Steps]  # one stage between emulated neighbours
    late_ms: float  # how late a message of theirs was at most
    differing: int  # gradients that offloading has changed
    part_bytes: tuple[int, ...]  # of an activation of stage 0
    plain_ms: tuple[float, float]  # a plain copy of all of them to (pinned) host memory, and back


def measure(setup: GpuSetup) -> GpuMeasurements:
    """Runs everything. Raises `InputError` if the process has process groups already, or CUDA too few queues."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before its first product, or cuBLAS adds in any order
    queues = os.environ.get(QUEUES, "8")
    if setup.device.type == "cuda" and not (queues.isdecimal() and int(queues) >= MOST_QUEUES):
        raise InputError(
            f"{QUEUES} is {queues}: set it to {MOST_QUEUES} before the script starts, else a spin that stands for a "
            "neighbour may hold up copies and compute that share its queue"
        )
    with single_rank("this benchmark"):
        return _Bench(setup).measured()


class _Bench:
    def __init__(self, setup: GpuSetup) -> None:
        self._setup, self._device, self._cuda = setup, setup.device, setup.device.type == "cuda"
        with setup.device:
            modules = gpt.stages(setup.size, setup.stages)
        self._modules = [module.to(torch.bfloat16 if self._cuda else torch.float32) for module in modules]
        shape = (setup.microbatches * setup.size.sequences, setup.size.context + 1)
        text = torch.randint(gpt.BYTES, shape, generator=torch.Generator().manual_seed(0)).to(setup.device)
        self._batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        for gradient in self._gradients():
            gradient.zero_()

    def measured(self) -> GpuMeasurements:
        setup = self._setup
        with Pipeline(
            dict(enumerate(self._modules)), [0] * setup.stages, gpt.loss, setup.microbatches, full_duplex=True
        ) as pipe:
            problem = pipe.profile(
                *self._batch, activation_budget_bytes=None if self._cuda else ENOUGH, offload_parts=PARTS
            )
            if not all(stage.can_offload for stage in problem.stages):
                raise InputError("nothing of a stage's activation can be offloaded: take a larger --width or --context")
            ahead = [setup.stages - 1]
            kept_inside, halved_inside = self._alternating(pipe, [kept(problem, ahead), halved(problem, ahead)])
            differing = self._differing(pipe, [kept_inside.schedule, halved_inside.schedule])
            [copies] = self._alternating(pipe, [alone(problem)])
            spread, ahead = _spread(problem, setup.p2p_ms), list(range(setup.stages))[::-1]
            kept_stage, late_ms = self._emulated(pipe, kept(spread, ahead))
            halved_stage, later_ms = self._emulated(pipe, halved(spread, ahead))
            part_bytes = tuple(pipe.runner.rank.stages[0].part_bytes(PARTS))
        return GpuMeasurements(
            problem=problem,
            inside=(kept_inside, halved_inside),
            copies=copies,
            stage=(kept_stage, halved_stage),
            late_ms=max(late_ms, later_ms),
            differing=differing,
            part_bytes=part_bytes,
            plain_ms=_plain_copies(self._device, sum(part_bytes)),
        )

    def _alternating(self, pipe: Pipeline, schedules: Sequence[Schedule]) -> list[Steps]:
        """Runs all stages here, with one schedule after the other, several times."""
        runs = [Steps(schedule) for schedule in schedules]
        for _ in range(ROUNDS):
            for steps in runs:
                pipe.load(steps.schedule)
                self._run(steps, lambda: pipe.step(*self._batch, trace=True))
        return runs

    def _emulated(self, pipe: Pipeline, schedule: Schedule) -> tuple[Steps, float]:
        """Runs one stage. Returns also how late a message of its emulated neighbours was at most, in ms."""
        steps, (step, timer) = Steps(schedule, self._setup.emulated), emulate(pipe, schedule, self._setup.emulated)
        for _ in range(ROUNDS):
            self._run(steps, lambda: step(*self._batch))
        return steps, timer.late_ms()

    def _run(self, steps: Steps, step: Callable[[], StepReport]) -> None:
        for _ in range(WARM_UP):
            self._fresh(step)
        before = self._counters()
        steps.base_bytes = torch.cuda.memory_allocated(self._device) if self._cuda else None
        steps.reports += [self._fresh(step) for _ in range(STEPS)]
        steps.allocations.update({name: count - before[name] for name, count in self._counters().items()})

    def _fresh(self, step: Callable[[], StepReport]) -> StepReport:
        for gradient in self._gradients():
            gradient.zero_()
        return step()

    def _counters(self) -> dict[str, int]:
        if not self._cuda:
            return {}
        counted = torch.cuda.memory_stats(self._device)
        return {name: counted[name] for name in COUNTERS}

    def _differing(self, pipe: Pipeline, schedules: Sequence[Schedule]) -> int:
        """How many gradients differ in any bit between both schedules, with algorithms that always add in the same
        order."""
        found: list[list[Tensor]] = []
        with _deterministic():
            for schedule in schedules:
                pipe.load(schedule)
                self._fresh(lambda: pipe.step(*self._batch))
                found.append([gradient.clone() for gradient in self._gradients()])
        return sum(not torch.equal(a, b) for a, b in zip(*found, strict=True))

    def _gradients(self) -> Iterator[Tensor]:
        """Every parameter's gradient, allocated once, so that no step allocates one."""
        for module in self._modules:
            for parameter in module.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                yield parameter.grad


@contextmanager
def _deterministic() -> Iterator[None]:
    """With `warn_only` attention's backward would stay as it is, and add in any order."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _spread(problem: Problem, p2p_ms: float) -> Problem:
    """The problem with each stage on a device of its own."""
    stages = [stage.model_copy(update={"device": s}) for s, stage in enumerate(problem.stages)]
    return problem.replace(devices=problem.devices * len(stages), stages=stages, p2p_ms=p2p_ms)


def _plain_copies(device: torch.device, nbytes: int) -> tuple[float, float]:
    """The median ms of one copy to the host and of one back, with nothing beside them: what the link can do."""
    clock = Clock(device)
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def ms(to: Tensor, of: Tensor) -> float:
        start = clock.mark()
        to.copy_(of, non_blocking=True)
        end = clock.mark()
        clock.settle()
        return clock.ms(start, end)

    pairs = [(ms(on_host, on_device), ms(on_device, on_host)) for _ in range(WARM_UP + ROUNDS * STEPS)][WARM_UP:]
    return median(down for down, _ in pairs), median(up for _, up in pairs)
