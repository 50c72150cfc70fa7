"""A rank fails or is killed: every rank raises an error that names it, and none waits. If all live, a new pipeline
works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import cases, failures
from support.ranks.failures import Trouble
from support.ranks.worker import STARTER, Ranks

from optpipe.schedule import Schedule

PLACES = {2: [0, 1], 3: [0, 1, 2, 2, 1, 0], 4: [0, 1, 2, 3]}


@pytest.fixture(params=["ranks", "three_ranks", "four_ranks"])
def pool(request: pytest.FixtureRequest) -> Ranks:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def waves(placement: list[int], microbatches: int = 4) -> Schedule:
    """All forwards, then all backwards, stage by stage: every rank has something to wait for nearly all the time."""
    programs: list[list[str]] = [[] for _ in range(max(placement) + 1)]
    for s, rank in enumerate(placement):
        programs[rank] += [f"{s}F{j}" for j in range(microbatches)]
    for s, rank in reversed(list(enumerate(placement))):
        programs[rank] += [f"{s}BW{j}" for j in range(microbatches)]
    return Schedule.parse(cases.problem(placement, microbatches), programs)


@pytest.mark.parametrize(("where", "kind"), [("forward", "F"), ("backward", "BW")])
def test_all_ranks_report_a_rank_that_raises(pool: Ranks, where: str, kind: str) -> None:
    placement = PLACES[pool.world]
    losses, (gradients,) = cases.plain(len(placement), 4)
    for bad in (0, pool.world - 1):
        told = pool(failures.in_trouble, placement=placement, schedule=waves(placement), trouble=Trouble(bad, where, 2))
        s = placement.index(bad)
        at = f"rank {bad} was at {s}{kind}1: {kind} of stage {s}, micro-batch 1"
        for rank, heard in enumerate(told):
            assert heard.error == (
                "ValueError: not today" if rank == bad else f"OptPipeError: {at}: ValueError: not today"
            )
            assert heard.note == (at if rank == bad else heard.note)
            assert heard.later == f"this pipeline has failed, make a new one: {at}: ValueError: not today"
            for name, grad in heard.gradients.items():
                np.testing.assert_allclose(grad, gradients[name], rtol=1e-5, atol=1e-7)
        assert told[placement[-1]].losses == pytest.approx(losses[0])


def test_all_ranks_report_a_stage_that_raises_while_it_is_learned(four_ranks: Ranks) -> None:
    told = four_ranks(
        failures.in_trouble, placement=PLACES[4], schedule=waves(PLACES[4]), trouble=Trouble(2, "forward", -2)
    )
    assert told.pop(2).error == "ValueError: not today"
    assert {heard.error for heard in told} == {
        "OptPipeError: rank 2 was learning stage 2, by its first forward: ValueError: not today"
    }


@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_all_other_ranks_report_a_rank_that_is_killed(pool: Ranks, where: str) -> None:
    """At a message, at the boundary of a step, and those who never talk to it, too."""
    placement = PLACES[pool.world]
    for dead in (0, pool.world - 1) if where == "forward" else (pool.world - 1,):
        trouble = Trouble(dead, where, 2, kill=True)
        for heard in pool.survivors(
            failures.in_trouble, dead, placement=placement, schedule=waves(placement), trouble=trouble
        ):
            assert heard.error.startswith(f"OptPipeError: rank {dead} did not answer any more; rank ")
            assert heard.later.startswith(f"this pipeline has failed, make a new one: rank {dead} did not answer")


def test_a_rank_that_is_interrupted_does_not_wait_until_others_begin_their_step(ranks: Ranks) -> None:
    """Although its vote is under way."""
    told = ranks(failures.interrupted, placement=[0, 1], schedule=waves([0, 1]))
    at = "rank 0 was at 0F0: F of stage 0, micro-batch 0"
    assert told == ["KeyboardInterrupt: enough", f"OptPipeError: {at}: KeyboardInterrupt: enough"]


def test_all_ranks_report_a_rank_that_leaves_with_an_error(four_ranks: Ranks) -> None:
    told = four_ranks(failures.leaving, placement=PLACES[4], schedule=waves(PLACES[4]))
    assert told.pop(1) == "KeyError: 'data'"
    assert set(told) == {"OptPipeError: rank 1: KeyError: 'data'"}


@pytest.mark.parametrize(
    ("different", "sentence"),
    [
        ({"placement": [1, 1]}, "placement is (0, 1) on rank 0 and (1, 1) on rank 1"),
        ({"microbatches": 4}, "microbatches is 2 on rank 0 and 4 on rank 1"),
        ({"routes": [[1, 0]]}, "routes is ((0, 1),) on rank 0 and ((1, 0),) on rank 1"),
        ({"peers": [1, 0]}, "peers is () on rank 0 and (1, 0) on rank 1"),
        ({"links": ["a", "a"]}, "links is () on rank 0 and ('a', 'a') on rank 1"),
        ({"full_duplex": True}, "full_duplex is False on rank 0 and True on rank 1"),
        ({"repeats": 2}, "repeats is 1 on rank 0 and 2 on rank 1"),
        ({"group": "not a member"}, "group: rank 1 is no member of it; every rank gives the group of its own pipeline"),
        ({"group": "a mesh"}, "group: rank 1 gave a DeviceMesh: must be a torch.distributed.ProcessGroup, such as "),
        ({"stages": {}}, "stages has [] on rank 1: placement puts [1] there"),
        ({"host_memory_bytes": -5}, "host_memory_bytes = -5: must be an integer, at least 0"),
        ({"placement": 2}, "placement = 2: must be a sequence that names the rank of each stage"),
        ({"loss_fn": "mse"}, "loss_fn = 'mse': must be a function of the last stage's output and the targets"),
        ({"host_optimizers": {1: 5}}, "TypeError: 'int' object is not callable"),
        ({"activation_budget_bytes": None}, "activation_budget_bytes is missing: how many bytes of activations may "),
    ],
)
def test_a_wrong_argument_of_one_rank_is_reported_on_all(
    ranks: Ranks, different: dict[str, Any], sentence: str
) -> None:
    if {"repeats", "activation_budget_bytes"} & different.keys():
        told = []
        for (refusal,), gathered in ranks(failures.profiled_apart, placement=[0, 1], different=different):
            assert gathered == 2, "the pipeline can be used"
            told.append(refusal)
    else:
        told = ranks(failures.apart, placement=[0, 1], different=different)
    assert told[0].removeprefix("rank 1: ").startswith(sentence)
    assert told[1].startswith(sentence.removeprefix("TypeError: "))


@pytest.mark.parametrize(
    ("shut_down", "sentence"),
    [
        (True, "torch.distributed has been shut down (destroy_process_group) before this pipeline: call close before"),
        (False, "step was called after close: this pipeline has ended, make a new one"),
    ],
)
def test_no_step_runs_after_the_end(tmp_path: Path, shut_down: bool, sentence: str) -> None:
    own = Ranks(STARTER, 2, tmp_path)
    for (told,) in own(failures.ended, placement=[0, 1], schedule=waves([0, 1]), shut_down=shut_down):
        assert told.startswith(sentence)
    own.close()
