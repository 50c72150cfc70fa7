"""A rank fails, or is killed: every rank has an error at once that names it, none waits, and where all live a new pipeline works."""

from __future__ import annotations

import numpy as np
import pytest
import rank_cases
import rank_failures
from rank_failures import Trouble
from rank_worker import Ranks

from optpipe.schedule import Schedule

PLACES = {2: [0, 1], 3: [0, 1, 2, 2, 1, 0], 4: [0, 1, 2, 3]}


@pytest.fixture(params=[2, 3, 4])
def crew(request: pytest.FixtureRequest) -> Ranks:
    return request.getfixturevalue({2: "ranks", 3: "three_ranks", 4: "four_ranks"}[request.param])  # type: ignore[no-any-return]


def waves(placement: list[int], microbatches: int = 4) -> Schedule:
    """All forwards, then all backwards, stage by stage: every rank has something to wait for nearly all the time."""
    programs: list[list[str]] = [[] for _ in range(max(placement) + 1)]
    for s, rank in enumerate(placement):
        programs[rank] += [f"{s}F{j}" for j in range(microbatches)]
    for s, rank in reversed(list(enumerate(placement))):
        programs[rank] += [f"{s}BW{j}" for j in range(microbatches)]
    return Schedule.parse(rank_cases.problem(placement, microbatches), programs)


@pytest.mark.parametrize(("where", "kind"), [("forward", "F"), ("backward", "BW")])
def test_all_ranks_hear_of_a_rank_that_raises(crew: Ranks, where: str, kind: str) -> None:
    placement = PLACES[crew.world]
    losses, (gradients,) = rank_cases.plain(len(placement), 4)
    for bad in (0, crew.world - 1):
        told = crew(rank_failures.in_trouble, placement=placement, schedule=waves(placement), trouble=Trouble(bad, where, 2))
        s = placement.index(bad)
        at = f"rank {bad} was at {s}{kind}1: {kind} of stage {s}, micro-batch 1"
        for rank, heard in enumerate(told):
            assert heard.error == ("ValueError: not today" if rank == bad else f"OptPipeError: {at}: ValueError: not today")
            assert heard.note == (at if rank == bad else heard.note)
            assert heard.later == f"this pipeline has failed, make a new one: {at}: ValueError: not today"
            for name, grad in heard.gradients.items():
                np.testing.assert_allclose(grad, gradients[name], rtol=1e-5, atol=1e-7)
        assert told[placement[-1]].losses == pytest.approx(losses[0])


def test_all_ranks_hear_of_a_stage_that_raises_while_it_is_learned(four_ranks: Ranks) -> None:
    told = four_ranks(rank_failures.in_trouble, placement=PLACES[4], schedule=waves(PLACES[4]), trouble=Trouble(2, "forward", -1))
    assert told.pop(2).error == "ValueError: not today"
    assert {heard.error for heard in told} == {"OptPipeError: rank 2 was learning stage 2, by its first forward: ValueError: not today"}


@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_all_others_hear_of_a_rank_that_is_killed(crew: Ranks, where: str) -> None:
    """At a message, at the boundary of a step, and those who never talk to it, too."""
    placement = PLACES[crew.world]
    for dead in (0, crew.world - 1) if where == "forward" else (crew.world - 1,):
        trouble = Trouble(dead, where, 2, kill=True)
        for heard in crew.survivors(rank_failures.in_trouble, dead, placement=placement, schedule=waves(placement), trouble=trouble):
            assert heard.error.startswith(f"OptPipeError: rank {dead} did not answer any more; rank ")
            assert heard.later.startswith(f"this pipeline has failed, make a new one: rank {dead} did not answer")


def test_all_ranks_hear_of_one_that_leaves_by_an_error_of_its_own(four_ranks: Ranks) -> None:
    told = four_ranks(rank_failures.leaving, placement=PLACES[4], schedule=waves(PLACES[4]))
    assert told.pop(1) == "KeyError: 'data'"
    assert set(told) == {"OptPipeError: rank 1: KeyError: 'data'"}


def test_a_mistake_of_one_rank_is_told_on_all(ranks: Ranks) -> None:
    missing = "memory_bytes is missing: how many bytes of activations may this rank hold?"
    first, second = ranks(rank_failures.mistaken, placement=[0, 1])
    assert first == ["rank 1: stages has [] on rank 1: placement puts [1] there", f"rank 1: {missing}", "2"]
    assert second == ["stages has [] on rank 1: placement puts [1] there", missing, "2"]
