"""What the ranks run in `test_record`: recorded steps by torch's own schedules, on stages that sleep."""

import time
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from optpipe_runtime import record_trace
from optpipe_runtime.in_torch import traces
from support.ranks import cases
from support.ranks.device import device

SHAPE = (8, 16)  # of a micro-batch


class Times(NamedTuple):
    """Of F, B, W and the loss of a micro-batch, in ms."""

    forward: float
    backward_input: float
    backward_weight: float
    loss: float


class Case(NamedTuple):
    name: str
    times: Times
    stages: tuple[tuple[int, ...], ...]
    microbatches: int = 4


class Stage(nn.Module):
    """Its F, B and W sleep, also where torch splits the backward."""

    def __init__(self, times: Times) -> None:
        super().__init__()
        self.times, self.weight = times, nn.Parameter(torch.zeros(SHAPE[1]))

    def forward(self, x: Tensor) -> Tensor:
        paced: Tensor = _Paced.apply(x, self.times.backward_input)  # before it sleeps: a profile tells when it began
        time.sleep(self.times.forward / 1e3)
        return paced + _Paced.apply(self.weight, self.times.backward_weight)


class _Paced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ms: float) -> Tensor:
        ctx.ms = ms
        return x + 0.0

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        time.sleep(ctx.ms / 1e3)
        return dy, None


def run_recorded(case: Case, folder: Path, plan: str, ahead_ms: float) -> list[str]:
    """Records two steps, from the second on, of a plan: t a training step, e an evaluation. The clock of rank 1 is
    ahead. Returns the compute actions of this rank, which torch's `Schedule1F1B` tells wrongly."""
    schedule, step = prepared(case)
    with mock.patch.object(traces, "now_ms", now_ms(ahead_ms)):
        record_trace(schedule, folder, after=1, steps=2)
        for letter in plan:
            step("step" if letter == "t" else "eval")
    assert not {"step", "_maybe_compute_loss"} & vars(schedule).keys()
    if case.name == "1F1B":
        return one_f_one_b(dist.get_rank(), dist.get_world_size(), case.microbatches)
    return [str(action) for action in schedule.pipeline_order[dist.get_rank()] if action is not None]


def run_replicas(case: Case, folder: Path, ahead_ms: float) -> None:
    """Two replicas, the second twice as slow: two steps in a profile, two recorded by clocks that differ."""
    mesh = init_device_mesh(device().type, (2, len(case.stages)), mesh_dim_names=("dp", "pp"))
    slower = case._replace(times=Times(*(2 * ms for ms in case.times)))
    schedule, step = prepared(slower if mesh.get_local_rank("dp") else case, mesh.get_group("pp"))
    step()
    with torch.profiler.profile() as profile:
        step()
        step()
    path = folder / "profiled" / f"rank{dist.get_rank()}.json"
    path.parent.mkdir(exist_ok=True)
    profile.export_chrome_trace(str(path))
    with mock.patch.object(traces, "now_ms", now_ms(ahead_ms)):
        record_trace(schedule, folder / "recorded", after=0, steps=2)
        step()
        step()


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[str]:
    """In torch's letters: as many forwards first as there are stages from here on."""
    forwards, backwards = ([f"{stage}{letter}{j}" for j in range(microbatches)] for letter in "FB")
    first = min(stages - stage, microbatches)
    pairs = zip_longest(backwards, forwards[first:])
    return forwards[:first] + [op for pair in pairs for op in pair if op]


def refusals(case: Case, folder: Path, a_file: Path) -> list[str]:
    schedule, _ = prepared(case)
    options = ({"folder": folder, "steps": 0}, {"folder": a_file}, {"folder": folder}, {"folder": folder})
    return cases.refusals(*(partial(record_trace, schedule, **each) for each in options))


def compare_clocks(ahead_ms: float) -> traces.Ahead:
    with mock.patch.object(traces, "now_ms", now_ms(ahead_ms)):
        return traces.compare_clocks(None, device())


def now_ms(ahead_ms: float) -> Callable[[], float]:
    return lambda: time.perf_counter() * 1e3 + ahead_ms * dist.get_rank()


def prepared(case: Case, group: dist.ProcessGroup | None = None) -> tuple[Any, Callable[..., object]]:
    mine, count = case.stages[dist.get_rank(group)], sum(map(len, case.stages))
    stages = [PipelineStage(Stage(case.times).to(device()), s, count, device(), group=group) for s in mine]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(case.times.loss / 1e3)
        return (output - target).square().mean()

    kind = schedules.get_schedule_class(case.name)
    schedule = kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, case.microbatches, loss_fn)
    batch = torch.zeros(case.microbatches * SHAPE[0], SHAPE[1], device=device(), requires_grad=True)

    def step(how: str = "step") -> object:
        given = [batch] if 0 in mine else []
        return getattr(schedule, how)(*given, target=batch if count - 1 in mine else None)

    return schedule, step
