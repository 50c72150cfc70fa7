"""No rank waits between steps, and updates that are ahead of their norm come out, to the bit, as if they had waited:
the same training with gradients clipped before each update, and with updates that are ahead of their norm."""

import math
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.close import require_close
from support.ranks import cases
from support.ranks.cases import LENGTH, WIDTH, Gradients, own, pipeline
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT
from support.ranks.replicas import Place, mesh, parameters, place, whole, wrapped
from support.ranks.swaps import WAIT, failing, heard
from support.ranks.worker import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

from optpipe.errors import OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.pipeline import post_validation
from optpipe_runtime.stage.runner import StageRunner
from optpipe_solver.systems import generate

OPTIMIZERS = {
    "adamw": lambda own: torch.optim.AdamW(own, lr=1e-2, weight_decay=0.1),
    "sgd": lambda own: torch.optim.SGD(own, lr=0.1),
    "momentum": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9),
    # changes gradients in place
    "nesterov": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "tensor rate": lambda own: torch.optim.Adam(own, lr=torch.tensor(1e-2)),
}


class Turn(NamedTuple):
    """One step of a training and what comes around it.

    `load`: which schedule, by its place. `memory`: a rank whose first backward runs out of
    memory. `reads`: a rank that reads its optimizer's state alone after the update. `overflow`: a rank with an infinite
    gradient. `updates`: how often the optimizer steps.
    """

    sequences: int = 2
    load: int | None = None
    memory: int | None = None
    evaluate: bool = False
    reads: int | None = None
    overflow: int | None = None
    updates: int = 1


class Habits(NamedTuple):
    """`calm` is the module's `CALM`; with 0 every update is ahead of its norm."""

    optimizer: str = "adamw"
    max_norm: float | None = 1.0
    calm: int = 0
    to_none: bool = True
    how: str = "alone"  # or "ddp", "fsdp", "inner"


class Ran(NamedTuple):
    """On one rank: losses, norms, rates, the schedule of each step; parameters, buffers and state at the end."""

    losses: list[list[float] | None]
    norms: list[float]
    rates: list[float]
    parameters: Gradients
    state: Gradients
    methods: list[str]
    logged: list[str]
    runs: int  # of the executor, with those that fail and those that are left out


class Exact(nn.Module):
    """Refuses what is not finite, as models do that look at their numbers."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.isfinite().all():
            raise ValueError("not finite")
        return x


def stages(count: int, alone: bool) -> list[nn.Module]:
    torch.manual_seed(8)
    moods: list[list[nn.Module]] = [[nn.BatchNorm1d(LENGTH), nn.Dropout(0.1)] if alone else [] for _ in range(count)]
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), *mood, nn.GELU(), nn.Linear(WIDTH, WIDTH), Exact()) for mood in moods
    ]


def in_parts(stage: nn.Module, inner: DeviceMesh) -> nn.Module:
    return parallelize_module(stage, inner, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def placed(placement: Sequence[int], how: str) -> tuple[Place, DeviceMesh | None, dict[int, nn.Module]]:
    """This rank, its inner peers, which get the same batch, and its stages."""
    here, inner = place(alone=how == "alone"), mesh()["replica"] if how == "inner" else None
    modules = {
        s: wrapped(module, how) if inner is None else in_parts(module, inner)
        for s, module in own(stages(len(placement), how == "alone"), placement, here.group).items()
    }
    return here if inner is None else here._replace(replica=0), inner, modules


def batch(step: int, sequences: int, microbatches: int, replica: int) -> tuple[Tensor, Tensor]:
    """Losses, and so norms, differ much from step to step."""
    generator = torch.Generator().manual_seed(2 * step + replica)
    inputs, targets = torch.randn(2, sequences * microbatches, LENGTH, WIDTH, generator=generator)
    return inputs, targets * (1 + step % 3)


def trained(
    placement: Sequence[int], schedules: Sequence[Schedule], turns: Sequence[Turn], habits: Habits, validated: bool
) -> Ran:
    """A training; `validated`: by `post_validate`, else each update waits for its norm."""
    m = schedules[0].problem.microbatches
    (group, replica, number, _), inner, modules = placed(placement, habits.how)
    optimizer = OPTIMIZERS[habits.optimizer]([p for module in modules.values() for p in module.parameters()])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(turns))
    torch.manual_seed(number)
    losses, norms, rates, methods = [], [], [], []
    with (
        calm(habits.calm),
        heard() as logged,
        Pipeline(modules, placement, mse_loss, m, group=group, inner=inner) as pipe,
        mock.patch.object(pipe.runner.executor, "run", wraps=pipe.runner.executor.run) as run,
        mock.patch.object(pipe.runner.executor, "skip", wraps=pipe.runner.executor.skip) as skip,
    ):
        pipe.load(schedules[0])
        if validated:
            pipe.post_validate(optimizer, habits.max_norm)
        for step, turn in enumerate(turns):
            data = batch(step, turn.sequences, m, replica)
            if turn.load is not None:
                pipe.load(schedules[turn.load])
            scarce = turn.memory == number
            with failing("backward", 1, torch.OutOfMemoryError("too much")) if scarce else nullcontext():
                losses.append(pipe.step(*data).losses)
            methods.append(pipe.schedule.method)
            if turn.overflow == number:
                next(p for module in modules.values() for p in module.parameters()).grad.mul_(torch.inf)  # type: ignore[union-attr]
            for _ in range(turn.updates):
                if validated:
                    optimizer.step()
                else:
                    norms.append(clipping(pipe, optimizer, habits.max_norm))
                rates.append(float(optimizer.param_groups[0]["lr"]))
            scheduler.step()
            if turn.updates:
                optimizer.zero_grad(set_to_none=habits.to_none)
            if turn.reads == number:
                optimizer.state_dict()
            if turn.evaluate:
                losses.append(pipe.evaluate(*data).losses)
        pipe.synchronize()
        state = {
            f"{k}.{name}": whole(v) for k, own in optimizer.state_dict()["state"].items() for name, v in own.items()
        }
        buffers = {f"{s}.{n}": whole(b) for s, module in modules.items() for n, b in module.named_buffers()}
        found, runs = parameters(modules) | buffers, run.call_count + skip.call_count
        return Ran(losses, norms, rates, found, state, methods, list(logged), runs)


def clipping(pipe: Pipeline, optimizer: torch.optim.Optimizer, max_norm: float | None) -> float:
    """An update as users make it that wait: returns its norm. Leaves the gradients as they were."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    before = [None if p.grad is None else p.grad.clone() for p in own]
    norm = pipe.clip_grad_norm_(max_norm or math.inf)
    if math.isfinite(norm):
        optimizer.step()
    for p, grad in zip(own, before, strict=True):
        p.grad = grad
    return norm


def calm(count: int) -> AbstractContextManager[object]:
    return mock.patch.object(post_validation, "CALM", count)


def ahead(schedule: Schedule, steps: int, validated: bool) -> list[float | None]:
    """Rank 1 does not end a step until rank 0 has begun the next."""
    rank, m, losses = dist.get_rank(), schedule.problem.microbatches, []
    store, begun, run = dist.distributed_c10d._get_default_store(), [0], f"ahead {validated}"
    module = stages(2, alone=True)[rank]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    real_forward, real_weight, weights = StageRunner.forward, StageRunner.weight, [0]

    def forward(self: StageRunner, microbatch: int, *arguments: Any, **options: Any) -> Any:
        if microbatch == 0 and pipe.schedule is not None and begun[0]:
            store.set(f"{run} {begun[0]}", "")
        return real_forward(self, microbatch, *arguments, **options)

    def weight(self: StageRunner, microbatch: int) -> None:
        weights[0] += 1
        if weights[0] % m == 0 and 1 <= begun[0] < steps:
            store.wait([f"{run} {begun[0] + 1}"])
        real_weight(self, microbatch)

    with pipeline({rank: module}, schedule, mse_loss) as pipe:
        pipe.step(*batch(0, 2, m, 0))
        if validated:
            pipe.post_validate(optimizer, 1e3)
        pipe.gather(None)
        weights[0] = 0
        with mock.patch.object(StageRunner, *(("forward", forward) if rank == 0 else ("weight", weight))):
            for step in range(1, steps + 1):
                optimizer.zero_grad()
                begun[0] = step
                losses.append(pipe.step(*batch(step, 2, m, 0)).loss)
                optimizer.step()
    return losses


# What goes wrong


def told_of(schedule: Schedule, what: str) -> list[str]:
    """What a rank is told. Where one is killed, the other leaves `with` by the error."""
    rank, m, told = dist.get_rank(), schedule.problem.microbatches, []
    module = stages(2, alone=True)[rank]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    given: Mapping[str, tuple[Any, Any]] = {"max_norm": (optimizer, -1.0), "differs": (optimizer, 1.0 + rank)}
    with suppress(OptPipeError), pipeline({rank: module}, schedule, mse_loss) as pipe:
        try:
            pipe.post_validate(*given.get(what, (optimizer, 1.0)))
            pipe.step(*batch(0, 2, m, 0))
            if what == "closure":
                optimizer.step(lambda: 0.0)
            if what != "one rank" or rank == 0:
                optimizer.step()
            if what == "killed" and rank == 1:
                os.kill(os.getpid(), 9)
            for step in range(1, 4):
                if what == "raises" and rank == 1 and step == 2:
                    raise KeyError("data")
                pipe.step(*batch(step, 2, m, 0))
                optimizer.step()
        except OptPipeError as error:
            told.append(str(error))
            if what == "killed":
                raise
    return told


def schedules() -> list[Schedule]:
    problem, texts = cases.problem([0, 1], 4), {"1f1b": ONE_F_ONE_B, "split": SPLIT, "away": OFFLOADED, "c": RECOMPUTED}
    return [replace(Schedule.parse(problem, programs), method=name) for name, programs in texts.items()]


def both(pool: Ranks, turns: list[Turn], habits: Habits) -> tuple[list[Ran], list[Ran]]:
    """A training of each kind. Losses, rates, parameters and optimizer states are the same, to the bit."""
    waited, found = (
        pool(trained, placement=[0, 1], schedules=schedules(), turns=turns, habits=habits, validated=validated)
        for validated in (False, True)
    )
    for ours, other in zip(found, waited, strict=True):
        assert ours.rates == other.rates
        assert ours.losses == other.losses
        np.testing.assert_equal(ours.parameters, other.parameters)
        np.testing.assert_equal(ours.state, other.state)
    return waited, found


def clipped(norms: list[float], max_norm: float | None) -> int:
    return sum(not norm <= (max_norm or float("inf")) or norm == float("inf") for norm in norms)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_is_the_same_to_the_bit(ranks: Ranks, optimizer: str) -> None:
    """With updates that are clipped, that are not, and two that overflow on one rank; by a scheduler of rates."""
    turns = [*(Turn(overflow={3: 0, 7: 1}.get(step)) for step in range(12)), Turn(updates=0)]
    waited, found = both(ranks, turns, Habits(optimizer, 0.56, calm=2))
    number = clipped(waited[0].norms, 0.56)
    assert 3 < number < 12
    lines = [line for line in found[0].logged if line.startswith("update ")]
    assert sum("the norm of all gradients is inf, so it is " in line for line in lines) == 2
    taken_back = sum("taken back" in line for line in lines)
    assert 0 < taken_back < number, "some updates were ahead of their norm, others waited"
    assert [ran.runs for ran in found] == [waited[0].runs + taken_back] * 2


@pytest.mark.parametrize("habits", [Habits(max_norm=None, calm=1), Habits(max_norm=0.56, to_none=False)])
def test_without_clipping_and_with_gradients_that_are_set_to_zero(ranks: Ranks, habits: Habits) -> None:
    turns = [Turn(overflow={3: 0, 7: 1}.get(step), updates=int(step % 4 != 1)) for step in range(10)]
    waited, found = both(ranks, turns, habits)
    taken_back = sum("taken back" in line for line in found[0].logged)
    assert taken_back == 2 if habits.calm else taken_back > 2, "the first update after a calm time is ahead again"
    assert clipped(waited[0].norms, habits.max_norm)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_whatever_happens_between_steps(ranks: Ranks, seed: int) -> None:
    """Swaps, evaluations, batches of other shapes, ranks that run out of memory, that read their state alone, or that
    update twice: before, in and after steps that are run again."""
    chance = random.Random(seed)
    turns, sequences = [], 2
    for _ in range(24):
        sequences = chance.choice([sequences] * 4 + [1, 3])
        load = chance.choice([None] * 4 + [1, 2, 3])
        turns.append(
            Turn(
                sequences,
                load,
                memory=None if load is None else chance.choice([None, 0, 1]),
                evaluate=chance.random() < 0.2,
                reads=chance.choice([None, None, 0, 1]),
                overflow=chance.choice([None] * 6 + [0, 1]),
                updates=chance.choice([0, 1, 1, 1, 1, 2]),
            )
        )
    waited, found = both(ranks, turns, Habits("momentum", 0.6, calm=0))
    assert found[0].methods == waited[0].methods
    assert any("ran out of memory" in line for line in found[0].logged)
    assert 4 < clipped(waited[0].norms, 0.6) < len(waited[0].norms), waited[0].norms


@pytest.mark.parametrize("how", ["ddp", "fsdp", "inner"])
def test_with_replicas_and_with_inner_peers(four_ranks: Ranks, how: str) -> None:
    """Inner peers meet before each step, so none runs again."""
    turns = [
        Turn(overflow={3: 0, 7: 1}.get(step), load={5: 1, 8: 2}.get(step), evaluate=step == 6) for step in range(12)
    ]
    waited, found = both(four_ranks, turns, Habits("adamw", 0.06, how=how))
    assert 3 < clipped(waited[0].norms, 0.06) < 12
    if how != "inner":
        assert found[0].runs > waited[0].runs
        return
    told = [any("taken back" in line for line in ran.logged) for ran in found]
    assert told == [True, False, False, False], "of all ranks one tells"
    assert [ran.runs for ran in found] == [ran.runs for ran in waited]


@pytest.mark.parametrize("validated", [False, True])
def test_a_rank_begins_a_step_although_another_has_not_ended_the_one_before(ranks: Ranks, validated: bool) -> None:
    """Rank 1 does not end its step until rank 0 has begun the next: would rank 0 wait, this never ended."""
    programs = [
        ["0F0", "0F1", "0F2", "0B0", "0W0", "0B1", "0W1", "0B2", "0W2"],
        ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1W0", "1W1", "1W2"],
    ]
    schedule = Schedule.parse(cases.problem([0, 1], 3), programs)
    first, second = ranks(ahead, schedule=schedule, steps=4, validated=validated)
    assert first == [None] * 4
    assert len(set(second)) == 4


def test_what_goes_wrong_is_told_on_all_ranks(ranks: Ranks) -> None:
    (schedule, *_) = schedules()

    def told(what: str) -> list[list[str]]:
        return ranks(told_of, schedule=schedule, what=what)

    assert told("max_norm") == [["max_norm = -1.0: must be more than 0, or None to clip nothing"]] * 2
    assert told("differs") == [["max_norm is 1.0 on rank 0 and 2.0 on rank 1: it must be the same on every rank"]] * 2
    (closure,), _ = told("closure")
    assert closure.startswith("post_validate: optimizer.step was given a closure or a scale")
    both = ranks.to_the_end(told_of, schedule=schedule, what="one rank")
    assert any("has called" in why and "and another rank something else" in why for (why,) in both)
    ((lost,),) = ranks.survivors(told_of, dying=1, schedule=schedule, what="raises")
    assert "KeyError: 'data'" in ranks.why
    assert "rank 0 lost its connection" in lost


def test_a_rank_that_is_killed_with_an_update_ahead_is_told(ranks: Ranks) -> None:
    ((told,),) = ranks.survivors(told_of, dying=1, schedule=schedules()[0], what="killed")
    assert "rank 0 lost its connection" in told


# All in one training, also offloads, recomputes, other numbers of micro-batches, replicas with schedules of their own,
# windows of gradients: its numbers are those of a training by one schedule

SEQUENCES, SWAPS, LEAST_STEPS = 8, 3, 9


class RanTogether(NamedTuple):
    """On one rank, by step; parameters at the end. `windows`: in how many steps gradients were reduced in windows."""

    losses: list[float | None]
    methods: list[str]
    norms: list[float]
    parameters: Gradients
    windows: int
    logged: list[str]


def train_together(schedules: Sequence[Schedule], how: str, max_norm: float, steps: int | None = None) -> RanTogether:
    """Two ranks, and two replicas or inner peers of each. With so many `steps` by the first schedule, and updates that
    wait for their norm. Without, until each replica has swapped several times: each is offered schedules by chance, and
    updates are ahead of their norm. In both, batches change their shape, on one replica only, and one update is not
    finite."""
    attacked, placement = steps is None, [stage.device for stage in schedules[0].problem.stages]
    (group, replica, number, _), inner, modules = placed(placement, "fsdp" if how == "windows" else how)
    optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=0.1)
    chance, ran, m = random.Random(replica), RanTogether([], [], [], {}, 0, []), schedules[0].problem.microbatches
    whole = 1 if attacked and how == "windows" else None
    with (
        calm(0),
        heard() as logged,
        Pipeline(modules, placement, mse_loss, m, group=group, inner=inner, whole_gradients=whole) as pipe,
    ):
        pipe.load(schedules[0])
        if attacked:
            pipe.post_validate(optimizer, max_norm)
        while len(ran.methods) < (LEAST_STEPS if steps is None else steps) or (attacked and not _swapped(pipe)):
            step = len(ran.methods)
            assert step < WAIT
            if attacked and number == 0 and not pipe.preparing:
                pipe.offer(chance.choice(schedules))
            more = 2 if replica == 0 and step % 7 in (4, 5) else 1
            ran.losses.append(pipe.step(*batch(step, more, SEQUENCES, replica)).loss)
            ran.methods.append(pipe.schedule.method)
            ran = ran._replace(windows=ran.windows + pipe.runner.rank.reductions.in_windows)
            if step == 6 and number == 1:
                next(p for module in modules.values() for p in module.parameters()).grad.mul_(math.nan)  # type: ignore[union-attr]
            if attacked:
                optimizer.step()
            else:
                ran.norms.append(clipping(pipe, optimizer, max_norm))
            optimizer.zero_grad()
        pipe.synchronize()
        return ran._replace(parameters=parameters(modules), logged=list(logged))


def _swapped(pipe: Pipeline) -> bool:
    least = torch.tensor(pipe.version)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.item() > SWAPS


PLACEMENT = [0, 1] * 3
AROUND = [("", ""), ("OD", "R"), ("", "C")]  # what follows an F and precedes its backward


def mixed(schedule: Schedule) -> list[list[str]]:
    programs = []
    for program in schedule.programs:
        texts: list[str] = []
        for op in program.ops():
            after, before = AROUND[(op.stage + op.microbatch) % 3] if op.kind.name in ("F", "B", "BW") else ("", "")
            own = [*before, op.kind.name] if op.kind.name != "F" else ["F", *after]
            texts += [f"{op.stage}{kind}{op.microbatch}" for kind in own]
        programs.append(texts)
    return programs


def schedules_of_chronos() -> list[Schedule]:
    made = []
    for m, method in ((4, "chronos-zero2:group=2"), (4, "chronos"), (8, "chronos"), (2, "chronos")):
        problem = cases.problem(PLACEMENT, m)
        found = generate(method, problem)
        made += [
            replace(found, method=f"{method} {m}"),
            replace(Schedule.parse(problem, mixed(found)), method=f"{method} {m}, mixed"),
        ]
    return made


@pytest.mark.parametrize(
    "how", ["windows", *(pytest.param(how, marks=pytest.mark.soak) for how in ("ddp", "fsdp", "inner"))]
)
def test_whatever_happens_together_changes_no_number(four_ranks: Ranks, how: str) -> None:
    made, max_norm = schedules_of_chronos(), 0.02
    found = four_ranks(train_together, schedules=made, how=how, max_norm=max_norm)
    steps = len(found[0].methods)
    expected = four_ranks(train_together, schedules=made, how=how, max_norm=max_norm, steps=steps)
    for ran, plain in zip(found, expected, strict=True):
        for loss, right in zip(ran.losses, plain.losses, strict=True):
            assert loss == (None if right is None else pytest.approx(right, rel=1e-5))
        require_close(ran.parameters, plain.parameters, atol=1e-6)
    assert any(norm > max_norm for norm in expected[0].norms)
    assert any("taken back" in line for line in found[0].logged)
    assert (found[0].methods == found[2].methods) == (how == "inner"), "each replica has its own offers"
    assert (found[0].windows > 0) == (how == "windows")
