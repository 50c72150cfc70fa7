"""What the ranks run in `test_failures`: a stage raises, or a process is killed, at a place that the test names."""

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from optpipe.errors import OptPipeError
from optpipe.schedule import Schedule
from optpipe_runtime import Pipeline
from support.ranks.cases import batch, loss_fn, own_stages, pipeline, refusals


class Trouble(NamedTuple):
    """What happens on one rank: in the forward or backward of its first stage that does this the `nth` time, or before
    a step."""

    rank: int
    where: str  # "forward", "backward", "between"
    nth: int
    kill: bool = False

    def strike(self) -> None:
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("not today")


class Told(NamedTuple):
    error: str
    later: str


def arm(stage: nn.Module, trouble: Trouble) -> None:
    """Its forwards and backwards are counted; the first three forwards are those in which the pipeline learns it."""
    counts = {"forward": -3, "backward": 0}

    def count(what: str) -> None:
        counts[what] += 1
        if (what, counts[what]) == (trouble.where, trouble.nth):
            trouble.strike()

    def follow(_: nn.Module, given: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: count("backward"))

    stage.register_forward_pre_hook(lambda *_: count("forward"))
    stage.register_forward_hook(follow)


def in_trouble(placement: Sequence[int], schedule: Schedule, trouble: Trouble) -> Told:
    rank, m, error = dist.get_rank(), schedule.problem.microbatches, ""
    modules = own_stages(placement)
    if rank == trouble.rank:
        arm(modules[min(modules)], trouble)
    pipe = pipeline(modules, schedule)
    try:
        for step in range(3):  # a rank whose part of a step is done hears of it in the next
            if trouble.where == "between" and rank == trouble.rank and step == trouble.nth:
                trouble.strike()
            pipe.step(*batch(0, m))
    except OptPipeError as raised:
        error = str(raised)
    (later,) = refusals(lambda: pipe.step(*batch(0, m)))
    pipe.close()
    return Told(error, later)


def going_on(placement: Sequence[int], schedule: Schedule) -> list[str]:
    m = schedule.problem.microbatches
    modules = own_stages(placement)
    if dist.get_rank() == 1:
        arm(modules[1], Trouble(1, "forward", 2))
    with pipeline(modules, schedule) as pipe:
        try:
            pipe.step(*batch(0, m))
        except (OptPipeError, ValueError) as error:
            return [str(error), *refusals(lambda: pipe.step(*batch(0, m)))]
    return []


def frozen(placement: Sequence[int], schedule: Schedule) -> str:
    """The last rank is stopped within a step. The others wake it when they have heard."""
    rank, m = dist.get_rank(), schedule.problem.microbatches
    with pipeline(own_stages(placement), schedule) as pipe:
        pids = pipe.gather(os.getpid())
        pipe.step(*batch(0, m))
        try:
            if rank == len(pids) - 1:
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # at once: to this thread, not to any
            pipe.step(*batch(0, m))
        except OptPipeError as error:
            os.kill(pids[-1], signal.SIGCONT)
            return str(error)
    return ""


def timeouts(placement: Sequence[int]) -> set[float]:
    """Of all groups that a pipeline makes, in seconds. Its own has torch's default."""
    with Pipeline(own_stages(placement), placement, loss_fn, 2, group=dist.new_group()) as pipe:
        groups: list[Any] = [subgroup._group for subgroup in pipe._rank.team._subgroups]
        return {g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups if g is not None}


def apart(placement: Sequence[int], different: Mapping[str, Any]) -> str:
    """What is told where rank 1 gives something else than the other ranks. Its `group` is made here."""
    rank = dist.get_rank()
    groups = {"not a member": lambda: dist.new_group([0]), "a mesh": lambda: init_device_mesh("cpu", (2,))}
    if "group" in different:
        different = {"group": groups[different["group"]]()}
    given = {"placement": placement, "microbatches": 2, "loss_fn": loss_fn} | (different if rank == 1 else {})
    stages = own_stages(placement if isinstance(given["placement"], int) else given["placement"])
    try:
        with Pipeline(**{"stages": stages} | given):
            return ""
    except Exception as error:
        return str(error)


def profiled_apart(placement: Sequence[int], different: Mapping[str, Any]) -> tuple[list[str], int]:
    """The same of arguments of `profile`; and how many ranks gather afterwards."""
    given = {"activation_budget_bytes": 10**6, "repeats": 1} | (different if dist.get_rank() == 1 else {})
    with Pipeline(own_stages(placement), placement, loss_fn, 2) as pipe:
        return refusals(lambda: pipe.profile(*batch(0, 2), **given)), len(pipe.gather(None))


def ended(placement: Sequence[int], schedule: Schedule, shut_down: bool) -> list[str]:
    """What a step says after the end of its pipeline; or after `shut_down` of torch.distributed."""
    m = schedule.problem.microbatches
    pipe = pipeline(own_stages(placement), schedule)
    pipe.step(*batch(0, m))
    if shut_down:
        dist.destroy_process_group()
    else:
        pipe.close()
    told = refusals(lambda: pipe.step(*batch(0, m)))
    pipe.close()
    return told
