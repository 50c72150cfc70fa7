"""What the ranks run in `test_follow`."""

import random
import time
from pathlib import Path
from typing import Any

import torch

from examples import paced
from optpipe import Problem
from optpipe.evaluate import timeline
from optpipe_cache import Cache
from optpipe_runtime import Follower, Pipeline, Profiler
from optpipe_runtime.lowering.prepare import one_at_a_time
from optpipe_runtime.memory import engines
from optpipe_runtime.service import client
from support.processes import until as wait_until
from support.ranks.cases import batch, loss_fn, own_stages


def follow(
    placement: list[int],
    microbatches: int,
    url: str | None,
    steps: int,
    every: int,
    begun: bool = False,
    until: int | None = None,
    cache: Path | None = None,
    method: str = "auto",
) -> tuple[list[float | None], list[int]]:
    """Trains so many steps, or until this version of the schedule; where it has `begun`, with one loaded before
    anything is measured. The losses seen here, and each step's version."""
    modules = own_stages(placement)
    optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=0.1)
    losses, versions = [], []
    with (
        Pipeline(modules, placement, loss_fn, microbatches) as pipe,
        Follower(
            pipe, url, activation_budget_bytes=10**9, every=every, cache=Cache(cache) if cache else None, method=method
        ) as follower,
    ):
        if begun:
            pipe.load(one_at_a_time(pipe.layout.unmeasured()))
        for step in range(steps):
            optimizer.zero_grad()
            report = follower.step(*batch(step, microbatches))
            optimizer.step()
            assert report.excess is None
            losses.append(report.loss)
            versions.append(report.version)
            if report.version == until:
                break
            if until is not None and step == 0:
                await_offer(follower)
    return losses, versions


def await_offer(follower: Follower) -> None:
    """On rank 0; the others wait for it in the next step."""
    if (following := follower._client) is not None:
        wait_until(lambda: following._newest)


def await_search(follower: Follower) -> None:
    """Until the service has ended its search for the problem as it is."""
    if (following := follower._client) is not None:
        wait_until(lambda: following.ended)


class Noisy:
    """Stands for the module `time` where ops sleep and are timed: a busy machine adds nothing; each varies."""

    def __init__(self, seed: int) -> None:
        self._now, self._chance = 0.0, random.Random(seed)

    def sleep(self, s: float) -> None:
        self._now += s * self._chance.lognormvariate(0, 0.1)

    def perf_counter(self) -> float:
        return self._now


def slows_down(
    url: str, microbatches: int, every: int, calm: int, slow: int, factor: float
) -> tuple[list[int], list[Problem | None]]:
    """Stages of a given time; after `calm` steps that of rank 1 takes `factor` times as long, for `slow` steps. Of each
    step the version, and the problem after it."""
    rank, times = torch.distributed.get_rank(), paced.Times(10.0, 10.0, 10.0, 0.0)
    module = paced.SleepingStage(times)
    x = torch.randn(microbatches * paced.SHAPE[0], paced.SHAPE[1])
    versions, problems = [], []
    noisy: Any = Noisy(rank)
    paced.time = engines.time = noisy
    told, closed, client.REPORT_S, client.CLOSE_S = client.REPORT_S, client.CLOSE_S, 60.0, 120.0
    try:
        with (
            Pipeline({rank: module}, [0, 1], paced.loss, microbatches) as pipe,
            Follower(pipe, url, activation_budget_bytes=10**9, every=every) as follower,
        ):
            for step in range(calm + slow):
                if step == calm and rank == 1:
                    module.times = paced.Times(*(factor * ms for ms in times[:4]))
                versions.append(follower.step(x, x).version)
                problems.append(pipe.problem)
                await_search(follower)
    finally:
        paced.time = engines.time = time
        client.REPORT_S, client.CLOSE_S = told, closed
    return versions, problems


def regroups(url: str, microbatches: int, then: int) -> list[float]:
    """Two steps, then two of the same batch in another number of micro-batches; the losses seen here."""
    losses = []
    with (
        Pipeline(own_stages([0, 1]), [0, 1], loss_fn, microbatches) as pipe,
        Follower(pipe, url, activation_budget_bytes=10**9, every=3) as follower,
    ):
        for step in range(4):
            if step == 2:
                pipe.load(one_at_a_time(pipe.problem.replace(microbatches=then)))
            losses.append(follower.step(*batch(0, microbatches)).loss or 0.0)
            await_search(follower)
    return losses


def compiled() -> bool:
    """Whether what checks schedules has been compiled when the first one is loaded."""
    with Pipeline(own_stages([0, 1]), [0, 1], loss_fn, 1) as pipe:
        pipe.load(one_at_a_time(pipe.layout.unmeasured()))
    return timeline._longest_path._compiled is not None


def script(text: str) -> tuple[Problem, Problem]:
    """Runs it, with a pipeline and batches; the problem as profiled, and as the script has it."""
    inputs, targets = batch(0, 2)
    with Pipeline(own_stages([0, 1]), [0, 1], loss_fn, 2) as pipe:
        profiled = pipe.profile(inputs, targets, activation_budget_bytes=10**9, repeats=3)
        pipe.load(one_at_a_time(profiled))
        scope: dict[str, Any] = {"pipe": pipe, "batches": [(inputs, targets)] * 3, "Profiler": Profiler}
        exec(compile(text, "docs/profile.md", "exec"), scope)
    return profiled, scope["problem"]
