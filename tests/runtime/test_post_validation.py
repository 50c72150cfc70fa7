"""No rank waits between steps, and updates that are ahead of their norm come out, to the bit, as if they had waited:
the same training with gradients clipped before each update, and with updates that are ahead of their norm."""

import random
from dataclasses import replace

import numpy as np
import pytest
from support.close import require_close
from support.ranks import cases
from support.ranks.post_validation import OPTIMIZERS, Habits, Ran, Turn, ahead, told_of, train_together, trained
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, RECOMPUTED, SPLIT
from support.ranks.worker import Ranks

from optpipe.schedule import Schedule
from optpipe_solver.systems import generate


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
