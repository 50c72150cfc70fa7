"""Replicas of a pipeline, in DDP or FSDP: their gradients are those of the whole batch, whatever else they do. They are
reduced while backwards run, and come out as if that had been done after the step. With ZeRO-2 those of a stage are
reduced several times a step, and a rank holds few whole gradients."""

import os
import signal
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.close import require_close
from support.problems.units import units
from support.ranks import cases, inner, replicas
from support.ranks.cases import Gradients, batch, loss_fn, make_stages, pipeline, problem, refusals, sgd
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT, V_SHAPED, programs
from support.ranks.replicas import MIXED, Ran, Turn, gradients, odd_stages, parameters, place, wrapped
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from optpipe.errors import OptPipeError
from optpipe.model.ops import Kind, Op
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.execute.gradients import windows as windows_of
from optpipe_runtime.lowering.plan import WEIGHT
from optpipe_solver.systems import generate


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


def whole_bytes(s: int, stages: int = 4) -> int:
    return sum(parameter.nbytes for parameter in make_stages(stages)[s].parameters())


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


# Windows


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
                of_window.append([p.grad.clone() for p in every])
            mean = [(a + b) / 2 for a, b in zip(*of_window, strict=True)]
            total = [a + b for a, b in zip(total, mean, strict=True)] if total else mean
        for p, gradient in zip(every, total, strict=True):
            p.grad = gradient
        found.append(gradients(dict(enumerate(modules))))
        optimizer.step()
    return found, parameters(dict(enumerate(modules)))


def refused(schedule: Schedule) -> list[str]:
    """What is told to who asks for windows where there can be none."""
    here, m = place(), schedule.problem.microbatches
    placement = [stage.device for stage in schedule.problem.stages]

    def attempt(how: str) -> None:
        Pipeline(here.stages(placement, how), placement, loss_fn, m, group=here.group, whole_gradients=1).close()

    return refusals(lambda: attempt("ddp"), lambda: attempt("replicate"))


def of_inner_peers(program: Sequence[str], steps: int, **wrapping: Any) -> list[inner.Seen]:
    """Two replicas, of two tensor-parallel ranks with both stages."""
    ranks = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replica", "pipe", "tensor"))
    replica, m = (ranks.get_coordinate() or (0,))[0], 4
    modules = {
        s: wrapped(inner.parallel(module, ranks["tensor"]), "fsdp", ranks["replica"], **wrapping)
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


STAGES, MICROBATCHES, WINDOW = 6, 4, 2
PROBLEM = units(2, MICROBATCHES, v=3)


@cache
def zero2() -> Schedule:
    return generate(f"chronos-zero2:group={WINDOW}", PROBLEM)


@cache
def chronos() -> Schedule:
    return generate("chronos", PROBLEM)


def certified(rank: int, whole: int) -> int:
    """All parameters of the rank's stages, and so many whole gradients of stages that follow each other."""
    sizes = [whole_bytes(s, STAGES) for s in range(STAGES) if s % 2 == rank % 2]
    return sum(sizes) + max(sum(sizes[i - k] for k in range(whole)) for i in range(len(sizes)))


def trained(ranks: Ranks, own: list[list[Schedule]], turns: list[Turn]) -> list[Ran]:
    """By schedules of each replica, profiled before, with two whole gradients."""
    how = {"how": "fsdp", "trace": True, "profiles": True, "whole_gradients": 2}
    return ranks(replicas.trained, schedules=own, turns=turns, **how)  # type: ignore[arg-type]


def whole(results: list[Ran], replica: int, step: int) -> Gradients:
    return results[2 * replica].gradients[step] | results[2 * replica + 1].gradients[step]


def test_gradients_are_bitwise_those_of_sums_in_this_order_and_few_are_whole(four_ranks: Ranks) -> None:
    """The backward of micro-batch 1 in the middle stage waits for the reduction of the deepest stage's first window:
    were it later, this never ended."""
    turns = [Turn(load=0), Turn(awaits=[("2B1", "ended 4")]), Turn(awaits=[("3B1", "ended 5")])]
    results = trained(four_ranks, [[zero2()]] * 2, turns)
    expected, last = plain(STAGES, MICROBATCHES, 3, WINDOW)
    for rank, ran in enumerate(results):
        for step in range(3):
            own = [s for s in reversed(range(STAGES)) if s % 2 == rank % 2]
            assert ran.reduced(step) == own * (MICROBATCHES // WINDOW), "in the program's order, the first step too"
            assert ran.gathered[step] == (certified(rank, 2), certified(rank, 2))
    for replica in (0, 1):
        for step in range(3):
            np.testing.assert_equal(whole(results, replica, step), expected[step])
        both = results[2 * replica].parameters | results[2 * replica + 1].parameters
        np.testing.assert_equal(both, last)


def test_replicas_that_run_different_schedules_reduce_once(four_ranks: Ranks) -> None:
    """And in windows again when they run the same one."""
    turns = [Turn(load=0), Turn(load=1), Turn(), Turn(load=2), Turn(load=0)]
    own = [[zero2(), zero2(), chronos()], [zero2(), chronos(), chronos()]]
    results = trained(four_ranks, own, turns)
    for rank, ran in enumerate(results):
        counts = [len(ran.reduced(step)) for step in range(len(turns))]
        assert counts[1] == counts[2] == 3
        assert counts[0] == counts[4] == 6
        assert counts[3] == len(windows_of(chronos().programs[rank % 2].ops(), 2).ends) + 3
        assert ran.gathered[1] == (certified(rank, 3),) * 2
        assert ran.gathered[4] == (certified(rank, 2),) * 2
    expected = plain(STAGES, MICROBATCHES, len(turns), MICROBATCHES)[0]
    for replica in (0, 1):
        for step in range(len(turns)):
            require_close(whole(results, replica, step), expected[step])


def test_tensor_parallel_stages_in_windows(four_ranks: Ranks) -> None:
    """Of parameters that are spread over replicas and over inner peers. What FSDP would exchange with inner peers when
    it reduces, beside the ops of the other stage, is exchanged before."""
    order = ["0F0", "1F0", "0F1", "1F1", "1BW0", "1BW1", "0BW0", "0BW1"]
    program = order + [op[:-1] + str(int(op[-1]) + 2) for op in order]
    ranks = four_ranks(of_inner_peers, program=program, steps=2)
    parameters, gradients = zip(*(inner.part_bytes(stage) for stage in inner.make_stages()), strict=True)
    most = sum(parameters) + max(gradients)
    for step, expected in enumerate(inner.plain(8, 2)):
        largest = max(float(abs(gradient).max()) for gradient in expected.gradients.values())
        for found in ranks:
            assert found[step].norm == pytest.approx(expected.norm, rel=1e-5)
            assert found[step].gathered == (most, most)
            require_close(found[step].gradients, expected.gradients, atol=1e-6 * largest)


def test_gradients_of_b_and_of_w_are_reduced_in_one_type(four_ranks: Ranks) -> None:
    """FSDP puts aside those that come at B, in float32, and those of a W in bfloat16 only behind the next backward."""
    program = [f"{s}{kind}{j}" for j in range(4) for s, kind in zip((0, 1, 1, 1, 0, 0), "FFBWBW", strict=True)]
    expected = inner.plain(8, 1)[0]
    largest = max(float(abs(gradient).max()) for gradient in expected.gradients.values())
    for (seen,) in four_ranks(of_inner_peers, program=program, steps=1, **MIXED):
        require_close(seen.gradients, expected.gradients, rtol=1e-7, atol=0.02 * largest)
        peak, most = seen.gathered
        assert peak <= most


def test_stages_that_cannot_be_reduced_in_windows_are_refused(four_ranks: Ranks) -> None:
    (told, *others) = four_ranks(refused, schedule=zero2())
    sentence = "whole_gradients = 1: stage 0 is not sharded over replicas, so its gradients stay whole: use fully_shard"
    assert told == [sentence] * 2
    assert all(len(each) == 2 for each in others)


@st.composite
def lists_of_ops(draw: st.DrawFn) -> list[Op]:
    """Ops of a rank's stages, as they come."""
    kinds = st.sampled_from([Kind.F, Kind.B, Kind.W, Kind.BW])
    named = draw(st.lists(st.tuples(kinds, st.integers(0, 4), st.integers(0, 9)), unique=True, max_size=40))
    return [Op(kind, s, j) for kind, s, j in named]


@given(lists_of_ops(), st.integers(1, 6))
def test_a_rank_never_holds_more_whole_gradients_than_asked(ops: list[Op], count: int) -> None:
    """By hand: what is added to is held until its room is needed. Each op is in one window, whose end comes before its
    room is needed; and nothing is reduced without need."""
    found = windows_of(ops, count)
    held: dict[int, Op] = {}
    last = {op.stage: op for op in ops if op.kind in WEIGHT}
    left = set()
    for op in ops:
        if (s := found.room.get(op)) is not None:
            assert s != op.stage
            assert len(held) == count
            left.add(held[s])
            assert held.pop(s) in found.ends | set(last.values())
        if op.kind in WEIGHT:
            held[op.stage] = op
        assert len(held) <= count
    assert found.ends == left - set(last.values())
    if count >= len(last):
        assert not found.ends
        assert not found.room
