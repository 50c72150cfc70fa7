"""How soon a step has a schedule, and how good that is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
from cyclopts.types import PositiveInt

from benchmarks.timing import timed
from benchmarks.traces import job_name, joined, read_timeline, replicas_of, timelines_in
from optpipe import solve
from optpipe.model.problem import Problem
from optpipe.steps import StepRules, StepScheduler

SIZES = ((4, 8), (8, 32))
SPREAD = 0.4  # of the logarithm of weights: the heaviest of 8 is about 3 times the lightest
BESIDE_S = (0.5, 1.0)  # what the thread of a planned step takes until the step begins
TOGETHER = {"SE": (1, 2, 4)}  # replicas of a job whose micro-batches make one longer step; 1 otherwise


def steps(*, seconds: float = 5.0, problems: PositiveInt = 6, folder: Path | None = None) -> None:
    """Time first schedules of steps, in ms of one core, after what compiles them.

    Schedules are compared with the best of two searches: the step's own, and `solve` by method auto.

    Parameters
    ----------
    seconds
        How long searches are that schedules are compared with.
    problems
        Steps of each kind.
    folder
        Timelines (as for traces) whose steps are scheduled, too.
    """
    print(
        "step         devices x micro-batches   ms of one core: median, most   longer than what searches find: median, "
        "most of the first schedule"
        + "".join(f"; after {each} s beside" for each in BESIDE_S)
        + "; of the first one from the rules of the two steps before"
    )
    for name, kind in _kinds(folder, problems):
        _measure_kind(name, kind, seconds)


def _kinds(folder: Path | None, problems: int) -> Iterator[tuple[str, list[Problem]]]:
    """Yields steps of one kind, with a name."""
    for devices, microbatches in SIZES:
        yield "random", [random_step(devices, microbatches, seed) for seed in range(problems)]
    for path in timelines_in(folder) if folder else ():
        timeline = read_timeline(path)
        for together in TOGETHER.get(job_name(path), (1,)):
            replicas = islice(replicas_of(timeline), problems * together)
            parts = zip(*[replicas] * together, strict=True)
            yield job_name(path), [joined(part) for part in parts]


def _measure_kind(name: str, kind: Sequence[Problem], seconds: float) -> None:
    scheduler = StepScheduler(kind[0])
    scheduler.prepare()
    took, longer = [], []
    starts: list[StepRules] = []  # of the two steps before
    for step in kind:
        planned, ms = timed(partial(scheduler.plan, step, improve=False), time.thread_time)
        lengths_ms = [planned.first.makespan_ms, *(_after(scheduler, step, each) for each in BESIDE_S)]
        search = scheduler.plan(step)
        result = solve(step, time_limit_s=seconds, threads=1)
        references = [search.best(), *([result.schedule] if result.schedule else [])]
        shortest_ms = min(each.makespan_ms for each in references)
        took.append(ms)
        lengths_ms.append(scheduler.plan(step, False, starts).first.makespan_ms)
        if rules := search.best().rules:
            starts = [*starts[-1:], StepRules(rules, step)]
        longer.append([max(0.0, each / shortest_ms - 1) for each in lengths_ms])
    told = "; ".join(f"{median(each):6.1%} {max(each):6.1%}" for each in zip(*longer, strict=True))
    size = f"{len(kind[0].devices)} x {kind[0].microbatches}"
    print(f"{name:12} {size:>23}   {median(took):21.1f} {max(took):6.1f}   {told}")


def _after(scheduler: StepScheduler, step: Problem, seconds: float) -> float:
    """The length of the best schedule when the thread has searched so long on its core."""
    before = set(threading.enumerate())
    planned = scheduler.plan(step)
    (thread,) = set(threading.enumerate()) - before
    while thread.is_alive() and time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) < seconds:
        time.sleep(0.005)
    return planned.best().makespan_ms


def random_step(devices: int, microbatches: int, seed: int) -> Problem:
    """Micro-batches of very different lengths, with little memory on even seeds and ample on odd ones."""
    weights = np.random.default_rng(seed).lognormal(0.0, SPREAD, microbatches)
    nbytes = (weights * 1000).astype(int)
    budget = devices * int(nbytes.max()) if seed % 2 else max(int(nbytes.max()), int(devices * nbytes.mean()))
    times = {
        name: (ms * weights).tolist()
        for name, ms in (("forward_ms", 10.0), ("backward_input_ms", 10.0), ("backward_weight_ms", 9.0))
    }
    sizes = {"activation_bytes": nbytes.tolist(), "saved_for_weight_bytes": (nbytes // 2).tolist()}
    return Problem.from_dict(
        {
            "microbatches": microbatches,
            "p2p_ms": 0.5,
            "devices": [{"activation_budget_bytes": budget}] * devices,
            "stages": [{"device": d, **times, **sizes} for d in range(devices)],
        }
    )
