"""Replicas of a pipeline, in DDP or FSDP: their gradients are those of the whole batch, whatever else they do."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from support.close import require_close
from support.ranks import cases, replicas
from support.ranks.cases import batch, loss_fn, make_stages, pipeline
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT
from support.ranks.replicas import Turn, odd_stages, place, wrapped
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from optpipe.errors import OptPipeError
from optpipe.schedule import Schedule


def hooked(schedule: Schedule, steps: int) -> tuple[list[int], int]:
    """With a communication hook that sets gradients to one: the numbers that it saw, and how many there are."""
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
    data = batch(0, schedule.problem.microbatches)

    def attempt(module: nn.Module, *data: Tensor) -> None:
        with pipeline({number: module}, schedule, group=group) as pipe:
            pipe.step(*data)

    torch.manual_seed(0)
    return cases.refusals(
        lambda: attempt(DistributedDataParallel(nn.Linear(2, 2))),
        lambda: attempt(fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (4,)))),
        lambda: attempt(nn.Sequential(wrapped(nn.Linear(2, 2), "ddp"))),
        lambda: attempt(wrapped(nn.Linear(2, 2), "ddp", static_graph=True)),
        lambda: attempt(wrapped(odd_stages()[number], "ddp"), *data),
    )


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


def test_a_communication_hook_of_ddp_reduces_each_gradient_once_a_step(four_ranks: Ranks) -> None:
    (schedule,) = cases.parsed(SPLIT)
    for seen, numbers in four_ranks(hooked, schedule=schedule, steps=3):
        assert sum(seen) == 3 * numbers


@pytest.mark.parametrize("wrapper", ["ddp", "bucket views", "fsdp", "float64 reduction"])
def test_gradients_are_the_mean_over_the_replicas(four_ranks: Ranks, wrapper: str) -> None:
    """Those of a plain run over the whole batch. Schedules differ; on one replica that of a step is undone."""
    how, options = WRAPPERS[wrapper]
    options = {name: value for name, value in options.items() if name != "find_unused_parameters"}
    schedules = [
        cases.parsed(ONE_F_ONE_B, SPLIT, OFFLOADED, RECOMPUTED),
        cases.parsed(SPLIT, SPLIT, RECOMPUTED, OFFLOADED),
    ]
    turns = [Turn(load=k, memory=k == 1) for k in range(4)]
    results = four_ranks(replicas.trained, schedules=schedules, turns=turns, how=how, **options)
    assert [ran.versions for ran in results] == [[1, 3, 4, 5]] * 2 + [[1, 2, 3, 4]] * 2
    for first, last in (results[:2], results[2:]):
        for step, expected in enumerate(cases.plain(2, 8, 4)[1]):
            require_close(first.gradients[step] | last.gradients[step], expected)


def test_a_lost_replica_is_reported(ranks: Ranks) -> None:
    (told,) = ranks.survivors(bereft, dying=0, schedule=cases.all_forwards_first([0, 0], 2), how="fsdp")
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
