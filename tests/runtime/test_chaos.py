"""A hundred and twenty random certified schedules are swapped step by step, in `make soak` two hundred, and a service
is killed: the training equals a plain run."""

import random
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.close import joined, require_close
from support.problems.strategies import arranged
from support.ranks import cases, follow, swaps
from support.ranks.worker import Ranks
from support.service import running, settings_in, use_fake_solver

from optpipe.schedule import Schedule, certify, check

EACH, MICROBATCHES = 20, 4
CASES = {  # ranks, the rank of each stage, to whom each rank evicts
    "linear": (2, [0, 1], [1, 0]),
    "looped": (2, [0, 1, 0, 1], []),
    "V": (2, [0, 1, 1, 0], []),
    "irregular": (2, [0, 0, 1, 0], []),
    "linear on 3": (3, [0, 1, 2], [2, None, 0]),
    "V on 3": (3, [0, 1, 2, 2, 1, 0], []),
    "irregular on 3": (3, [1, 0, 2, 1], []),
    "linear on 4": (4, [0, 1, 2, 3], [3, 2, 1, 0]),
    "looped on 4": (4, [0, 1, 2, 3, 0, 1, 2, 3], []),
    "V on 4": (4, [0, 1, 2, 3, 3, 2, 1, 0], []),
}


MORE = ("linear", "looped", "irregular on 3", "V on 4")  # of what the others have on another number of ranks


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.soak] if case in MORE else []) for case in CASES]
)
def test_random_schedules_swapped_step_by_step(request: pytest.FixtureRequest, case: str) -> None:
    count, placement, peers = CASES[case]
    pool: Ranks = request.getfixturevalue({2: "ranks", 3: "three_ranks", 4: "four_ranks"}[count])
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


def test_training_goes_on_when_the_service_is_killed(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake_solver(monkeypatch)
    with running(settings_in(tmp_path)) as (url, server):
        timer = threading.Timer(1.0, setattr, (server, "should_exit", True))
        timer.start()
        _, (losses, _) = ranks(follow.follow, placement=[0, 1], microbatches=MICROBATCHES, url=url, steps=60, every=20)
        timer.join()
    plain, _ = cases.plain(2, MICROBATCHES, 60)
    assert losses == [pytest.approx(sum(own) / MICROBATCHES, rel=1e-4) for own in plain]
