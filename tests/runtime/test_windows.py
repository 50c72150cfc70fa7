"""With ZeRO-2 the gradients of a stage are reduced several times a step, and a rank holds few whole gradients."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.close import require_close
from support.problems.units import units
from support.ranks import inner, replicas
from support.ranks.cases import Gradients, batch, loss_fn, make_stages, problem, refusals, sgd
from support.ranks.replicas import MIXED, Ran, Turn, gradients, parameters, place, whole_bytes, wrapped
from support.ranks.worker import Ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from optpipe.model.ops import Kind, Op
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.execute.gradients import windows as windows_of
from optpipe_runtime.lowering.plan import WEIGHT
from optpipe_solver.systems import generate


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
