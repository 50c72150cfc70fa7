"""After a swap: back from a schedule that is slower or runs out of memory, and on with another number of micro-batches.
A hundred and twenty random certified schedules are swapped step by step, in `make soak` two hundred: the training
equals a plain run."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.close import joined, require_close
from support.problems.strategies import arranged
from support.ranks import cases, swaps
from support.ranks.programs import OFFLOADED, ONE_F_ONE_B, SPLIT
from support.ranks.worker import Ranks
from torch.nn.functional import mse_loss

from optpipe.model.ops import Op
from optpipe.schedule import Schedule, certify, check
from optpipe_runtime.memory.host_memory import PAGE
from optpipe_runtime.swap.step_times import StepTimes

PLACEMENTS = {2: [0, 1, 1, 0], 3: [0, 1, 2, 2, 1, 0], 4: [0, 1, 2, 3]}
PEERS = {2: [1, 0], 3: [2, None, 0], 4: [3, 2, 1, 0]}
# Ops of `StageRunner`, and their kinds.
NAMES = ("forward", "backward", "weight", "offload", "drop", "reload", "recompute")
OPS = dict(zip(NAMES, ("F", "B BW", "W", "O", "D", "R L", "C"), strict=True))


def schedules(texts: dict[str, list[list[str]]]) -> dict[str, Schedule]:
    problem = cases.problem([0, 1], 4)
    return {name: replace(Schedule.parse(problem, programs), method=name) for name, programs in texts.items()}


# Out of memory


@pytest.mark.parametrize(
    "pool", ["ranks", pytest.param("three_ranks", marks=pytest.mark.soak), "four_ranks"], indirect=True
)
def test_a_step_that_runs_out_of_memory_is_undone_and_repeated_by_the_schedule_before(pool: Ranks) -> None:
    """Wherever it does: gradients, running means, random numbers and losses are as if it had never been tried."""
    count = pool.world
    placement, chance = PLACEMENTS[count], random.Random(count)
    problem = cases.problem(placement, 4, PEERS[count], offload_parts=2)
    if count < 4:  # ranks 0 and 1 share a host link
        problem = problem.replace(
            devices=[d.model_copy(update={"link": "a" if k < 2 else None}) for k, d in enumerate(problem.devices)]
        )
    first = replace(arranged(problem, chance.choice), method="first")
    troubles, places = [], []
    for op, kinds in OPS.items():
        calls: list[tuple[int, Op]] = []
        while not calls:
            bad = replace(arranged(problem, chance.choice), method=op)
            each = ((rank, o) for rank, program in enumerate(bad.programs) for o in program.ops())
            calls = [(rank, o) for rank, o in each if o.kind.name in kinds.split()]
        rank, where = chance.choice(calls)
        nth = [o for owner, o in calls if owner == rank].index(where) + 1
        troubles.append(swaps.Trouble(bad, rank, op, nth))
        places.append(where)
    by_rank = pool(swaps.undone, placement=placement, first=first, troubles=troubles)
    for k, (trouble, where, *outcomes) in enumerate(zip(troubles, places, *by_rank, strict=True)):
        for outcome in outcomes:
            assert (outcome.method, outcome.version) == ("first", 2 * k + 3)
            assert outcome.found.losses == outcome.expected.losses
            np.testing.assert_equal(outcome.found.gradients, outcome.expected.gradients, err_msg=trouble.op)
        line = outcomes[0].logged[-1]
        why = f"which ran out of memory: rank {trouble.rank} was at {where}: "
        assert line.startswith(
            f"step {k + 2}: schedule first (predicted {first.makespan_ms:.1f} ms) replaces {trouble.op}, {why}"
        )
        assert line.endswith("OutOfMemoryError: too much")


def nothing_to_go_back_to(placement: Sequence[int], first: Schedule, second: Schedule) -> tuple[str, bool, list[float]]:
    """The first schedule of all runs out of memory: the step is undone, and another one can be loaded."""
    modules = swaps.own_stages(placement)
    with cases.pipeline(modules, first, mse_loss) as pipe:
        nth = 4 if pipe.number == 1 else 0  # two are of learning
        with swaps.failing("forward", nth, torch.OutOfMemoryError("too much")):
            (complaint,) = cases.refusals(lambda: pipe.step(*swaps.batch(0)))
        untouched = all(parameter.grad is None for module in modules.values() for parameter in module.parameters())
        pipe.load(second)
        return complaint, untouched, pipe.step(*swaps.batch(0)).losses or []


def test_without_an_earlier_schedule_the_step_is_undone_and_an_error_says_so(ranks: Ranks) -> None:
    made = schedules({"first": ONE_F_ONE_B, "second": SPLIT})
    told = ranks(nothing_to_go_back_to, placement=[0, 1], first=made["first"], second=made["second"])
    expected = (
        "rank 1 was at 1F1: F of stage 1, micro-batch 1: OutOfMemoryError: too much; the step is undone, and there is "
        "no schedule to go back to: load one that needs less memory"
    )
    assert [(complaint, untouched) for complaint, untouched, _ in told] == [(expected, True)] * 2
    assert told[1][2] == swaps.plain(2, 1, 4)[0].losses


# Slower


def test_all_ranks_go_back_from_a_schedule_that_is_measured_to_be_slower(ranks: Ranks) -> None:
    made = schedules({"quick": ONE_F_ONE_B, "slow": OFFLOADED, "better": SPLIT})
    ms = {"quick": 10.0, "slow": 11.0, "better": 9.0}
    (ran, logged), (ran1, _) = ranks(swaps.paced, placement=[0, 1], schedules=made, ms=ms)
    assert ran == ran1
    first, back = ran.index("slow"), ran.index("quick", ran.index("slow"))
    assert back - first in (7, 12), "five or ten measured steps, the first, and one that sends the last one's time"
    better = ran.index("better")
    assert better == len(ran) - ran[::-1].index("quick"), "the slow one is not taken again"
    assert ran[better:] == ["better"] * (len(ran) - better - 24) + ["slow"] * 24, "what is loaded is meant"
    replaced = [line for line in logged if " replaces " in line]
    assert [line.split(": ", 1)[1].split(", which")[0] for line in replaced] == [
        f"schedule {new} (predicted {made[new].makespan_ms:.1f} ms) replaces {old}"
        for new, old in (("slow", "quick"), ("quick", "slow"), ("better", "quick"), ("slow", "better"))
    ]
    assert replaced[1].startswith(f"step {back + 1}: ")
    assert "which takes 11.0 ms a step, measured, and this one 10.0 ms" in replaced[1]
    assert any("slow has run here before" in line for line in logged)


def paced(before: list[float], after: list[float]) -> int | None:
    """After how many steps of the new schedule the old one is taken again."""
    old, new, pace = object(), object(), StepTimes()
    pace.swapped(old, comparable=False)  # type: ignore[arg-type]
    for ms in before:
        assert pace.add(ms) is None
    pace.swapped(new, comparable=True)  # type: ignore[arg-type]
    for k, ms in enumerate(after, 1):
        if found := pace.add(ms):
            assert found[1].plan is old
            return k
    return None


NOISE: Any = np.random.default_rng(1)


@pytest.mark.parametrize(
    ("before", "after", "back"),
    [
        ([99.0] + [10.0] * 9, [99.0] + [11.0] * 5, 6),
        ([99.0] + [10.0] * 9, [99.0] + [10.1] * 30, None),  # less than two per cent
        ([99.0] + [10.0] * 9, [99.0, 10.0, 80.0, 10.0, 80.0, 10.0], None),  # outliers
        ([99.0, 10.0, 80.0, 10.0, 80.0, 10.0], [99.0] + [11.0] * 5, 6),
        ([99.0] + [10.0] * 4, [99.0] + [20.0] * 30, None),  # nothing to compare with
        ([99.0, 8.0, 9.0, 10.0, 11.0, 12.0], [99.0, 8.4, 9.4, 10.4, 11.4, 12.4], None),  # noise
        ([99.0] + [8.0, 9.0, 10.0, 11.0, 12.0] * 4, [99.0] + [11.4, 12.4, 13.4, 14.4, 15.4] * 4, 6),
    ],
)
def test_slower_by_more_than_noise(before: list[float], after: list[float], back: int | None) -> None:
    assert paced(before, after) == back


def test_the_same_schedule_under_noise_is_seldom_left() -> None:
    wrong = sum(paced([*NOISE.normal(10, 1, 21)], [*NOISE.normal(10, 1, 21)]) is not None for _ in range(400))
    assert wrong < 0.05 * 400


# Other numbers of micro-batches


def test_a_schedule_for_another_number_of_microbatches(ranks: Ranks) -> None:
    made = [_in_turn(m) for m in (4, 2, 12, 6)]
    unfit = _in_turn(5)
    (first, last) = ranks(swaps.recut, placement=[0, 1], schedules=made, unfit=unfit)
    plain = {str(m): swaps.plain(2, 1, m)[0] for m in (4, 2, 12, 6)}
    assert [step.method for step in first.steps[:4]] == ["4", "2", "12", "6"]
    for run in (first, last):
        assert run.counts == [int(step.method) for step in run.steps]
        methods = [step.method for step in run.steps]
        assert [m for k, m in enumerate(methods) if k < 4 or m != methods[k - 1]] == ["4", "2", "12", "6"] * 2
    for own, theirs in zip(first.steps, last.steps, strict=True):
        expected = plain[own.method]
        assert theirs.losses == expected.losses
        require_close(own.gradients | theirs.gradients, expected.gradients, rtol=1e-10, atol=1e-14)
    refusals = [line for line in first.logged if "offered and refused" in line]
    assert len(refusals) == 1
    assert refusals[0].endswith("its first dimension must be a multiple of the 5 micro-batches")


def too_little_on_the_host(
    placement: Sequence[int], first: Schedule, second: Schedule, pages: int
) -> tuple[str, list[float], list[str]]:
    """The second has another number of micro-batches, so what its offloads take is known only in its first step."""
    modules, limit = swaps.own_stages(placement), pages * PAGE["cpu"]
    with cases.pipeline(modules, first, mse_loss, host_memory_bytes=limit) as pipe, swaps.heard() as logged:
        pipe.step(*swaps.batch(0))
        pipe.load(second)
        report = pipe.step(*swaps.batch(0))
        return pipe.schedule.method, report.losses or [], list(logged)


def test_with_too_little_host_memory_the_earlier_schedule_runs_on(ranks: Ranks) -> None:
    few, many = _in_turn(2), _in_turn(12)
    _, (method, losses, _) = told = ranks(too_little_on_the_host, placement=[0, 1], first=few, second=many, pages=2)
    assert method == "2"
    assert losses == swaps.plain(2, 1, 2)[0].losses
    assert any("replaces 12, which ran out of memory: rank 0: host_memory_bytes = " in line for line in told[0][2])


@pytest.mark.parametrize("error", ["", "no host memory"])
def test_host_memory_for_an_offer_is_allocated_beside_the_training(ranks: Ranks, error: str) -> None:
    """And where it cannot be had the offer is refused like any other."""
    problem = cases.problem([0, 1], 4)
    first, away = Schedule.parse(problem, ONE_F_ONE_B), Schedule.parse(problem, OFFLOADED)
    results = ranks(swaps.offered_beside, first=first, away=away, error=error)
    assert results[0][0] == results[1][0], "every rank swaps at the same step"
    for rank, (versions, logged, in_steps) in enumerate(results):
        assert versions[:4] == [1] * 4, "no step waits"
        assert versions[-1] == (1 if error else 2)
        assert in_steps == [False]
        refused = "a schedule was offered and refused, training goes on with the one it has: no host memory"
        assert (refused in logged) == (bool(error) and rank == 1)


def _in_turn(microbatches: int) -> Schedule:
    texts = []
    for s in (0, 1):
        away = [f"{s}{op}{j}" for j in range(0, microbatches, 2) for op in ("O", "D")]
        back = [op for j in range(microbatches) for op in ([f"{s}R{j}"] if j % 2 == 0 else []) + [f"{s}BW{j}"]]
        texts.append([f"{s}F{j}" for j in range(microbatches)] + away + back)
    return replace(Schedule.parse(cases.problem([0, 1], microbatches), texts), method=str(microbatches))


# Random schedules

EACH, MICROBATCHES = 20, 4
CASES = {  # the ranks, the rank of each stage, to whom each rank evicts
    "linear": ("ranks", [0, 1], [1, 0]),
    "looped": ("ranks", [0, 1, 0, 1], []),
    "V": ("ranks", [0, 1, 1, 0], []),
    "irregular": ("ranks", [0, 0, 1, 0], []),
    "linear on 3": ("three_ranks", [0, 1, 2], [2, None, 0]),
    "V on 3": ("three_ranks", [0, 1, 2, 2, 1, 0], []),
    "irregular on 3": ("three_ranks", [1, 0, 2, 1], []),
    "linear on 4": ("four_ranks", [0, 1, 2, 3], [3, 2, 1, 0]),
    "looped on 4": ("four_ranks", [0, 1, 2, 3, 0, 1, 2, 3], []),
    "V on 4": ("four_ranks", [0, 1, 2, 3, 3, 2, 1, 0], []),
}


MORE = ("linear", "looped", "irregular on 3", "V on 4")  # of what the others have on another number of ranks


@pytest.mark.parametrize(
    ("pool", "case"),
    [pytest.param(CASES[case][0], case, marks=[pytest.mark.soak] if case in MORE else []) for case in CASES],
    indirect=["pool"],
)
def test_random_schedules_swapped_step_by_step(pool: Ranks, case: str) -> None:
    _, placement, peers = CASES[case]
    problem = cases.problem(placement, MICROBATCHES, peers, offload_parts=2)
    pick = random.Random(case).choice
    schedules = [replace(arranged(problem, pick), method=str(k)) for k in range(EACH)]
    for schedule in schedules:
        assert not check(problem, schedule)
        certify(problem, schedule)
    _require_everything(schedules, evicting=any(peer is not None for peer in peers))
    by_rank = pool(swaps.chaos, placement=placement, schedules=schedules)
    assert [step.method for step in by_rank[0][: EACH // 2]] == [str(k) for k in range(EACH // 2)]
    assert {step.method for step in by_rank[0]} == {str(k) for k in range(EACH)}
    expected = swaps.plain(len(placement), len(by_rank[0]), MICROBATCHES)
    for plain, *found in zip(expected, *by_rank, strict=True):
        assert len({step.method for step in found}) == 1, "all ranks run the same schedule"
        np.testing.assert_allclose(found[placement[-1]].losses, plain.losses, rtol=1e-9)
        require_close(joined(step.gradients for step in found), plain.gradients, rtol=1e-7, atol=1e-12)


def _require_everything(schedules: list[Schedule], evicting: bool) -> None:
    kinds = Counter(op.kind.name for schedule in schedules for program in schedule.programs for op in program.ops())
    assert all(kinds[kind] >= EACH for kind in ("F", "B", "W", "BW", "O", "D", "R", "C", *("AELV" if evicting else "")))
