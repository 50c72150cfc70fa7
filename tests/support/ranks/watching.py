"""What the ranks run in `test_watch`: a rank waits for a GPU's event that never comes, and another one fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from optpipe.errors import OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from optpipe_runtime.clock import wait_for
from optpipe_runtime.ranks import watch
from optpipe_runtime.ranks.team import Team
from support.ranks.cases import batch, loss_fn, own_stages
from support.ranks.replicas import mesh


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
    assert team._watch is not None
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
        groups = [subgroup._open() for subgroup in pipe._rank.team._subgroups]
        return {g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups}
