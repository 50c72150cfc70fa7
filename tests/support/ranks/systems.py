"""What the ranks run in `test_systems`: one training step by each of many schedules, with parameters that stay the
same."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from optpipe.model.ops import Kind
from optpipe.schedule import Schedule
from optpipe_runtime import Layout, Pipeline
from support.ranks.cases import Gradients, batch, loss_fn, make_stages, numbers, plain_training


class Outcome(NamedTuple):
    losses: dict[int, float]
    gradients: Gradients


def model(stages: int) -> list[nn.Module]:
    return [module.double() for module in make_stages(stages)]


def plain(layout: Layout) -> Outcome:
    """All micro-batches, one after the other, through the row of stages of which every route has a copy."""
    m = layout.microbatches
    [step] = plain_training(model(len(layout.routes[0])), [batch(0, m)], m)
    return Outcome(dict(enumerate(step.losses)), step.gradients)


class Kept(torch.optim.SGD):
    """On the host: changes nothing and keeps the gradients."""

    def __init__(self, named: list[tuple[str, nn.Parameter]]) -> None:
        super().__init__(named, lr=0.0)
        self.found: Gradients = {}
        self.register_step_pre_hook(
            lambda *_: self.found.update({name: p.grad.numpy().copy() for name, p in named if p.grad is not None})
        )


def run_all(schedules: Sequence[Schedule]) -> list[Outcome]:
    """One pipeline for each layout and stages with an optimizer on the host; all of them stay."""
    pipelines: dict[Any, tuple[Pipeline, dict[int, nn.Module]]] = {}
    outcomes = []
    for schedule in schedules:
        layout = Layout.from_problem(schedule.problem)
        hosted = frozenset(op.stage for program in schedule.programs for op in program.ops() if op.kind == Kind.U)
        if (layout, hosted) not in pipelines:
            pipelines[layout, hosted] = _pipeline(layout, hosted)
        outcomes.append(_step(*pipelines[layout, hosted], layout, schedule))
    for pipe, _ in pipelines.values():
        pipe.close()
    return outcomes


def _pipeline(layout: Layout, hosted: frozenset[int]) -> tuple[Pipeline, dict[int, nn.Module]]:
    """Each route has a copy of the model: they are tied, and begin as that on the lowest rank."""
    rank, modules = torch.distributed.get_rank(), {}
    copies = list(zip(*layout.routes, strict=True))
    for same, *modules_of in zip(copies, *(model(len(copies)) for _ in layout.routes), strict=True):
        for s, module in zip(same, modules_of, strict=True):
            if layout.placement[s] == rank:
                modules[s] = module
                if rank > min(layout.placement[other] for other in same):
                    module.apply(_spoil)
    ways = {"routes": layout.routes, "microbatch_routes": layout.microbatch_routes, "peers": layout.peers or None}
    pipe = Pipeline(
        modules, layout.placement, loss_fn, layout.microbatches, host_optimizers=dict.fromkeys(hosted, Kept), **ways
    )
    for same in copies if len(layout.routes) > 1 else ():
        pipe.tie(next((modules[s] for s in same if s in modules), None))
    return pipe, modules


def _spoil(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


def _step(pipe: Pipeline, modules: dict[int, nn.Module], layout: Layout, schedule: Schedule) -> Outcome:
    pipe.load(schedule)
    for module in modules.values():
        module.zero_grad()
    report = pipe.step(*batch(0, layout.microbatches))
    ours = [j for j in range(layout.microbatches) if layout.route(j)[-1] in modules]
    assert np.isclose(report.loss or 0.0, np.mean(report.losses or [0.0]))
    left = {
        f"{s}.{name}": grad
        for s, host in pipe.host_optimizers.items()
        for name, grad in vars(host.optimizer)["found"].items()
    }
    return Outcome(dict(zip(ours, report.losses or (), strict=True)), numbers(modules) | left)
