"""What the ranks run in `test_windows`: trainings of two replicas of two ranks with several sharded stages each, whose
gradients are reduced several times a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.ranks.replicas import Replicas
from optpipe_runtime.stage.runner import StageRunner
from support.ranks import inner
from support.ranks.cases import LENGTH, Gradients, batch, loss_fn, make_stages, problem, refusals, sgd
from support.ranks.replicas import gradients, parameters, place, wrapped

PATIENCE_S = 120.0


class Turn(NamedTuple):
    """One step. `load`: the schedules of the replicas, by their places. `length`: of the first replica's sequences.
    `until`: a stage and a micro-batch whose backward waits until the first window of another stage is reduced."""

    load: tuple[int, int] | None = None
    length: int = LENGTH
    until: tuple[int, int, int] | None = None


class Ran(NamedTuple):
    """On one rank, by step. `reduced`: the stages in the order in which their reductions start. `gathered`: the peak of
    gathered parameters and whole gradients, and what is certified."""

    losses: list[list[float] | None]
    gradients: list[Gradients]
    norms: list[float]
    reduced: list[list[int]]
    gathered: list[tuple[int | None, int]]
    parameters: Gradients


def trained(
    schedules: Sequence[Schedule],
    turns: Sequence[Turn],
    whole_gradients: int | None,
    max_norm: float = 0.0,
    mixed: bool = False,
) -> Ran:
    """Both replicas train by schedules for the same problem. `mixed`: parameters are gathered in bfloat16."""
    here, problem = place(), schedules[0].problem
    placement, m = [stage.device for stage in problem.stages], problem.microbatches
    modules = here.stages(placement, "fsdp", **policy(mixed))
    optimizer = sgd(*modules.values())
    ran = Ran([], [], [], [], [], {})
    with Pipeline(modules, placement, loss_fn, m, group=here.group, whole_gradients=whole_gradients) as pipe:
        pipe.profile(*here.batch(0, m), activation_budget_bytes=10**9, repeats=1)
        pipe.problem = problem
        for step, turn in enumerate(turns):
            if turn.load is not None:
                pipe.load(schedules[turn.load[here.replica]])
            optimizer.zero_grad()
            data = here.batch(step, m)
            if here.replica == 0:
                data = [part[:, : turn.length].contiguous() for part in data]
            with recorded(pipe, turn.until) as reduced:
                report = pipe.step(*data, trace=True)
            ran.losses.append(report.losses)
            ran.reduced.append(reduced)
            ran.gathered.append((report.gathered_peak_bytes, report.gathered_certified_bytes))
            ran.norms.append(pipe.clip_grad_norm_(max_norm) if max_norm else 0.0)
            ran.gradients.append(gradients(modules))
            optimizer.step()
    return ran._replace(parameters=parameters(modules))


def policy(mixed: bool) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if mixed else {}


@contextmanager
def recorded(pipe: Pipeline, until: tuple[int, int, int] | None) -> Iterator[list[int]]:
    """The stages that are reduced, in order."""
    replicas, started, ended = pipe._rank.replicas, list[int](), threading.Event()

    def told(method: Callable[[Replicas, int], Any]) -> Callable[[int], Any]:
        def take(s: int) -> Any:
            read, reduce = method(replicas, s)

            def run() -> None:
                started.append(s)
                reduce()
                if until is not None and s == until[2]:
                    ended.set()

            return read, run

        return take

    with (
        mock.patch.multiple(replicas, reduction=told(Replicas.reduction), window=told(Replicas.window)),
        waiting(until[:2], ended) if until and until[0] in pipe._rank.stages else nullcontext(),
    ):
        yield started


def waiting(at: tuple[int, int], event: threading.Event) -> AbstractContextManager[object]:
    """The backward of a stage and micro-batch waits for an event."""
    real = StageRunner.backward

    def backward(stage: StageRunner, j: int, *arguments: Any, **options: Any) -> Any:
        if (stage.index, j) == at:
            assert event.wait(PATIENCE_S), "the window is not reduced while backwards run"
        return real(stage, j, *arguments, **options)

    return mock.patch.object(StageRunner, "backward", backward)


def plain(stages: int, microbatches: int, steps: int, window: int) -> tuple[list[Gradients], Gradients]:
    """In one process: gradients of each step, and the parameters after the last one. Sums have the order of windows of
    so many micro-batches: within a window on each replica, then over the replicas, then over the windows."""
    torch.set_num_threads(1)
    modules = make_stages(stages)
    every = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(every, lr=0.1)
    found = []
    for step in range(steps):
        halves = [part.chunk(2) for part in batch(step, 2 * microbatches)]
        total: list[Tensor] = []
        for first in range(0, microbatches, window):
            of_window = []
            for inputs, targets in zip(*halves, strict=True):
                optimizer.zero_grad()
                pairs = list(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True))
                for x, y in pairs[first : first + window]:
                    for module in modules:
                        x = module(x)
                    torch.autograd.backward(loss_fn(x, y) / microbatches)
                of_window.append([_gradient(p).clone() for p in every])
            mean = [(a + b) / 2 for a, b in zip(*of_window, strict=True)]
            total = [a + b for a, b in zip(total, mean, strict=True)] if total else mean
        for p, gradient in zip(every, total, strict=True):
            p.grad = gradient
        found.append(gradients(dict(enumerate(modules))))
        optimizer.step()
    return found, parameters(dict(enumerate(modules)))


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def refused(schedule: Schedule) -> list[str]:
    """What is told to who asks for windows where there can be none."""
    here, m = place(), schedule.problem.microbatches
    placement = [stage.device for stage in schedule.problem.stages]

    def attempt(how: str, whole: int) -> None:
        modules = here.stages(placement, how)
        Pipeline(modules, placement, loss_fn, m, group=here.group, whole_gradients=whole).close()

    return refusals(lambda: attempt("ddp", 1), lambda: attempt("replicate", 1), lambda: attempt("fsdp", 0))


def of_inner_peers(program: Sequence[str], steps: int, mixed: bool = False) -> list[inner.Seen]:
    """Two replicas, of two tensor-parallel ranks with both stages. `mixed`: parameters are gathered in bfloat16."""
    ranks = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "pipe", "tensor"))
    replica, m = (ranks.get_coordinate() or (0,))[0], 4
    modules = {
        s: wrapped(inner.parallel(module, ranks["tensor"]), "fsdp", ranks["replica"], **policy(mixed))
        for s, module in enumerate(inner.make_stages())
    }
    optimizer, found = sgd(*modules.values()), []
    groups = {"group": ranks["pipe"].get_group(), "inner": ranks["tensor"]}
    with Pipeline(modules, [0, 0], loss_fn, m, whole_gradients=1, **groups) as pipe:
        pipe.profile(*(part.chunk(2)[replica] for part in batch(0, 2 * m)), activation_budget_bytes=10**9, repeats=1)
        pipe.problem = problem((0, 0), m)
        pipe.load(Schedule.parse(pipe.problem, [program]))
        for step in range(steps):
            data = [part.chunk(2)[replica] for part in batch(step, 2 * m)]
            found.append(inner.step_of(pipe, modules, data, trace=True)[0])
            optimizer.step()
    return found
