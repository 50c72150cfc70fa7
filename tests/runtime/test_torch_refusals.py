"""What `torch_schedule` refuses because torch's own runtime would do it wrong, or wait for ever."""

import re

import pytest
from support.ranks import cases as rank_cases
from support.ranks.torch_pipelining import IN_A_V, loads, refusal, refusal_of_one
from support.ranks.worker import Ranks

from optpipe import Schedule, whole_backwards
from optpipe_solver import heuristics
from optpipe_solver.systems import generate

SPLIT = Schedule.parse(
    rank_cases.problem([0, 0], 2), [["0F0", "1F0", "1B0", "0BW0", "1W0", "0F1", "1F1", "1BW1", "0BW1"]]
)


def test_ranks_with_different_schedules_are_refused_by_all(ranks: Ranks) -> None:
    """Whatever differs: the order, the placement, or times, by which messages are placed."""
    first, placed = (heuristics.generate("naive", rank_cases.problem(order, 3)) for order in ((0, 1), (1, 0)))
    slower = first.on(rank_cases.problem((0, 1), 3, forward_ms=2.0))
    for other in (generate("gpipe", first.problem), placed, slower):
        said = ranks(loads, first=first, second=[first, other])
        assert set(said) == {"rank 1 has another schedule or problem than rank 0: expected the same on all"}


def test_stages_of_another_rank_are_refused(ranks: Ranks) -> None:
    problem = rank_cases.problem([1, 0], 2)
    said = ranks(refusal, schedule=heuristics.generate("naive", problem), placement=(0, 1))
    assert said[0] == "stages: rank 0 has [0] of 2; the schedule places [1] of 2 there"


def test_options_that_move_messages_are_refused(ranks: Ranks) -> None:
    schedule = heuristics.generate("naive", rank_cases.problem([0, 1], 2))
    said = ranks(refusal, schedule=schedule, placement=(0, 1), scale_grads=False, max_outstanding_sends=1)
    assert set(said) == {"max_outstanding_sends = 1: leave it out: the schedule's rows place messages and waits"}


def test_micro_batches_of_different_shapes_are_refused(ranks: Ranks) -> None:
    schedule = heuristics.generate("naive", rank_cases.problem([0, 1], 2))
    said = ranks(refusal, schedule=schedule, placement=(0, 1), rows=5)
    assert said == [
        f"the {what} of micro-batch 1 have shapes [[2, 16]], those of the first [[3, 16]]: torch's pipelining needs "
        "equal ones; optpipe_runtime.Pipeline takes others, as Microbatches"
        for what in ("arguments", "targets")
    ]


@pytest.mark.parametrize(
    ("wrapper", "sentence"),
    [
        ("ddp", "is in DistributedDataParallel, with which torch's split backwards do not work: give torch_schedule"),
        ("compiled", "is compiled, with which torch's split backwards do not work: give torch_schedule"),
        ("fsdp", "is sharded by FSDP: gathered parameters would be taken for activations; export the schedule"),
    ],
)
def test_stages_whose_gradients_would_be_wrong_are_refused(wrapper: str, sentence: str, ranks: Ranks) -> None:
    """Also where only a part of a stage is wrapped."""
    schedule = generate("zb-h1", rank_cases.problem([0, 1], 4))
    said = ranks(refusal, schedule=schedule, placement=(0, 1), wrapper=wrapper)
    assert all(each.startswith(f"stage {rank} {sentence}") for rank, each in enumerate(said))


@IN_A_V
def test_split_backwards_behind_frozen_stages_are_refused(ranks: Ranks) -> None:
    """Torch would leave the weights of the second stage without gradients, in silence."""
    for said in ranks(refusal_of_one, schedule=SPLIT, changed="frozen"):
        assert said.startswith("stage 1: torch's split backwards give ")
        assert "as behind frozen stages" in said
    assert ranks(refusal_of_one, schedule=whole_backwards(SPLIT), changed="frozen") == ["", ""]


@IN_A_V
def test_weights_that_stages_of_a_rank_share_are_refused_where_torch_divides_gradients(ranks: Ranks) -> None:
    for said in ranks(refusal_of_one, schedule=SPLIT, changed="tied"):
        assert re.match(r"stages 0 and 1 share \S+, whose gradient torch divides once for each: give scale_grads", said)
    assert ranks(refusal_of_one, schedule=SPLIT, changed="tied", scale_grads=False) == ["", ""]
