"""Replicas of a pipeline, in DDP or FSDP: their gradients are those of the whole batch, whatever else they do. They are
reduced while backwards run, and come out as if that had been done after the step."""

import os
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.close import require_close
from support.ranks import cases, replicas
from support.ranks.cases import Gradients, batch, loss_fn, make_stages, pipeline, refusals
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT, V_SHAPED, programs
from support.ranks.replicas import Ran, Turn, odd_stages, place, whole_bytes, wrapped
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


def wrongly_wrapped(schedule: Schedule) -> list[str]:
    """What is told to who wraps a stage in a way that cannot work."""
    group, _, number, _ = place()
    data = batch(0, schedule.problem.microbatches)

    def attempt(module: nn.Module, *data: Tensor) -> None:
        with pipeline({number: module}, schedule, group=group) as pipe:
            pipe.step(*data)

    torch.manual_seed(0)
    return refusals(
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
    for rank, told in enumerate(four_ranks(wrongly_wrapped, schedule=schedule)):
        names = {"s": rank % 2, "a": rank // 2 * 2, "b": rank // 2 * 2 + 1}
        for message, part in zip(told, parts, strict=True):
            assert message.startswith(part.format(**names))


# Reductions

# The deeper stage of each rank is complete last.
LATE = programs(
    "0F0 0F1 0O1 3F0 0D1 3B0 0F2 3F1 3W0 3B1 0B0 0R1 3W1 3F2 0W0 0B1 3B2 0W1 0BW2 3W2",
    "1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2W0 2B1 1W0 1B1 2W1 1W1 2B2 1BW2 2W2",
)


# Each rank's last backward waits for the reduction of its deeper stage.
ENDED, STARTS = ([("0B2", f"{event} 3"), ("1B2", f"{event} 2")] for event in ("ended", "starts"))


def schedules(*programs: list[list[str]]) -> list[Schedule]:
    problem = cases.problem([0, 1, 1, 0], 3)
    return [Schedule.parse(problem, program) for program in programs]


def before_the_last_op(ran: Ran, step: int) -> list[int]:
    """The stages whose reductions start before it."""
    last = max(place for place, event in enumerate(ran.events[step]) if " " not in event)
    return ran._replace(events=[ran.events[step][:last]]).reduced(0)


def require_steps(results: list[Ran], expected: list[Gradients]) -> None:
    """On both replicas the gradients of each step."""
    for first, last in (results[:2], results[2:]):
        for step, plain in enumerate(expected):
            require_close(first.gradients[step] | last.gradients[step], plain)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_reduction_ends_before_the_last_op_of_the_step(four_ranks: Ranks, how: str) -> None:
    """The last op waits for it: would it start at the end, this never ended. In the first step by a schedule, which may
    have to be undone, it does."""
    turns = [Turn(load=0), Turn(awaits=ENDED), Turn(awaits=ENDED)]
    results = four_ranks(replicas.trained, schedules=[schedules(V_SHAPED)] * 2, turns=turns, how=how)
    for rank, ran in enumerate(results):
        deeper, shallower = 3 - rank % 2, rank % 2
        for step in range(3):
            assert ran.reduced(step) == [deeper, shallower]
        assert not before_the_last_op(ran, 0)
    assert all(before_the_last_op(ran, step) == ran.reduced(step)[:1] for ran in results[:2] for step in (1, 2))
    require_steps(results, cases.plain(4, 6, 3)[1])


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_replicas_start_in_one_order_whatever_they_run(four_ranks: Ranks, how: str) -> None:
    """On the second replica the deeper stage is complete last; the other stage waits for its turn."""
    turns, own = [Turn(load=0), Turn(awaits=STARTS)], [schedules(V_SHAPED), schedules(LATE)]
    results = four_ranks(replicas.trained, schedules=own, turns=turns, how=how)
    for rank, ran in enumerate(results):
        assert ran.reduced(1) == [3 - rank % 2, rank % 2]
    for rank in (2, 3):
        assert not before_the_last_op(results[rank], 1)
        np.testing.assert_equal(results[rank].parameters, results[rank - 2].parameters)
    _, expected = cases.plain(4, 6, 2)
    require_close(results[0].gradients[1] | results[1].gradients[1], expected[1])


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_whatever_happens_the_numbers_are_those_of_reductions_after_the_step(four_ranks: Ranks, how: str) -> None:
    """With a tie, clipping, a swap, a schedule that runs out of memory on one replica, and one whose batch changes its
    shape, so that a step that has begun is undone there and not on the other."""
    turns = [
        Turn(load=0),
        Turn(awaits=STARTS),
        Turn(length=cases.LENGTH // 2),
        Turn(length=cases.LENGTH // 2, awaits=STARTS),
        Turn(),
        Turn(load=1, memory=True),
        Turn(awaits=STARTS),
        Turn(load=1),
        Turn(),
    ]
    own = [schedules(V_SHAPED, LATE), schedules(LATE, V_SHAPED)]
    found, late = (
        four_ranks(replicas.trained, schedules=own, turns=turns, how=how, late=late, max_norm=0.5, tied=True)
        for late in (False, True)
    )
    for rank, (ran, expected) in enumerate(zip(found, late, strict=True)):
        assert ran.losses == expected.losses
        assert ran.norms == expected.norms
        assert ran.versions == expected.versions == ([1] * 5 + [3, 3, 4, 4] if rank < 2 else [1] * 5 + [2, 2, 3, 3])
        np.testing.assert_equal(ran.gradients, expected.gradients)
        np.testing.assert_equal(ran.parameters, expected.parameters)
        assert not any(before_the_last_op(expected, step) for step in range(len(turns)))
        assert all(len(ran.reduced(step)) == 2 for step in range(len(turns))), "an undone run reduces nothing"
    assert all(before_the_last_op(ran, step) for ran in found[:2] for step in (1, 3, 6))


def test_a_shared_parameter_is_reduced_when_all_its_stages_are_complete(four_ranks: Ranks) -> None:
    turns = [Turn(load=0), Turn(), Turn()]
    results = four_ranks(replicas.trained, schedules=[schedules(V_SHAPED)] * 2, turns=turns, how="ddp", shared=True)
    assert not any(before_the_last_op(results[first], step) for first in (0, 2) for step in range(3))
    require_steps(results, replicas.plain_shared(6, 3))


@pytest.mark.parametrize("own", [[V_SHAPED, V_SHAPED], [V_SHAPED, LATE]])
def test_a_stage_is_gathered_before_its_own_first_forward(four_ranks: Ranks, own: list[list[list[str]]]) -> None:
    """And not when the step begins, unless that was where its stages were learned. What is held is certified."""
    turns = [Turn(load=0), Turn(), Turn()]
    results = four_ranks(
        replicas.trained, schedules=[schedules(own[0]), schedules(own[1])], turns=turns, how="fsdp", trace=True
    )
    for rank, ran in enumerate(results):
        shallow, deep = rank % 2, 3 - rank % 2
        for step in (1, 2):
            events = ran.events[step]
            gathers = [event for event in events if event.startswith("gathers")]
            assert gathers == [f"gathers {shallow}", f"gathers {deep}"]
            assert events.index(f"{shallow}F0") < events.index(f"gathers {deep}") < events.index(f"{deep}F0")
            assert ran.held[step][f"{shallow}F0"] == whole_bytes(shallow)
            assert ran.held[step][f"{deep}F0"] == whole_bytes(shallow) + whole_bytes(deep)
        for peak, certified in ran.gathered:
            assert peak == certified == 2 * (whole_bytes(shallow) + whole_bytes(deep)), "with whole gradients"
    require_steps(results, cases.plain(4, 6, 3)[1])
