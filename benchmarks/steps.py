"""How soon a step has a schedule, how good that is, and what `assign` and `pack` reach (`steps`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer

from benchmarks.timing import repeated, timed
from benchmarks.traces import job_name, joined, read_timeline, replicas_of, timelines_in
from optpipe import solve
from optpipe.model.problem import Problem
from optpipe.steps import CostModel, StepRules, StepScheduler, assign, of_microbatches, pack

SIZES = ((4, 8), (8, 32))
SPREAD = 0.4  # of the logarithm of weights: the heaviest of 8 is about 3 times the lightest
BESIDE_S = (0.5, 1.0)  # what the thread of a planned step takes until the step begins
TOGETHER = {"SE": (1, 2, 4)}  # replicas of a job whose micro-batches make one longer step; 1 otherwise
LIMIT = 8192  # tokens of a micro-batch, each of which takes a byte
LEARNT = ("forward_ms", "backward_input_ms", "backward_weight_ms", "activation_bytes")


def steps(
    seconds: Annotated[float, typer.Option(min=0.1, help="how long searches are that schedules are compared with")] = 5,
    problems: Annotated[int, typer.Option(min=1, help="steps of each kind")] = 6,
    folder: Annotated[
        Path | None, typer.Option(help="timelines (as for traces) whose steps are scheduled, too")
    ] = None,
) -> None:
    """Time first schedules of steps, assignments and packings, in ms of one core, after what compiles them.

    Schedules are compared with the best of two searches: the step's own, and `solve` by method auto.
    """
    typer.echo(
        "step         devices x micro-batches   ms of one core: median, most   longer than what searches find: median, "
        "most of the first schedule"
        + "".join(f"; after {each} s beside" for each in BESIDE_S)
        + "; of the first one from the rules of the two steps before"
    )
    for name, kind in _kinds(folder, problems):
        _measure_kind(name, kind, seconds)
    _measure_assignment()
    _measure_packing()
    typer.echo(f"a loop of Python beside the search of a step takes {_loop_beside():.2f} times as long as alone")


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
    typer.echo(f"{name:12} {size:>23}   {median(took):21.1f} {max(took):6.1f}   {told}")


def _after(scheduler: StepScheduler, step: Problem, seconds: float) -> float:
    """The length of the best schedule when the thread has searched so long on its core."""
    before = set(threading.enumerate())
    planned = scheduler.plan(step)
    (thread,) = set(threading.enumerate()) - before
    while thread.is_alive() and time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) < seconds:
        time.sleep(0.005)
    return planned.best().makespan_ms


def _measure_assignment() -> None:
    replicas, batch = 32, random_step(2, 256, 1)
    assignment = assign(batch, replicas)
    took = [ms for _, ms in repeated(lambda: timed(lambda: assign(batch, replicas), time.thread_time), 5, 1)]
    typer.echo(
        f"{replicas} replicas with 8 micro-batches each: {median(took):.1f} ms of one core, "
        f"{assignment.slowest_ms / assignment.floor_ms - 1:.1%} above the mean work of the busiest device"
    )


def _measure_packing() -> None:
    """Documents packed by what they cost, beside packings that look at their tokens only."""
    microbatches, replicas, devices = 32, 4, 4
    stages = [{"device": d, "saved_for_weight_bytes": 0} for d in range(devices)]
    template = Problem.from_dict(
        {
            "microbatches": 1,
            "p2p_ms": 0.5,
            "devices": [{"activation_budget_bytes": devices * LIMIT}] * devices,
            "stages": [stage | dict.fromkeys(LEARNT, 0) for stage in stages],
        }
    )
    costs = _learnt(devices)
    took, gains = [], [[list[float]() for _ in range(2)] for _ in range(2)]
    for seed in range(8):
        documents = random_documents(round(0.85 * microbatches * LIMIT), seed)
        arguments = documents, microbatches, {"tokens": LIMIT}, partial(costs.problem, template), costs, replicas
        packing, ms = timed(partial(pack, *arguments), time.thread_time)
        took.append(ms)
        for packed, by_way in zip((_in_order(documents), _first_fit(documents)), gains, strict=True):
            sums = [{feature: sum(each[feature] for each in one) for feature in costs.features} for one in packed]
            batch = costs.problem(template, sums)
            lengths_ms = _dealt_ms(batch, replicas), assign(batch, replicas, free=True).slowest_ms
            for ratios, length_ms in zip(by_way, lengths_ms, strict=True):
                ratios.append(length_ms / packing.assignment.slowest_ms)
    typer.echo(
        f"documents into {microbatches} micro-batches of {LIMIT} tokens at most, {replicas} replicas: "
        f"{median(took):.0f} ms of one core; median (least to most) by how much a step takes longer by packing"
    )
    for name, by_way in zip(("in order", "first fit, longest first"), gains, strict=True):
        dealt, assigned = (f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in by_way)
        typer.echo(f"{name:>26}: {dealt}; with its micro-batches spread by assign: {assigned}")


def _dealt_ms(batch: Problem, replicas: int) -> float:
    """The slowest replica's length where micro-batches are dealt in turn and enter as they come."""
    parts = [of_microbatches(batch, range(r, batch.microbatches, replicas)) for r in range(replicas)]
    scheduler = StepScheduler(batch)
    fixed = [part.replace(fixed_order=True) for part in parts]
    return max(scheduler.plan(part, improve=False).first.makespan_ms for part in fixed)


def random_documents(tokens: int, seed: int) -> list[dict[str, float]]:
    """Documents of very different lengths with about so many tokens together."""
    drawn = np.random.default_rng(seed).lognormal(6.5, 1.2, 4000).clip(32, LIMIT).astype(int)
    chosen = drawn[: int(np.searchsorted(drawn.cumsum(), tokens))]
    return [{"tokens": float(each), "squares": float(each) ** 2} for each in chosen.tolist()]


def _learnt(devices: int) -> CostModel:
    """A cost model of stages in which attention within the longest document takes as long as all else."""
    costs = CostModel(("tokens", "squares"), devices, LEARNT)
    documents = random_documents(100_000, 99)
    ms = [2e-3 * each["tokens"] + 2e-3 / LIMIT * each["squares"] for each in documents]
    tokens = [each["tokens"] for each in documents]
    costs.learn(documents, [{name: tokens if "bytes" in name else ms for name in LEARNT}] * devices)
    return costs


def _in_order(documents: Sequence[dict[str, float]]) -> list[list[dict[str, float]]]:
    """Each document into the last micro-batch, or a new one where it is full."""
    packed: list[list[dict[str, float]]] = [[]]
    for each in documents:
        if sum(other["tokens"] for other in packed[-1]) + each["tokens"] > LIMIT:
            packed.append([])
        packed[-1].append(each)
    return packed


def _first_fit(documents: Sequence[dict[str, float]]) -> list[list[dict[str, float]]]:
    """Each document, the longest first, into the first micro-batch with room."""
    packed: list[list[dict[str, float]]] = []
    for each in sorted(documents, key=lambda document: -document["tokens"]):
        room = (one for one in packed if sum(other["tokens"] for other in one) + each["tokens"] <= LIMIT)
        one = next(room, None)
        if one is None:
            packed.append([each])
        else:
            one.append(each)
    return packed


def _loop_beside() -> float:
    """How much longer the main thread computes while a step's search runs."""

    def loop() -> float:
        return min(ms for _, ms in repeated(lambda: timed(lambda: sum(range(1_000_000)), time.perf_counter), 20))

    alone_ms = loop()
    planned = StepScheduler(random_step(8, 32, 0)).plan(random_step(8, 32, 0))
    beside_ms = loop()
    planned.best()
    return beside_ms / alone_ms


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
