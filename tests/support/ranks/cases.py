"""A small transformer in stages, the plain run that every schedule must equal, and functions that ranks run in many
tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from optpipe.errors import OptPipeError
from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from optpipe_runtime import Layout, Pipeline, StepReport
from support import problems
from support.close import joined, require_close
from support.ranks.device import EXACT, device

if TYPE_CHECKING:
    from support.ranks.worker import Ranks

WIDTH, LENGTH, WORDS = 32, 16, 40
Gradients = dict[str, np.ndarray[Any, Any]]  # by stage and parameter name


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def make_stages(count: int, dropout: float = 0.0) -> list[nn.Module]:
    """The same model on every rank: embedding in the first stage, head in the last, a block in each."""
    torch.manual_seed(3)
    stages = [[Block(dropout)] for _ in range(count)]
    first = [nn.Embedding(WORDS, WIDTH)]
    head = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)]
    return [
        nn.Sequential(*(first if s == 0 else []), *blocks, *(head if s == count - 1 else [])).to(device())
        for s, blocks in enumerate(stages)
    ]


def batch(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (2 * microbatches, LENGTH + 1), generator=generator).to(device())
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def problem(placement: Sequence[int], microbatches: int, peers: Sequence[int | None] = (), **stage: Any) -> Problem:
    """Costs that only order messages; with offload, recompute, and evictions from ranks that have a peer."""
    peer = dict(enumerate(peers))

    def costs(rank: int) -> dict[str, Any]:
        evict = {} if peer.get(rank) is None else {"evict": (1, 1, 90)}
        return problems.stage((1, 1, 1), (100, 100), offload=(1, 1, 90), recompute=(1, 10), **evict)

    devices = [{"activation_budget_bytes": 10**9, "peer": peer.get(rank)} for rank in range(max(placement) + 1)]
    stages = [{"device": rank} | costs(rank) | stage for rank in placement]
    return Problem.from_dict({"microbatches": microbatches, "p2p_ms": 0.1, "devices": devices, "stages": stages})


def parsed(*programs: list[list[str]]) -> list[Schedule]:
    """On two ranks with a stage each."""
    m = sum(text.startswith("0F") for program in programs[0] for text in program)
    return [Schedule.parse(problem((0, 1), m), program) for program in programs]


def all_forwards_first(placement: Sequence[int], microbatches: int) -> Schedule:
    """Then all backwards, stage by stage: every rank has something to wait for nearly all the time."""
    programs: list[list[str]] = [[] for _ in range(max(placement) + 1)]
    for s, rank in enumerate(placement):
        programs[rank] += [f"{s}F{j}" for j in range(microbatches)]
    for s, rank in reversed(list(enumerate(placement))):
        programs[rank] += [f"{s}BW{j}" for j in range(microbatches)]
    return Schedule.parse(problem(placement, microbatches), programs)


def numbers(modules: dict[int, nn.Module]) -> Gradients:
    return {
        f"{s}.{name}": p.grad.cpu().numpy().copy()
        for s, module in modules.items()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def plain_step(
    modules: Iterable[nn.Module],
    inputs: Tensor,
    targets: Tensor,
    microbatches: int,
    loss: Callable[..., Tensor] = loss_fn,
) -> list[float]:
    """Plain autograd, one micro-batch after the other: the losses, and gradients of their mean, added to `.grad`."""
    losses, modules = [], list(modules)
    parameters = list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad *= microbatches
    for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        for module in modules:
            x = module(x)
        value = loss(x, y)
        torch.autograd.backward(value)
        losses.append(value.item())
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad /= microbatches
    return losses


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    """Of all their parameters, each once; of none, too."""
    return torch.optim.SGD(dict.fromkeys([torch.zeros(0), *(p for m in modules for p in m.parameters())]), lr=0.1)


class Plain(NamedTuple):
    """A step of a plain run: losses, gradients, their norm, and what is left of them when they are clipped."""

    losses: list[float]
    gradients: Gradients
    norm: float
    clipped: Gradients


def plain_training(
    stages: Iterable[nn.Module],
    data: Iterable[tuple[Tensor, Tensor]],
    microbatches: int,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., Tensor] = loss_fn,
    max_norm: float = math.inf,
    norm_type: float = 2.0,
    skipped: int | None = None,
) -> list[Plain]:
    """One process, plain autograd, one micro-batch after the other, and after each step but the `skipped` one an
    update, by SGD if no optimizer is given."""
    torch.set_num_threads(1)  # as on the ranks: sums over rows have the same order
    modules = dict(enumerate(stages))
    every = list(dict.fromkeys(p for module in modules.values() for p in module.parameters()))
    optimizer, steps = optimizer or sgd(*modules.values()), []
    for step, (inputs, targets) in enumerate(data):
        optimizer.zero_grad()
        losses, gradients = plain_step(modules.values(), inputs, targets, microbatches, loss), numbers(modules)
        norm = nn.utils.clip_grad_norm_(every, max_norm, norm_type).item()
        steps.append(Plain(losses, gradients, norm, numbers(modules)))
        if step != skipped:
            optimizer.step()
    return steps


def batches(steps: int, microbatches: int) -> list[tuple[Tensor, Tensor]]:
    return [batch(step, microbatches) for step in range(steps)]


def plain(stages: int, microbatches: int, steps: int = 1) -> tuple[list[list[float]], list[Gradients]]:
    trained = plain_training(make_stages(stages), batches(steps, microbatches), microbatches)
    return [step.losses for step in trained], [step.gradients for step in trained]


def own(stages: Sequence[nn.Module], placement: Sequence[int], group: Any = None) -> dict[int, nn.Module]:
    """Those of a model's stages that this rank has, by its number in the group."""
    rank = torch.distributed.get_rank(group)
    return {s: module for s, module in enumerate(stages) if placement[s] == rank}


def own_stages(placement: Sequence[int], dropout: float = 0.0) -> dict[int, nn.Module]:
    return own(make_stages(len(placement), dropout), placement)


def pipeline(
    modules: dict[int, nn.Module], schedule: Schedule, loss: Callable[..., Tensor] = loss_fn, **options: Any
) -> Pipeline:
    """A pipeline of this rank's stages with the layout of a schedule, which is loaded."""
    layout = Layout.from_problem(schedule.problem)
    ways = {"peers": layout.peers or None, "links": layout.links or None, "full_duplex": layout.full_duplex}
    pipe = Pipeline(modules, layout.placement, loss, layout.microbatches, **ways | options)
    pipe.load(schedule)
    return pipe


def refusals(*calls: Callable[[], object]) -> list[str]:
    """What is told by those of the calls, made one after the other, that raise an `OptPipeError`."""
    told = []
    for call in calls:
        try:
            call()
        except OptPipeError as error:
            told.append(str(error))
    return told


def train(
    placement: Sequence[int], schedules: Sequence[Schedule], recompute: Sequence[str] = ("full",)
) -> tuple[list[StepReport], list[Gradients]]:
    """One step with each schedule, swapped between the steps."""
    modules = own_stages(placement)
    optimizer = sgd(*modules.values())
    reports, gradients = [], []
    with pipeline(modules, schedules[0], recompute=recompute) as pipe:
        for step, schedule in enumerate(schedules):
            if step:
                pipe.load(schedule)
            optimizer.zero_grad()
            reports.append(pipe.step(*batch(step, schedule.problem.microbatches), trace=True))
            gradients.append(numbers(modules))
            optimizer.step()
    return reports, gradients


def tied(placement: Sequence[int], schedule: Schedule) -> tuple[list[Gradients], Gradients]:
    """Two accumulated steps of a model whose head shares the embedding's weight; and the same model in one process."""
    m = schedule.problem.microbatches
    modules = make_stages(len(placement))
    embedding, head = next(modules[0].children()), list(modules[-1].children())[-1]
    assert isinstance(embedding, nn.Embedding)
    assert isinstance(head, nn.Linear)
    rank = torch.distributed.get_rank()
    ours = embedding.weight if rank == placement[0] else head.weight
    found = []
    with pipeline(own(modules, placement), schedule) as pipe:
        pipe.tie(ours)
        for step in range(2):
            pipe.step(*batch(step, m))
            found.append({"tied": ours.grad.numpy().copy()})

    whole = make_stages(len(placement))
    first, last = next(whole[0].children()), list(whole[-1].children())[-1]
    last.weight = first.weight
    for step in range(2):
        plain_step(whole, *batch(step, m), m)
    return found, {"tied": whole[0][0].weight.grad.numpy()}  # type: ignore[index]


def measure(
    placement: Sequence[int],
    microbatches: int,
    offload_parts: int,
    host_memory_bytes: int | None = None,
    peers: Sequence[int | None] | None = None,
    recompute: Sequence[str] = ("full",),
) -> Problem:
    stages = own_stages(placement)
    with Pipeline(
        stages, placement, loss_fn, microbatches, host_memory_bytes, peers=peers, recompute=recompute
    ) as pipe:
        return pipe.profile(
            *batch(0, microbatches), activation_budget_bytes=10**9, offload_parts=offload_parts, repeats=1
        )


class Branches(nn.Module):
    """Several outputs, each by a layer of its own; where layers are left out, the input itself goes on."""

    def __init__(self, layers: int, outputs: int) -> None:
        super().__init__()
        self.layers, self.outputs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers)), outputs

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = [inputs[min(k, len(inputs) - 1)] for k in range(self.outputs)]
        return tuple(self.layers[k](x) if k < len(self.layers) else x for k, x in enumerate(given))


def branches() -> list[nn.Module]:
    """Of three outputs of the first stage, the second uses one and hands one on, which the third does not use."""
    torch.manual_seed(7)
    return [Branches(3, 3), Branches(1, 2), Branches(1, 1)]


def first_of(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return functional.mse_loss(output[0], target)


def with_branches(placement: Sequence[int], schedule: Schedule) -> tuple[StepReport, Gradients]:
    m, modules = schedule.problem.microbatches, own(branches(), placement)
    with pipeline(modules, schedule, first_of) as pipe:
        report = pipe.step(torch.ones(2 * m, WIDTH), torch.zeros(2 * m, WIDTH))
    return report, numbers(modules)


# Calls of ranks


def same(ranks: Ranks, placement: list[int], programs: list[Any], **stage: Any) -> list[Any]:
    made = problem(placement, sum(text.startswith("0F") for each in programs[0] for text in each), **stage)
    return train_as_plain(ranks, [Schedule.parse(made, texts) for texts in programs])


def train_as_plain(ranks: Ranks, schedules: list[Schedule], exact: bool = EXACT) -> list[Any]:
    """Trains one step with each schedule and compares with the plain run; returns the ranks' reports."""
    layout = Layout.from_problem(schedules[0].problem)
    placement = layout.placement
    results = ranks(train, placement=placement, schedules=schedules)
    for report in (report for reports, _ in results for report in reports):
        assert report.buffer_peak_bytes == report.buffer_certified_bytes
    losses, gradients = plain(len(placement), layout.microbatches, len(schedules))
    for step in range(len(schedules)):
        if EXACT:
            assert results[placement[-1]][0][step].losses == losses[step]
        np.testing.assert_allclose(results[placement[-1]][0][step].losses, losses[step], rtol=1e-5)
        found = joined(by_step[step] for _, by_step in results)
        if exact:
            np.testing.assert_equal(found, gradients[step], err_msg=f"step {step}")
        else:
            require_close(found, gradients[step], atol=1e-7 if EXACT else 1e-5)
    return [reports for reports, _ in results]


@cache
def measured(ranks: Ranks, placement: tuple[int, ...], peers: tuple[int | None, ...]) -> Problem:
    problem: Problem = ranks(measure, placement=placement, microbatches=3, offload_parts=2, peers=peers)[0]
    for stage in problem.stages:
        assert stage.can_evict == (peers[stage.device] is not None)
        assert not stage.can_evict or (stage.offload_bytes or 0) <= (stage.evict_bytes or 0) <= stage.activation_bytes
    return problem
