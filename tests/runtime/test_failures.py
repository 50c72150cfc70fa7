"""A rank that fails says where: rank, op, stage and micro-batch; and no other waits for it longer than the user's
timeout."""

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.ranks import failures
from support.ranks.cases import all_forwards_first, batch, loss_fn, own_stages, problem
from support.ranks.failures import Told, Trouble
from support.ranks.worker import STARTER, Ranks
from torch import Tensor

from optpipe.errors import OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.memory.host_memory import OnHost
from optpipe_runtime.ranks.team import MOST_BLOCKS, nccl_options

LOST = re.compile(r".*rank \d lost its connection to (rank \d|another rank): ")
FAILED = "this pipeline has failed, make a new one: "
TIMEOUT_S = 8.0  # that a user gave to init_process_group
PLACES = {2: [0, 1], 3: [0, 1, 2, 2, 1, 0], 4: [0, 1, 2, 3]}


ON_RANKS = pytest.mark.parametrize("pool", ["ranks", "three_ranks", "four_ranks"], indirect=True)


@ON_RANKS
@pytest.mark.parametrize(("where", "kind"), [("forward", "F"), ("backward", "BW")])
def test_a_rank_that_raises_says_where_and_no_other_waits(pool: Ranks, where: str, kind: str) -> None:
    placement = PLACES[pool.world]
    for bad in (0, pool.world - 1):
        trouble = Trouble(bad, where, 2)
        how = {"placement": placement, "schedule": all_forwards_first(placement, 4), "trouble": trouble}
        others = pool.survivors(failures.in_trouble, bad, **how)
        s = placement.index(bad)
        at = f"rank {bad} was at {s}{kind}1: {kind} of stage {s}, micro-batch 1"
        assert pool.why.endswith(f"ValueError: not today\n{at}\n")
        require_lost(others)


def require_lost(others: list[Told]) -> None:
    for heard in others:
        assert LOST.match(heard.error), heard
        assert heard.later == f"this pipeline has failed, make a new one: {heard.error}"


def test_a_stage_that_raises_while_it_is_learned_says_so(four_ranks: Ranks) -> None:
    trouble = Trouble(2, "forward", -2)
    others = four_ranks.survivors(
        failures.in_trouble, 2, placement=PLACES[4], schedule=all_forwards_first(PLACES[4], 4), trouble=trouble
    )
    assert "ValueError: not today\nrank 2 was learning stage 2, by its first forward\n" in four_ranks.why
    assert all(LOST.match(heard.error) for heard in others)


@ON_RANKS
@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_no_other_rank_waits_for_one_that_is_killed(pool: Ranks, where: str) -> None:
    """At a message, at the boundary of a step, and those who never talk to it, too."""
    placement = PLACES[pool.world]
    for dead in (0, pool.world - 1) if where == "forward" else (pool.world - 1,):
        trouble = Trouble(dead, where, 2, kill=True)
        how = {"placement": placement, "schedule": all_forwards_first(placement, 4), "trouble": trouble}
        require_lost(pool.survivors(failures.in_trouble, dead, **how))


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pool = Ranks(STARTER, 2, tmp_path_factory.mktemp("impatient"), TIMEOUT_S)
    yield pool
    pool.close()


def test_no_wait_is_longer_than_the_users_timeout(impatient: Ranks) -> None:
    """For a rank that is frozen, and for one whose process goes on after an error."""
    schedule = Schedule.parse(problem([0, 1], 2), [["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]])
    told, thawed = impatient(failures.frozen, placement=[0, 1], schedule=schedule)
    assert re.match(r".*rank 0 lost its connection to (rank 1|another rank): .*[Tt]imed out", told)
    assert LOST.match(thawed)
    told, raised = impatient(failures.going_on, placement=[0, 1], schedule=schedule)
    assert raised == ["not today", f"{FAILED}rank 1 was at 1F1: F of stage 1, micro-batch 1: ValueError: not today"]
    assert told == [told[0], FAILED + told[0]]
    assert LOST.match(told[0])


def test_all_groups_take_over_the_users_timeout(impatient: Ranks) -> None:
    assert impatient(failures.timeouts, placement=[0, 1]) == [{TIMEOUT_S}] * 2


def test_groups_on_gpus_use_few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(config=SimpleNamespace(min_ctas=None, max_ctas=None), _timeout=None)
    fake = SimpleNamespace(Options=lambda: made)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fake, raising=False)
    assert nccl_options(timedelta(seconds=9)) is made
    assert (made.config.min_ctas, made.config.max_ctas, made._timeout) == (1, MOST_BLOCKS, timedelta(seconds=9))


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
        ({"stages": []}, "stages must map the number of each stage on this rank to its torch.nn.Module"),
        ({"placement": [0, 5]}, "placement[1] = 5: there are 2 ranks, numbered from 0"),
        ({"microbatches": 4.0}, "microbatches = 4.0: must be an integer, at least 1"),
        ({"routes": [[0, 7]]}, "the pipeline: routes[0][1] = 7: there are 2 stages"),
        ({"routes": [[0]]}, "the pipeline: stages[1] is on no route"),
        ({"routes": [[0, 1], [1, 0]]}, "the pipeline: microbatch_routes is missing"),
        ({"routes": [[0, 1], [1, 0]], "microbatch_routes": [0]}, "the pipeline: microbatch_routes has 1 entries"),
        ({"links": "pcie0"}, "links = 'pcie0': must be \"auto\", or the link of each of 2 ranks"),
        ({"host_optimizers": {9: 5}}, "host_optimizers[9]: there are 2 stages, numbered from 0"),
        ({"whole_gradients": 0}, "whole_gradients = 0: must be an integer, at least 1, or None for all stages"),
        ({"recompute": ["all"]}, "recompute has 'all': it must be 'cheap', 'selective', 'full', or a func"),
        ({"recompute": "cheap"}, "recompute = 'cheap': must be a sequence"),
        ({"recompute": ["full"] * 2}, "recompute has 'full' twice: each level needs a name of its own"),
        ({"recompute": ["full"] * 9}, "recompute has 9 entries"),
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
    for (told,) in own(failures.ended, placement=[0, 1], schedule=all_forwards_first([0, 1], 4), shut_down=shut_down):
        assert told.startswith(sentence)
    own.close()


PROGRAMS = [["0F0", "0O0", "0D0", "0F1", "0R0", "0B0", "0W0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]]
COPY = "rank 0 was at 0D0: D of stage 0, micro-batch 0; what failed is 0O0: O of stage 0, micro-batch 0"
LOSS = "rank 1 was at 1F0: F of stage 1, micro-batch 0"
WAITING = "rank 0 was at 0B0: B of stage 0, micro-batch 0, waiting for the gradient of 0B0 from rank 1"


def fail(*_: object) -> Any:
    raise ValueError("not today")


def told_of(what: str) -> list[str]:
    """A copy fails on rank 0, or the loss on rank 1. What the other rank is told, and what that came from."""
    failing, found = False, list[str]()

    def take_out(self: Any, pieces: Sequence[Tensor]) -> Any:
        return [self._link.out.run(fail)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return fail() if failing else loss_fn(output, target)

    pipe = Pipeline(own_stages([0, 1]), [0, 1], loss, 2)
    pipe.load(Schedule.parse(problem([0, 1], 2), PROGRAMS))
    pipe.step(*batch(0, 2))
    failing, copies = what == "loss", what == "copy" and dist.get_rank() == 0
    try:
        with mock.patch.object(OnHost, "take_out", take_out) if copies else nullcontext():
            pipe.step(*batch(1, 2))
    except OptPipeError as error:
        found = [str(error), str(error.__cause__)]
    pipe.close()
    return found


@pytest.mark.parametrize(("what", "failing", "sentence", "other"), [("copy", 0, COPY, ""), ("loss", 1, LOSS, WAITING)])
def test_a_failure_names_what_failed(ranks: Ranks, what: str, failing: int, sentence: str, other: str) -> None:
    ((told, cause),) = ranks.survivors(told_of, failing, what=what)
    assert f"ValueError: not today\n{sentence}\n" in ranks.why
    assert told.startswith(other)
    assert f"rank {1 - failing} lost its connection to " in cause
