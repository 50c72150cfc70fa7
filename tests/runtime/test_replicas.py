"""Replicas of a pipeline, in DDP or FSDP: their gradients are those of the whole batch, whatever else they do."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.close import require_close
from support.ranks import cases, replicas
from support.ranks.cases import LENGTH, Gradients, batch, loss_fn, make_stages, pipeline, sgd
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT
from support.ranks.replicas import Seen, gradients, odd_stages, place, wrapped
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from optpipe.errors import InputError, OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.ranks.replicas import Replicas


def replicated(schedules: Sequence[Sequence[Schedule]], how: str) -> list[Seen]:
    """Each replica trains a step with each of its schedules on its half of the batch."""
    here, problem = place(), schedules[0][0].problem
    placement, m = [stage.device for stage in problem.stages], problem.microbatches
    modules = here.stages(placement, how)
    optimizer = sgd(*modules.values())
    seen = []
    with Pipeline(modules, placement, loss_fn, m, group=here.group) as pipe:
        for step, schedule in enumerate(schedules[here.replica]):
            pipe.load(schedule)
            optimizer.zero_grad()
            report = pipe.step(*here.batch(step, m))
            seen.append(Seen(report.losses, gradients(modules)))
            optimizer.step()
    return seen


class Collectives(TorchDispatchMode):
    """Counts what passes between replicas on FSDP."""

    def __init__(self, count: Counter[str]) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name, what in {"allgather": "_allgather_base", "reduce_scatter": "reduce_scatter"}.items():
            self.count[name] += what in str(func)  # `allgather_` is that of objects, between the ranks of a pipeline
        return func(*args, **kwargs or {})


@contextmanager
def collectives(pipe: Pipeline) -> Iterator[Counter[str]]:
    """Those of this thread and of the reductions."""
    count: Counter[str] = Counter()

    def reduction(s: int) -> Any:
        read, reduce = Replicas.reduction(pipe.runner.rank.replicas, s)

        def counted() -> None:
            with Collectives(count):
                reduce()

        return read, counted

    with Collectives(count), patch.multiple(pipe.runner.rank.replicas, reduction=reduction):
        yield count


def uneven(first: Schedule, better: Schedule) -> tuple[list[int], list[Gradients], list[dict[str, int]]]:
    """On FSDP: only the first replica is offered a better schedule, and only its batch changes its shape, in the second
    step. Versions, gradients, and the collectives of each step."""
    here, m = place(), first.problem.microbatches
    modules = here.stages([0, 1], "fsdp")
    versions, found, made = [], [], []
    with pipeline(modules, first, group=here.group) as pipe:
        if dist.get_rank() == 0:
            pipe.offer(better)
        for step in range(2000):  # until the swap: how many steps the preparation takes is not the test
            modules[here.number].zero_grad()
            inputs, targets = here.batch(step, m)
            if step == 1 and here.replica == 0:
                inputs, targets = inputs[:, : LENGTH // 2].contiguous(), targets[:, : LENGTH // 2].contiguous()
            with collectives(pipe) as count:
                versions.append(pipe.step(inputs, targets).version)
            made.append(dict(count))
            found.append(gradients(modules))
            newest = torch.tensor(versions[-1])
            dist.all_reduce(newest, op=dist.ReduceOp.MAX)
            if newest == 2 and step > 1:
                break
    return versions, found, made


def hooked(schedule: Schedule, steps: int) -> tuple[list[int], int]:
    """With a communication hook on DDP, which sets gradients to one: how many numbers it saw, each time; and how many
    there are."""
    here, m = place(), schedule.problem.microbatches
    (module,) = here.stages([0, 1], "ddp").values()
    seen: list[int] = []
    assert isinstance(module, DistributedDataParallel)

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and takes no strings
        seen.append(bucket.buffer().numel())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(torch.ones_like(bucket.buffer()))
        return done

    module.register_comm_hook(None, hook)
    with pipeline({here.number: module}, schedule, group=here.group) as pipe:
        for step in range(steps):
            pipe.step(*here.batch(step, m))
    assert all(bool((p.grad == 1).all()) for p in module.parameters())
    return seen, sum(p.numel() for p in module.parameters())


def undone(first: Schedule, larger: Schedule, how: str, **options: Any) -> tuple[list[int], Gradients]:
    """One rank of the first replica runs out of memory late in its first step by another schedule. Versions, and the
    step's gradients."""
    here, m = place(), first.problem.microbatches
    modules = here.stages([0, 1], how, **options)
    full: list[bool] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if here.replica == 0 and pipe.version == 2:
            full.append(len(full) == m - 1)
            if full[-1]:
                raise MemoryError("no more")
        return loss_fn(output, target)

    versions = []
    with Pipeline(modules, [0, 1], loss, m, group=here.group) as pipe:
        for step, schedule in enumerate((first, larger)):
            pipe.load(schedule)
            modules[here.number].zero_grad()
            versions.append(pipe.step(*here.batch(step, m)).version)
        return versions, gradients(modules)


def bereft(schedule: Schedule, how: str) -> str:
    """Two replicas of one rank each, of which the first is killed in its second step. What the other is told."""
    rank, m, step = dist.get_rank(), schedule.problem.microbatches, 0
    replicas = init_device_mesh("cpu", (2,))
    stages = dict(enumerate(wrapped(module, how, replicas) for module in make_stages(2)))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if step == 1 and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_fn(output, target)

    try:
        with pipeline(stages, schedule, loss, group=[dist.new_group([r]) for r in range(2)][rank]) as pipe:
            for step in range(3):
                pipe.step(*(part.chunk(2)[rank] for part in batch(step, 2 * m)))
    except OptPipeError as error:
        return str(error)
    return "it ran"


def refused(schedule: Schedule) -> list[str]:
    """What is told to who wraps a stage in a way that cannot work."""
    group, _, number, _ = place()
    m, told = schedule.problem.microbatches, list[str]()

    def attempt(module: nn.Module, **data: Tensor) -> None:
        try:
            with pipeline({number: module}, schedule, group=group) as pipe:
                pipe.step(**data)
        except InputError as error:
            told.append(str(error))

    torch.manual_seed(0)
    attempt(DistributedDataParallel(nn.Linear(2, 2)))
    attempt(fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (4,))))
    attempt(nn.Sequential(wrapped(nn.Linear(2, 2), "ddp")))
    attempt(wrapped(nn.Linear(2, 2), "ddp", static_graph=True))
    inputs, targets = batch(0, m)
    attempt(wrapped(odd_stages()[number], "ddp"), inputs=inputs, targets=targets)
    return told


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_gradients_are_the_mean_over_the_replicas(four_ranks: Ranks, how: str) -> None:
    """Those of a plain run over the whole batch, with the float32 sums in another order; and the replicas' schedules
    may differ."""
    schedules = [
        cases.parsed(ONE_F_ONE_B, SPLIT, OFFLOADED, RECOMPUTED),
        cases.parsed(SPLIT, SPLIT, RECOMPUTED, OFFLOADED),
    ]
    results = four_ranks(replicated, schedules=schedules, how=how)
    _, gradients = cases.plain(2, 8, 4)
    for first, last in (results[:2], results[2:]):
        for step, expected in enumerate(gradients):
            require_close(first[step].gradients | last[step].gradients, expected)


def test_replicas_without_a_wrapper_train_separately(four_ranks: Ranks) -> None:
    """Each to the bit as a plain run over its own half of the batch."""
    schedules = [cases.parsed(SPLIT, OFFLOADED), cases.parsed(OFFLOADED, SPLIT)]
    results = four_ranks(replicated, schedules=schedules, how="alone")
    for replica in range(2):
        halves = [[part.chunk(2)[replica] for part in data] for data in cases.batches(2, 8)]
        plain = cases.plain_training(make_stages(2), halves, 4)
        first, last = results[2 * replica : 2 * replica + 2]
        for step, expected in enumerate(plain):
            assert last[step].losses == expected.losses
            np.testing.assert_equal(first[step].gradients | last[step].gradients, expected.clipped)


WRAPPERS = {
    "ddp": ("ddp", {"find_unused_parameters": True}),
    "bucket views": ("ddp", {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    "fsdp": ("fsdp", {}),
    "replicate": ("replicate", {}),
    "float64 reduction": ("fsdp", {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_other_calls_do_not_disturb_a_wrapper(four_ranks: Ranks, wrapper: str) -> None:
    """Neither a profile, evaluations, accumulation, a tie, unused layers nor buffers; what it adds is no activation."""
    how, options = WRAPPERS[wrapper]
    (schedule,) = cases.parsed(OFFLOADED)
    alone = four_ranks(replicas.odds, schedule=schedule, how="alone")
    results = four_ranks(replicas.odds, schedule=schedule, how=how, **options)
    gradients, norm, clipped = replicas.plain_odds(8)
    for rank, seen in enumerate(results):
        assert seen.sizes == alone[rank].sizes
        assert seen.norm == pytest.approx(norm, rel=1e-5)
    for first, last in (results[:2], results[2:]):
        require_close(first.gradients | last.gradients, gradients)
        require_close(first.clipped | last.clipped, clipped)
    assert all(results[rank].losses == alone[rank].losses for rank in (0, 1))  # in training mode buffers change no loss
    assert (results[0].means == results[2].means) == (how == "ddp")  # which alone keeps buffers equal


def test_replicas_may_run_different_schedules(four_ranks: Ranks) -> None:
    """Nor swap or learn together: what they exchange, they exchange once a step, in one order."""
    (first,), (better,) = cases.parsed(ONE_F_ONE_B), cases.parsed(OFFLOADED)
    results = four_ranks(uneven, first=first, better=better)
    assert [versions[-1] for versions, *_ in results] == [2, 2, 1, 1]
    for rank, (_, found, made) in enumerate(results):
        layers = len({name.split(".")[1] for name in found[0]})
        assert made == [{"allgather": layers, "reduce_scatter": layers}] * len(made)
        for name, grad in found[-1].items():
            np.testing.assert_array_equal(grad, results[rank % 2][1][-1][name], err_msg=name)
    _, (expected,) = cases.plain(2, 8)
    require_close(results[0][1][0] | results[1][1][0], expected)


def test_a_communication_hook_of_ddp_reduces_each_gradient_once_a_step(four_ranks: Ranks) -> None:
    (schedule,) = cases.parsed(SPLIT)
    for seen, numbers in four_ranks(hooked, schedule=schedule, steps=3):
        assert sum(seen) == 3 * numbers


@pytest.mark.parametrize("wrapper", ["fsdp", "float64 reduction", "bucket views"])
def test_a_step_that_is_undone_leaves_nothing_in_a_wrapper(four_ranks: Ranks, wrapper: str) -> None:
    how, options = WRAPPERS[wrapper]
    (first,), (larger,) = cases.parsed(ONE_F_ONE_B), cases.parsed(SPLIT)
    options = {name: value for name, value in options.items() if name != "find_unused_parameters"}
    results = four_ranks(undone, first=first, larger=larger, how=how, **options)
    assert [versions for versions, _ in results] == [[1, 3], [1, 3], [1, 2], [1, 2]]
    modules = dict(enumerate(cases.make_stages(2)))
    for x, y in zip(*(part.chunk(8) for part in cases.batch(1, 8)), strict=True):
        torch.autograd.backward(cases.loss_fn(modules[1](modules[0](x)), y) / 8)
    for (_, first), (_, last) in (results[:2], results[2:]):
        require_close(first | last, replicas.gradients(modules))


def test_a_lost_replica_is_reported(ranks: Ranks) -> None:
    program = ["0F0", "0F1", "1F0", "1F1", "1BW0", "1BW1", "0BW0", "0BW1"]
    both = Schedule.parse(cases.problem([0, 0], 2), [program])
    (told,) = ranks.survivors(bereft, dying=0, schedule=both, how="fsdp")
    assert "another replica has failed, or the communication with it" in told


def test_wrappers_that_cannot_work_are_refused(four_ranks: Ranks) -> None:
    of_these = "spans ranks [0, 1, 2, 3], of which [{a}, {b}] are in the same pipeline: give it the "
    parts = [
        "stage {s}: its DistributedDataParallel " + of_these + "process_group",
        "stage {s}: its fully_shard " + of_these + "mesh",
        "stage {s} has a DistributedDataParallel inside: wrap the stage as a whole, and outside of torch.compile",
        "stage {s}: DistributedDataParallel with static_graph counts on one backward a step: leave it out",
        "stage {s}: unused.weight and 1 other parameters got no gradient in this step: make its "
        "DistributedDataParallel with find_unused",
    ]
    (schedule,) = cases.parsed(SPLIT)
    for rank, told in enumerate(four_ranks(refused, schedule=schedule)):
        names = {"s": rank % 2, "a": rank // 2 * 2, "b": rank // 2 * 2 + 1}
        for message, part in zip(told, parts, strict=True):
            assert message.startswith(part.format(**names))
