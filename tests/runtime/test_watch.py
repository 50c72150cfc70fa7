"""Ranks on GPUs: whoever waits for an event hears that another rank has failed. Events are simulated; ranks, store and
threads are real."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.ranks import cases
from support.ranks.cases import batch, loss_fn, own_stages
from support.ranks.replicas import mesh
from support.ranks.worker import STARTER, Ranks

from optpipe.errors import OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.memory.clock import wait_for
from optpipe_runtime.ranks import watch
from optpipe_runtime.ranks.subgroup import LostError
from optpipe_runtime.ranks.team import MOST_BLOCKS, Team, nccl_options
from optpipe_runtime.ranks.watch import all_at_once


class Never:
    """An event that never comes."""

    def query(self) -> bool:
        return False


def waiting(bad: int, kill: bool, timeout_s: float = 600.0, inner: bool = False) -> list[str]:
    """One rank fails while the others wait for what it never sends. What this rank is told, and how its team ended.
    `inner`: two pipelines of inner peers."""
    watch.LOOK_S, told, rank = 0.05, [], dist.get_rank()
    team = Team(mesh()["pipe"].get_group(), mesh()["replica"]) if inner else Team()
    everyone = team.whole()
    team._timeout = timedelta(seconds=timeout_s)
    team.watch()
    everyone.gather_objects(None)
    try:
        with team.collective(), team.local():
            if not kill:
                dist.barrier()  # who comes when one has failed is told that a new pipeline is needed
            if rank == bad:
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OptPipeError("not today")
            wait_for(Never(), team.require_alive)
    except OptPipeError as error:
        told.append(str(error))
    told.append(str(team.failure))
    team.end()
    return told


def ending() -> str | None:
    """One rank ends its team; the other watches it for longer than the timeout. What its team has failed by."""
    watch.LOOK_S, team = 0.05, Team()
    everyone = team.subgroup(range(team.size), torch.device("cpu"))
    team._timeout = timedelta(seconds=2)
    team.watch()
    if team.number == 0:
        team._watch._stopped.wait(2 * team._timeout.total_seconds())
    else:
        team.end()
    everyone.gather_objects(None)
    if team.number == 0:
        team.end()
    return team.failure


def frozen(placement: Sequence[int], schedule: Schedule) -> str:
    """The last rank is stopped within a step. The others wake it when they have heard."""
    rank, m = dist.get_rank(), schedule.problem.microbatches
    with Pipeline(own_stages(placement), placement, loss_fn, m) as pipe:
        pids = pipe.gather(os.getpid())
        pipe.load(schedule)
        pipe.step(*batch(0, m))
        try:
            if rank == len(pids) - 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            pipe.step(*batch(0, m))
        except OptPipeError as error:
            os.kill(pids[-1], signal.SIGCONT)
            return str(error)
    return ""


def timeouts(placement: Sequence[int]) -> set[float]:
    """Of all groups that a pipeline makes, in seconds. Its own has torch's default."""
    with Pipeline(own_stages(placement), placement, loss_fn, 2, group=dist.new_group()) as pipe:
        groups = [subgroup._open() for subgroup in pipe.runner.rank.team._subgroups]
        return {g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups}


TIMEOUT_S = 8.0  # that a user gave to init_process_group


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pool = Ranks(STARTER, 2, tmp_path_factory.mktemp("impatient"), TIMEOUT_S)
    yield pool
    pool.close()


def test_ranks_that_wait_for_an_event_hear_of_another_ranks_failure(ranks: Ranks) -> None:
    why = "rank 1: not today"
    assert ranks(waiting, bad=1, kill=False) == [[why, why], ["not today", why]]


def test_ranks_that_wait_for_an_event_hear_of_a_rank_that_is_killed(ranks: Ranks) -> None:
    why = "rank 1 did not answer any more; rank 0 has waited 2 s"
    assert ranks.survivors(waiting, 1, bad=1, kill=True, timeout_s=2.0) == [[why, why]]


def test_inner_peers_watch_over_each_other(four_ranks: Ranks) -> None:
    why = "rank 1 (inner peer 0) did not answer any more; rank 0 (inner peer 0) has waited 2 s"
    assert four_ranks.survivors(waiting, 1, bad=1, kill=True, timeout_s=2.0, inner=True) == [[why, why]] * 3


def test_a_rank_that_has_ended_is_not_missed(ranks: Ranks) -> None:
    assert ranks(ending) == [None, None]


def test_a_frozen_rank_is_found_after_the_users_timeout(impatient: Ranks) -> None:
    schedule = Schedule.parse(
        cases.problem([0, 1], 2), [["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]]
    )
    told, thawed = impatient(frozen, placement=[0, 1], schedule=schedule)
    assert told.startswith("rank 1 did not answer any more; rank 0 ")
    assert thawed == told


def test_all_groups_take_over_the_users_timeout(impatient: Ranks) -> None:
    assert impatient(timeouts, placement=[0, 1]) == [{TIMEOUT_S}] * 2


def test_communicators_are_aborted_together() -> None:
    """Each abort waits, as NCCL's does, until the kernels of all communicators have ended."""
    together, aborted = threading.Barrier(4), []
    all_at_once([lambda k=k: aborted.append((together.wait(30), k)) for k in range(4)], 30)  # type: ignore[misc]
    assert sorted(k for _, k in aborted) == [0, 1, 2, 3]


def test_an_abort_that_hangs_is_left_behind() -> None:
    hangs, aborted = threading.Event(), []
    all_at_once([hangs.wait, lambda: aborted.append(True)], 0.2)
    assert aborted
    hangs.set()


class Soon:
    """An event that has come when it is asked for the third time."""

    def __init__(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 2


def test_a_wait_for_an_event_asks_whether_it_is_in_vain() -> None:
    event, required = Soon(), []
    wait_for(event, lambda: required.append(event.asked))
    assert required == [1, 2, 3], "also when the event has come: what was aborted ends, too"

    def require() -> None:
        if event.asked == 3:
            raise LostError("rank 1: not today")

    event = Soon()
    with pytest.raises(OptPipeError, match="rank 1: not today"):
        wait_for(event, require)


def test_groups_on_gpus_use_few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(config=SimpleNamespace(min_ctas=None, max_ctas=None), _timeout=None)
    fake = SimpleNamespace(Options=lambda: made)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", fake, raising=False)
    assert nccl_options(timedelta(seconds=9)) is made
    assert (made.config.min_ctas, made.config.max_ctas, made._timeout) == (1, MOST_BLOCKS, timedelta(seconds=9))
