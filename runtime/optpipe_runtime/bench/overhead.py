"""What the executor costs the host: µs an op, on stages so small that there is nothing else to do.

All stages are on one rank of one process, so no message waits for anybody. What a plain run of the same stages costs, micro-batch by
micro-batch through autograd, is told beside it: the difference is what schedule, stores and counting of bytes cost.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from optpipe.errors import InputError
from optpipe.ops import Kind
from optpipe.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime.pipeline import Pipeline

T = TypeVar("T")

WARM_UP = 3
WIDTH, LAYERS = 32, 4


@dataclass(frozen=True)
class Overhead:
    """Medians over steps. `ops`, `step_ms` and `between_us` are of forwards and split backwards alone, as `plain_ms` is of the same by
    autograd; `by_kind_us` of a schedule with offloads and recomputes, too (of O and R their copies, beside the host)."""

    ops: int  # in a step
    step_ms: float
    plain_ms: float
    between_us: float  # from the end of an op to the start of the next: messages, and counting bytes
    by_kind_us: dict[str, float]

    @property
    def op_us(self) -> float:
        """Host time an op beyond what the plain run takes, all of a step counted."""
        return (self.step_ms - self.plain_ms) * 1e3 / self.ops


def overhead(stages: int = 4, microbatches: int = 12, steps: int = 20) -> Overhead:
    """On the CPU, for a process without process groups of its own (`InputError`)."""
    if dist.is_initialized():
        raise InputError("the host's overhead is measured in a process of its own: torch.distributed is initialised in this one")
    modules: dict[int, nn.Module] = {
        s: nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))) for s in range(stages)
    }
    inputs, targets = torch.randn(microbatches * WIDTH, WIDTH), torch.zeros(microbatches * WIDTH, WIDTH)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with Pipeline(modules, [0] * stages, nn.functional.mse_loss, microbatches) as pipe:
            pipe.load(_schedule(stages, microbatches, [("", "")]))
            kept = _repeated(steps, lambda: pipe.step(inputs, targets, trace=True))
            took = _repeated(steps, lambda: _ms(lambda: pipe.step(inputs, targets)))
            pipe.load(_schedule(stages, microbatches, [("OD", "R"), ("", "C"), ("", "")]))
            mixed = _repeated(steps, lambda: pipe.step(inputs, targets, trace=True))
    finally:
        dist.destroy_process_group()
    plain = _repeated(steps, lambda: _ms(lambda: _plain(list(modules.values()), inputs, targets, microbatches)))
    spent: dict[Kind, list[float]] = defaultdict(list)
    for ran in (ran for report in mixed for ran in report.trace):
        spent[ran.op.kind].append((ran.end_ms - ran.start_ms) * 1e3)
    ops = len(kept[0].trace)
    between = [report.step_ms - sum(ran.end_ms - ran.start_ms for ran in report.trace) for report in kept]
    return Overhead(
        ops=ops,
        step_ms=median(took),
        plain_ms=median(plain),
        between_us=median(between) * 1e3 / ops,
        by_kind_us={kind.name: median(spent[kind]) for kind in sorted(spent)},
    )


def _repeated(steps: int, call: Callable[[], T]) -> list[T]:
    return [call() for _ in range(WARM_UP + steps)][WARM_UP:]


def _schedule(stages: int, microbatches: int, ways: Sequence[tuple[str, str]]) -> Schedule:
    """One micro-batch after the other; `ways` say in turn what stands behind a forward and before a backward."""
    costs = {"forward_ms": 1.0, "backward_input_ms": 1.0, "backward_weight_ms": 1.0, "activation_bytes": 2**30, "weight_grad_bytes": 2**30}
    away = {"offload_ms": 1.0, "reload_ms": 1.0, "offload_bytes": 2**30, "recompute_ms": 1.0, "checkpoint_bytes": 2**30}
    problem = Problem.from_dict(
        {
            "microbatches": microbatches,
            "devices": [{"memory_bytes": 2**50}],
            "stages": [{"device": 0} | costs | away] * stages,
        }
    )
    program = []
    for j in range(microbatches):
        there, back = ways[j % len(ways)]
        program += [f"{s}{kind}{j}" for s in range(stages) for kind in ("F", *there)]
        program += [f"{s}{kind}{j}" for s in reversed(range(stages)) for kind in (*back, "B", "W")]
    return Schedule.parse(problem, [program])


def _plain(modules: list[nn.Module], inputs: Tensor, targets: Tensor, microbatches: int) -> None:
    for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        for module in modules:
            x = module(x)
        torch.autograd.backward(nn.functional.mse_loss(x, y) / microbatches)


def _ms(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1e3
