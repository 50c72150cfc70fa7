"""Ranks on GPUs: whoever waits for an event hears that another rank has failed. Events are simulated; ranks, store and
threads are real."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support.ranks import cases, watching
from support.ranks.worker import STARTER, Ranks

from optpipe.errors import OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime.clock import wait_for
from optpipe_runtime.ranks.subgroup import LostError
from optpipe_runtime.ranks.watch import all_at_once

TIMEOUT_S = 8.0  # that a user gave to init_process_group


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pool = Ranks(STARTER, 2, tmp_path_factory.mktemp("impatient"), TIMEOUT_S)
    yield pool
    pool.close()


def test_ranks_that_wait_for_an_event_hear_of_another_ranks_failure(ranks: Ranks) -> None:
    why = "rank 1: not today"
    assert ranks(watching.waiting, bad=1, kill=False) == [[why, why], ["not today", why]]


def test_ranks_that_wait_for_an_event_hear_of_a_rank_that_is_killed(ranks: Ranks) -> None:
    why = "rank 1 did not answer any more; rank 0 has waited 2 s"
    assert ranks.survivors(watching.waiting, 1, bad=1, kill=True, timeout_s=2.0) == [[why, why]]


def test_inner_peers_watch_over_each_other(four_ranks: Ranks) -> None:
    why = "rank 1 (inner peer 0) did not answer any more; rank 0 (inner peer 0) has waited 2 s"
    assert four_ranks.survivors(watching.waiting, 1, bad=1, kill=True, timeout_s=2.0, inner=True) == [[why, why]] * 3


def test_a_rank_that_has_ended_is_not_missed(ranks: Ranks) -> None:
    assert ranks(watching.ending) == [None, None]


def test_a_frozen_rank_is_found_after_the_users_timeout(impatient: Ranks) -> None:
    schedule = Schedule.parse(
        cases.problem([0, 1], 2), [["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]]
    )
    told, thawed = impatient(watching.frozen, placement=[0, 1], schedule=schedule)
    assert told.startswith("rank 1 did not answer any more; rank 0 ")
    assert thawed == told


def test_all_groups_take_over_the_users_timeout(impatient: Ranks) -> None:
    assert impatient(watching.timeouts, placement=[0, 1]) == [{TIMEOUT_S}] * 2


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
