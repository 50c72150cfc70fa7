"""How long it takes to schedule a step and to assign micro-batches, and how good that is (`steps`)."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Annotated

import numpy as np
import typer

from benchmarks.timing import repeated, timed
from optpipe.model.problem import Problem
from optpipe.steps import StepScheduler, assign

SIZES = ((4, 8), (8, 32))
SPREAD = 0.4  # of the logarithm of weights: the heaviest of 8 is about 3 times the lightest


def steps(
    seconds: Annotated[float, typer.Option(min=0.1, help="how long a search each first schedule is compared with")] = 5,
    problems: Annotated[int, typer.Option(min=1, help="steps of each size")] = 6,
) -> None:
    """Time first schedules of random steps and assignments, in ms of one core, after what compiles them."""
    typer.echo("devices x micro-batches   ms of one core   first schedule, longer by: median, most")
    for devices, microbatches in SIZES:
        scheduler = StepScheduler(random_step(devices, microbatches, 0))
        scheduler.prepare()
        took, longer = [], []
        for seed in range(problems):
            step = random_step(devices, microbatches, seed)
            planned, ms = timed(partial(scheduler.plan, step, improve=False), time.thread_time)
            took.append(ms)
            search = scheduler.plan(step)
            time.sleep(seconds)
            longer.append(planned.first.makespan_ms / search.best().makespan_ms - 1)
        typer.echo(
            f"{devices:7} x {microbatches:<15} {median(took):8.1f} {max(took):6.1f}   "
            f"{median(longer):12.1%} {max(longer):6.1%}"
        )
    replicas, batch = 32, random_step(2, 256, 1)
    assignment = assign(batch, replicas)
    took = [ms for _, ms in repeated(lambda: timed(lambda: assign(batch, replicas), time.thread_time), 5, 1)]
    typer.echo(
        f"{replicas} replicas with 8 micro-batches each: {median(took):.1f} ms of one core, "
        f"{assignment.slowest_ms / assignment.floor_ms - 1:.1%} above the mean work of the busiest device"
    )


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
