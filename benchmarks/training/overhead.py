"""What the runtime costs the host: µs for each op of a step, the time of a step beside a plain run and torch's own
pipelines, and the time to prepare a schedule.

The stages are so small that there is nothing else to do, and all on one rank of one process, so that no message is
waited for. A plain run of them, micro-batch by micro-batch through autograd, stands beside it. The difference is the
cost of split backwards, of keeping activations, of the schedule, and of counting bytes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from benchmarks.gpu.schedules import kept
from benchmarks.problems import pipeline, stage_costs
from benchmarks.single import single_rank
from benchmarks.timing import repeated, timed
from examples import gpt
from optpipe.schedule import Schedule
from optpipe_runtime.lowering.prepare import prepare
from optpipe_runtime.measure.drift import TRACED, WINDOW
from optpipe_runtime.pipeline import Pipeline
from optpipe_runtime.ranks.layout import Layout

WARM_UP = 3
# Before, stages on one rank meet by messages in the first step, which gloo does not send.
TORCHS_ON_ONE_RANK = torch.__version__ >= "2.13"
WIDTH, LAYERS = 32, 4
STAGE = stage_costs((1.0, 1.0, 1.0), 2**30)  # only the order counts


@dataclass(frozen=True)
class Overhead:
    """Medians, of forwards and split backwards; `plain_ms` is for the same by autograd."""

    ops: int  # in a step
    step_ms: float  # processor time of the step's thread, so that other processes do not count
    plain_ms: float  # the same
    traced_ms: float  # the same, of a traced step: its marks, and its bytes counted

    @property
    def op_us(self) -> float:
        """What an op costs the host beyond the plain run, all of a step included."""
        return (self.step_ms - self.plain_ms) * 1e3 / self.ops

    @property
    def traced_ratio(self) -> float:
        """The host's time for a traced step, relative to one that is not."""
        return self.traced_ms / self.step_ms

    @property
    def followed_ratio(self) -> float:
        """The same for a step of `Follower`, which traces some."""
        return 1 + (self.traced_ratio - 1) * TRACED / WINDOW


def overhead(stages: int = 4, microbatches: int = 12, steps: int = 20, device: str = "cpu") -> Overhead:
    """Raises `InputError` if the process has process groups already."""
    modules: dict[int, nn.Module] = {
        s: nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))).to(device)
        for s in range(stages)
    }
    inputs, targets = torch.randn(2, microbatches * WIDTH, WIDTH, device=device)
    with single_rank("this benchmark"), Pipeline(modules, [0] * stages, nn.functional.mse_loss, microbatches) as pipe:
        pipe.load(_schedule(stages, microbatches, ("B", "W")))
        ops = len(pipe.step(inputs, targets, trace=True).trace)
        step = partial(pipe.step, inputs, targets)
        both = repeated(lambda: [_ms(partial(step, trace=trace)) for trace in (False, True)], steps)
        took, traced = zip(*both, strict=True)
    plain = repeated(lambda: _ms(lambda: _plain(list(modules.values()), inputs, targets, microbatches)), steps)
    return Overhead(ops, median(took), median(plain), median(traced))


@dataclass(frozen=True)
class Beside:
    """The host's time for a step of eight GPT blocks with tiny tensors, relative to a plain run of them. Medians of
    steps that take turns."""

    plain_ms: float
    # F BW and F B W here; from torch 2.13 torch's Interleaved1F1B and InterleavedZeroBubble, too
    ratios: dict[str, float]


def beside(stages: int = 2, microbatches: int = 8, steps: int = 20) -> Beside:
    """All stages on one rank. Raises `InputError` if the process has process groups already."""
    size = gpt.Size(width=16, heads=2, context=8, sequences=1)
    modules: list[nn.Module] = [
        nn.Sequential(*(gpt.Block(size) for _ in range(size.blocks // stages))) for _ in range(stages)
    ]
    inputs, targets = torch.randn(2, microbatches, size.context, size.width)
    loss = nn.functional.mse_loss
    took: dict[str, list[float]] = defaultdict(list)
    with (
        single_rank("this benchmark"),
        Pipeline(dict(enumerate(modules)), [0] * stages, loss, microbatches) as fused,
        Pipeline(dict(enumerate(modules)), [0] * stages, loss, microbatches) as split,
    ):
        fused.load(_schedule(stages, microbatches, ("BW",)))
        split.load(_schedule(stages, microbatches, ("B", "W")))

        def torchs(schedule: type[PipelineScheduleMulti]) -> Callable[[], object]:
            parts = [PipelineStage(module, s, stages, torch.device("cpu")) for s, module in enumerate(modules)]
            runtime = schedule(parts, microbatches, loss_fn=loss)  # type: ignore[arg-type]
            return lambda: runtime.step(inputs, target=targets, losses=[])

        runs: dict[str, Callable[[], object]] = {
            "plain": lambda: _plain(modules, inputs, targets, microbatches),
            "F BW": lambda: fused.step(inputs, targets),
            "F B W": lambda: split.step(inputs, targets),
        }
        if TORCHS_ON_ONE_RANK:
            runs |= {
                "torch's Interleaved1F1B": torchs(ScheduleInterleaved1F1B),
                "torch's InterleavedZeroBubble": torchs(ScheduleInterleavedZeroBubble),
            }
        for _ in range(WARM_UP + steps):
            for name, run in runs.items():
                took[name].append(_ms(run))
    medians = {name: median(times[WARM_UP:]) for name, times in took.items()}
    plain = medians.pop("plain")
    return Beside(plain, {name: ms / plain for name, ms in medians.items()})


@dataclass(frozen=True)
class Lowering:
    """What one rank does for an offered schedule, in a thread beside the training."""

    ops: int  # of all devices
    prepare_ms: float  # processor time of its thread, which shares the interpreter with the training


def lowering(devices: int = 64, microbatches: int = 512, repeats: int = 5) -> Lowering:
    """For 1F1B with split backwards, on the device in the middle."""
    problem = pipeline([STAGE] * devices, microbatches, 2**50, p2p_ms=0.1)
    schedule, layout = kept(problem, range(devices)[::-1]), Layout.from_problem(problem)
    # A copy, so that it is compiled anew.
    took_ms = repeated(lambda: _ms(lambda: prepare(replace(schedule), devices // 2, layout)), repeats)
    return Lowering(sum(map(len, schedule.programs)), median(took_ms))


def _schedule(stages: int, microbatches: int, backward: Sequence[str]) -> Schedule:
    """One micro-batch after the other."""
    problem = pipeline([STAGE] * stages, microbatches, 2**50, devices=1)
    program = []
    for j in range(microbatches):
        program += [f"{s}F{j}" for s in range(stages)]
        program += [f"{s}{kind}{j}" for s in reversed(range(stages)) for kind in backward]
    return Schedule.parse(problem, [program])


def _plain(modules: list[nn.Module], inputs: Tensor, targets: Tensor, microbatches: int) -> None:
    for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        for module in modules:
            x = module(x)
        torch.autograd.backward(nn.functional.mse_loss(x, y) / microbatches)


def _ms(call: Callable[[], object]) -> float:
    """Processor time of this thread."""
    return timed(call, time.thread_time)[1]
