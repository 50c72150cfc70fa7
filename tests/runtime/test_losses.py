"""Losses that autograd functions add inside of backwards, as mixtures of experts do, count as under torch's own
schedules; parameters that only `loss_fn` has are trained as those of the last stage."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.close import require_close
from support.ranks import cases
from support.ranks.cases import Gradients, pipeline
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT
from support.ranks.replicas import gradients, mesh, place, wrapped
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline, torch_schedule

WIDTH, CLASSES = 16, 7


class Added(torch.autograd.Function):
    """Adds a loss where the model has none: its gradient is 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, torch.ones(())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expert, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        share = logits.softmax(-1)
        losses = share.mean((0, 1)).square().sum() + 1e-2 * logits.logsumexp(-1).square().mean()
        return Added.apply(self.expert(x) * share.amax(-1, keepdim=True), losses)  # type: ignore[no-untyped-call]


def experts() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(Experts(), Experts()) for _ in range(2)]


def data(step: int, microbatches: int, parts: int = 1, part: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    whole = torch.randn(2, 2 * parts * microbatches, 4, WIDTH, generator=generator)
    return [tensor.chunk(parts)[part] for tensor in whole]


def by_torch(module: nn.Module, microbatches: int, loss: Callable[..., Tensor], scale: bool, group: Any = None) -> Any:
    rank = dist.get_rank(group)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, microbatches, loss, scale_grads=scale)
    return lambda x, y: schedule.step(*[x] * (rank == 0), target=y if rank == 1 else None)


def added(schedules: Sequence[Schedule], reduction: str) -> list[tuple[Gradients, Gradients]]:
    """Two steps by each schedule without `zero_grad` in between, and the sum of two steps by torch."""
    rank, m, loss = (
        dist.get_rank(),
        schedules[0].problem.microbatches,
        partial(functional.mse_loss, reduction=reduction),
    )
    found = []
    for schedule in schedules:
        theirs, ours = experts()[rank], experts()[rank]
        step, total = by_torch(theirs, m, loss, scale=reduction == "mean"), Gradients()
        with pipeline({rank: ours}, schedule, loss, scale_grads=reduction == "mean") as pipe:
            for k in range(2):
                pipe.step(*data(k, m))
                theirs.zero_grad()
                step(*data(k, m))
                total = {name: total.get(name, 0) + grad for name, grad in gradients({rank: theirs}).items()}
        found.append((gradients({rank: ours}), total))
    return found


def added_in_torch(schedule: Schedule) -> tuple[Gradients, Gradients]:
    rank, m = dist.get_rank(), schedule.problem.microbatches
    theirs, ours = experts()[rank], experts()[rank]
    x, y = data(0, m)
    by_torch(theirs, m, functional.mse_loss, scale=True)(x, y)
    runtime = torch_schedule(schedule, [PipelineStage(ours, rank, 2, torch.device("cpu"))], functional.mse_loss)
    runtime.step(*[x] * (rank == 0), target=y if rank == 1 else None)
    runtime.close()
    return gradients({rank: ours}), gradients({rank: theirs})


def added_on_the_host(schedule: Schedule) -> tuple[Gradients, Gradients]:
    """The parameters after a step whose optimizer is on the host, and after one by torch."""
    rank, m = dist.get_rank(), schedule.problem.microbatches
    theirs, ours = experts()[rank], experts()[rank]
    sgd = partial(torch.optim.SGD, lr=0.5)
    by_torch(theirs, m, functional.mse_loss, scale=True)(*data(0, m))
    sgd(theirs.parameters()).step()
    hosted = {s: lambda named: sgd([parameter for _, parameter in named]) for s in range(2)}
    with pipeline({rank: ours}, schedule, functional.mse_loss, host_optimizers=hosted) as pipe:
        pipe.step(*data(0, m))
        pipe.synchronize()
    return _parameters(ours), _parameters(theirs)


def added_on_replicas(schedule: Schedule, how: str) -> tuple[Gradients, Gradients]:
    """Two replicas of two ranks, and the mean over two pipelines of torch's."""
    here, m = place(), schedule.problem.microbatches
    theirs, ours = experts()[here.number], wrapped(experts()[here.number], how)
    by_torch(theirs, m, functional.mse_loss, scale=True, group=here.group)(*data(0, m, 2, here.replica))
    for parameter in theirs.parameters():
        dist.all_reduce(parameter.grad, group=mesh()["replica"].get_group())
    with pipeline({here.number: ours}, schedule, functional.mse_loss, group=here.group) as pipe:
        pipe.step(*data(0, m, 2, here.replica))
    mean = {name: grad / 2 for name, grad in gradients({here.number: theirs}).items()}
    return gradients({here.number: ours}), mean


def _parameters(module: nn.Module) -> Gradients:
    return {name: parameter.detach().numpy().copy() for name, parameter in module.named_parameters()}


# Losses with parameters


class Head(nn.Module):
    """Its parameters are trained with the last stage, and its running mean is changed by some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(WIDTH, CLASSES), nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        if y.detach().mean() > 0:
            self.mean = self.mean * 0.9 + y.detach().mean(0) * 0.1
        return functional.cross_entropy(self.linear(y - self.mean) * self.temperature, target)


class Trainer:
    """No module: a loss may be one of its methods, or itself."""

    def __init__(self, head: Head) -> None:
        self.head = head

    def loss(self, y: Tensor, target: Tensor) -> Tensor:
        return self.head(y, target)

    __call__ = loss


class Larger(nn.Module):
    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head, self.other = head, nn.Linear(2, 2)


FORMS: dict[str, Callable[[Head], Callable[..., Tensor]]] = {
    "a module": lambda head: head,
    "a closure": lambda head: lambda y, target: head(y, target),
    "a closure over an object": lambda head: _by_owner(Trainer(head)),
    "a closure over a larger module": lambda head: _by_owner(Larger(head)),
    "a default": lambda head: _with_default(head),
    "a partial": lambda head: partial(lambda own, y, target: own(y, target), head),
    "a method of a module": lambda head: head.forward,
    "a method": lambda head: Trainer(head).loss,
    "an object": Trainer,
    "a closure over its parts": lambda head: _by_parts({"heads": [head]}),
    "a function of a function": lambda head: partial(Trainer(head).loss),
}


def _with_default(head: Head) -> Callable[..., Tensor]:
    def loss(y: Tensor, target: Tensor, own: Head = head) -> Tensor:
        return own(y, target)

    return loss


def _by_owner(owner: Any) -> Callable[..., Tensor]:
    def loss(y: Tensor, target: Tensor) -> Tensor:
        return owner.head(y, target)

    return loss


def _by_parts(parts: dict[str, list[Head]]) -> Callable[..., Tensor]:
    def loss(y: Tensor, target: Tensor) -> Tensor:
        return parts["heads"][0](y, target)

    return loss


class Trained(NamedTuple):
    """Whether the profile left no gradient, and the most that norms, gradients and state are off in any step."""

    profile_leaves_none: bool
    norms: float
    gradients: float
    state: float


def with_parameters(schedule: Schedule, form: str, max_norm: float, ahead: bool) -> Trained:
    """Steps with batches of two sizes, so that some are undone; clipped after a step, or `ahead` of the norm."""
    rank, m, off = dist.get_rank(), schedule.problem.microbatches, [0.0, 0.0, 0.0]
    torch.manual_seed(0)
    modules, head = [nn.Linear(WIDTH, WIDTH) for _ in range(2)], Head()
    plain, plain_head = copy.deepcopy(modules), copy.deepcopy(head)
    batches = [(torch.randn(n * m, WIDTH), torch.randint(0, CLASSES, (n * m,))) for n in (2, 2, 4, 4, 2)]
    ours = [*modules[rank].parameters(), *(head.parameters() if rank == 1 else ())]
    theirs = [*plain[rank].parameters(), *(plain_head.parameters() if rank == 1 else ())]
    every = [p for module in (*plain, plain_head) for p in module.parameters()]
    sgd = partial(torch.optim.SGD, lr=0.3, momentum=0.5)
    optimizer, plain_optimizer = sgd(ours), sgd(every)
    with Pipeline({rank: modules[rank]}, [0, 1], FORMS[form](head), m) as pipe:
        pipe.profile(*batches[0], activation_budget_bytes=10**9, repeats=1)
        left_none = all(p.grad is None for p in ours)
        pipe.problem = schedule.problem
        pipe.load(schedule)
        if ahead:
            pipe.post_validate(optimizer, max_norm)
        for x, target in batches:
            optimizer.zero_grad()
            pipe.step(x, target)
            norm = 0.0 if ahead else pipe.clip_grad_norm_(max_norm)
            plain_optimizer.zero_grad()
            for a, b in zip(x.chunk(m), target.chunk(m), strict=True):
                torch.autograd.backward(plain_head(plain[1](plain[0](a)), b))
            for p in every:
                p.grad /= m  # type: ignore[operator]
            expected = nn.utils.clip_grad_norm_(every, max_norm).item()
            if not ahead:
                off[0] = max(off[0], abs(norm / expected - 1))
                off[1] = max(off[1], _off([p.grad for p in ours], [p.grad for p in theirs]))
            optimizer.step()
            plain_optimizer.step()
        pipe.synchronize()
    mine, other = ([*ours, head.mean], [*theirs, plain_head.mean]) if rank == 1 else (ours, theirs)
    off[2] = _off(mine, other)
    return Trained(left_none, *off)


def _off(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    pairs = [(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def unwrapped(schedule: Schedule, how: str) -> list[str]:
    """What is told if the last stage has replicas, and the parameters of its loss have none, or replicas alone."""
    here, m = place(), schedule.problem.microbatches

    def attempt(wraps_stage: bool) -> None:
        torch.manual_seed(0)
        stage, head = nn.Sequential(nn.Linear(WIDTH, WIDTH)), Head()
        modules = {here.number: wrapped(stage, how) if wraps_stage else stage}
        with pipeline(modules, schedule, head if wraps_stage else wrapped(head, how), group=here.group) as pipe:
            pipe.step(torch.randn(2 * m, WIDTH), torch.randint(0, CLASSES, (2 * m,)))

    return cases.refusals(lambda: attempt(True), lambda: attempt(False))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_losses_added_in_backwards_count_as_by_torch(ranks: Ranks, reduction: str) -> None:
    """And gradients of an earlier step stay as they are."""
    schedules = cases.parsed(ONE_F_ONE_B, SPLIT, OFFLOADED, RECOMPUTED)
    for pairs in ranks(added, schedules=schedules, reduction=reduction):
        for pair in pairs:
            require_close(*pair, rtol=1e-5, atol=1e-8)


def test_losses_added_in_backwards_count_alike_in_other_places(ranks: Ranks) -> None:
    (schedule,) = cases.parsed(ONE_F_ONE_B)
    for pair in (*ranks(added_in_torch, schedule=schedule), *ranks(added_on_the_host, schedule=schedule)):
        require_close(*pair, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_losses_added_in_backwards_count_alike_on_replicas(four_ranks: Ranks, how: str) -> None:
    (schedule,) = cases.parsed(SPLIT)
    for pair in four_ranks(added_on_replicas, schedule=schedule, how=how):
        require_close(*pair, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("form", FORMS)
def test_parameters_of_a_loss_are_the_last_stages(ranks: Ranks, form: str) -> None:
    """Their gradients after a profile, in the norm, after steps that were undone, and with a recomputed stage."""
    (schedule,) = cases.parsed(RECOMPUTED)
    for found in ranks(with_parameters, schedule=schedule, form=form, max_norm=1.0, ahead=False):
        assert found.profile_leaves_none
        assert max(found.norms, found.gradients, found.state) < 1e-5


def test_parameters_of_a_loss_are_validated_with_the_others(ranks: Ranks) -> None:
    (schedule,) = cases.parsed(ONE_F_ONE_B)
    found = ranks(with_parameters, schedule=schedule, form="a closure", max_norm=0.5, ahead=True)
    assert max(trained.state for trained in found) < 1e-5


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_parameters_of_a_loss_without_replicas_are_refused(four_ranks: Ranks, how: str) -> None:
    (schedule,) = cases.parsed(ONE_F_ONE_B)
    for told in four_ranks(unwrapped, schedule=schedule, how=how):
        assert len(told) == 2
        for sentence in told:
            assert "is trained with stage 1 and not in its module" in sentence
