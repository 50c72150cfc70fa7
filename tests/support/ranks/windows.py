"""What the ranks run in `test_windows`, beside trainings of `reductions`: tensor-parallel stages whose gradients are
reduced several times a step, and a plain run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from support.ranks import inner
from support.ranks.cases import Gradients, batch, loss_fn, make_stages, problem, refusals, sgd
from support.ranks.reductions import policy
from support.ranks.replicas import gradients, parameters, place, wrapped


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
