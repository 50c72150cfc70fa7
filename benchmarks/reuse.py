"""How good a cached schedule is for a similar problem, against searches of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from math import ceil, log
from operator import eq
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from cyclopts.types import PositiveInt

from benchmarks.problems import GB, pipeline, stage_costs
from benchmarks.results_file import KeepOptions, Results, ResultsPath
from benchmarks.tables import head, line, text
from benchmarks.timing import timed
from optpipe.anytime import solve
from optpipe.errors import InputError
from optpipe.evaluate.jit import compile_at_once
from optpipe.evaluate.objective import Objective, gap, length_ms
from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe.reuse import MOST_SIMULATED, adapt, by_rules, resized
from optpipe.schedule import Schedule, check
from optpipe_cache import Cache, distance, features
from optpipe_cli.options import Options

NOISE = {"times by a tenth": 0.1, "times by a fifth": 0.2, "times by two fifths": 0.4}  # standard deviations of factors
LINKS = {"links a third slower": 4 / 3, "links half as fast": 2.0}
MEMORY = {"a tenth less memory": 0.9, "a fifth less memory": 0.8, "half the memory": 0.5, "a quarter more memory": 1.25}
MICROBATCHES: dict[str, Callable[[int], int]] = {
    "one micro-batch more": lambda m: m + 1,
    "half as many more": lambda m: m + m // 2,
    "a quarter fewer": lambda m: m - m // 4,
}
DEVICES = {"one device more": 1, "one device fewer": -1}
CHANGES = (*NOISE, *LINKS, "longer backwards", *MEMORY, *MICROBATCHES, *DEVICES)
SHORT_S = 5.0  # of a search from what the cache had, and of one from nothing
DISTANCES = (-1.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0)
COLUMNS: tuple[str, ...] = (
    "problems like it",
    "cases",
    "found",
    "loss: median",
    "95 %",
    "within 3 %",
    "within 5 %",
    "searched: 95 %",
)
COLUMNS += ("from nothing: median", "95 %", "searched: 95 %", "gap: median", "lookup: ms")

Row = dict[str, Any]
Search = Callable[[Problem, Schedule | None], tuple[Schedule | None, float | None]]  # from a start; with a lower bound


class Searches(NamedTuple):
    full: Search
    short: Search


def reuse(
    problems: list[Path] | None = None,
    /,
    *,
    options: Options[KeepOptions] = KeepOptions(),
    first: PositiveInt | None = None,
    changed: list[str] | None = None,
    results: ResultsPath = None,
) -> None:
    """Solve each problem within the time limit, then problems like it: from the cache at once, from there for 5 s, from
    nothing at once and for 5 s, and from nothing within the limit. Losses are against the shortest of these; the gap
    says how much shorter a schedule could be at most. What is out of reach of a lookup is adapted all the same. Lookups
    are in processor time.

    Parameters
    ----------
    problems
        Problem files. Default: a grid of 32.
    first
        Only this many problems.
    changed
        Only what is changed like that, such as 'one device more'; repeatable.
    """
    if unknown := sorted(set(changed or CHANGES).difference(CHANGES)):
        raise InputError(f"--changed = {unknown[0]!r}: unknown; expected one of {', '.join(map(repr, CHANGES))}")
    loaded = [Problem.load(path) for path in problems] if problems else list(grid())
    kept = Results(results, "reuse", ("problem", "changed"), options)
    print(
        f"{'problem':22}{'changed':22}{'distance':>9}{'found':>6}{'lookup: ms':>11}{'loss':>8}{'searched':>10}"
        f"{'cold':>8}{'searched':>10}{'gap':>7}"
    )
    for problem in loaded[:first]:
        like = {
            name: other
            for name, other in problems_like(problem)
            if name in (changed or CHANGES) and not kept.find(problem.name, name)
        }
        for row in measured(problem, like, _searches(options), options.objective) if like else ():
            print(_line(kept.add(row)))
    print("\n" + head(COLUMNS, "l" + "r" * (len(COLUMNS) - 1)))
    for name, group in _groups(kept.rows).items():
        if group:
            print(_summary(name, group))


def _searches(options: SolveOptions) -> Searches:
    def within(seconds: float) -> Search:
        asked = options.model_copy(update={"time_limit_s": min(seconds, options.time_limit_s)}).arguments()

        def search(problem: Problem, start: Schedule | None) -> tuple[Schedule | None, float | None]:
            result = solve(problem, warm_start=start, **asked)
            return result.schedule, result.lower_bound_ms

        return search

    return Searches(within(options.time_limit_s), within(SHORT_S))


def _by_rules(problem: Problem, objective: Objective) -> Schedule | None:
    """What a cache that has nothing similar answers at once."""
    schedule = by_rules(problem, None, objective, MOST_SIMULATED)
    return schedule if schedule and not check(problem, schedule) else None


def measured(problem: Problem, like: dict[str, Problem], searches: Searches, objective: Objective) -> Iterator[Row]:
    """A row for each of the problems like it, with its losses: how much longer a schedule is than the best one."""
    solved, _ = searches.full(problem, None)
    if solved is None:
        print(f"note: {problem.name}: left out, no schedule found", file=sys.stderr)
        return
    with TemporaryDirectory() as folder:
        cache = Cache(Path(folder) / "cache.sqlite")
        cache.add(solved, "feasible", objective=objective, verified=True)
        compile_at_once()
        cache.lookup(next(iter(like.values())), objective)  # the first one waits for what is compiled
        for changed, other in like.items():
            hit, lookup_ms = timed(lambda other=other: cache.lookup(other, objective), time.process_time)  # type: ignore[misc]
            reused = hit.schedule if hit else adapt(other, solved, objective)
            schedules = {
                "loss": reused,
                "loss_searched": searches.short(other, reused)[0] if reused else None,
                "cold_loss": _by_rules(other, objective),
                "cold_loss_searched": searches.short(other, None)[0],
            }
            anew, bound_ms = searches.full(other, None)
            lengths_ms = {name: length_ms(each, objective) for name, each in schedules.items() if each}
            if anew is None or not lengths_ms:
                print(f"note: {problem.name}, {changed}: left out, no schedule found", file=sys.stderr)
                continue
            best_ms = min(length_ms(anew, objective), *lengths_ms.values())
            yield {
                "problem": problem.name,
                "changed": changed,
                "distance": _distance(problem, other),
                "found": hit is not None,
                "lookup_ms": lookup_ms,
                "gap": gap(best_ms, bound_ms),
                **{name: lengths_ms[name] / best_ms - 1 if name in lengths_ms else None for name in schedules},
            }


def _distance(problem: Problem, other: Problem) -> float:
    """How far the cache's features are apart; another number of devices counts by its logarithm."""
    devices = len(other.devices)
    same_size = resized(problem, devices) or problem
    return abs(log(devices / len(problem.devices))) + distance(features(other), features(same_size))


def grid() -> Iterator[Problem]:
    """Pipelines of 4 and 8 devices: times of ops as two models have them, memory for all micro-batches in flight that
    1F1B has or for half of them, and links on which an activation moves in half a forward or in three.

    The first 8 have each two values of p, times, memory and link twice (a fractional factorial design); the next 8 have
    the other pairs. Twice as many micro-batches come last.
    """
    shapes = product((4, 8), ((10, 10, 10), (10, 13, 8)), (1.0, 0.5), (0.5, 3.0), (2, 4))
    others = (8, (10, 13, 8), 0.5, 3.0)

    def by_halves(shape: tuple[Any, ...]) -> tuple[int, int]:
        return shape[-1], sum(map(eq, shape, others)) % 2

    for p, times, memory, link, rounds in sorted(shapes, key=by_halves):
        stage = stage_costs(times, GB, saved=GB // 2, transfer_ms=link * times[0])
        name = f"{p}x{rounds * p} B{times[1]} M{memory:g} O{link:g}"
        yield pipeline([stage] * p, rounds * p, int(memory * p * GB), name=name, p2p_ms=0.5)


def problems_like(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Problems with other times, less and more memory, more and fewer micro-batches and devices; the same in each
    run."""
    random, m = np.random.default_rng([0, *problem.name.encode()]), problem.microbatches

    def noisy(record: Any, noise: float) -> Any:
        times = {name: value for name, value in record if name.endswith("_ms") and value}
        return record.model_copy(update={name: value * random.lognormal(0, noise) for name, value in times.items()})

    def times(factor: float, *names: str) -> Problem:
        changed = (
            {name: factor * value for name, value in stage if name in names and value} for stage in problem.stages
        )
        pairs = zip(problem.stages, changed, strict=True)
        return problem.replace(stages=tuple(stage.model_copy(update=values) for stage, values in pairs))

    def memory(factor: float) -> Problem:
        devices = (
            device.model_copy(update={"activation_budget_bytes": int(factor * device.activation_budget_bytes)})
            for device in problem.devices
        )
        return problem.replace(devices=tuple(devices))

    for name, noise in NOISE.items():
        yield name, problem.replace(stages=tuple(noisy(stage, noise) for stage in problem.stages))
    for name, factor in LINKS.items() if problem.costs.can_offload.any() else ():
        yield name, times(factor, "offload_ms", "reload_ms")
    yield "longer backwards", times(1.3, "backward_input_ms")
    for name, factor in MEMORY.items():
        yield name, memory(factor)
    for name, number in MICROBATCHES.items() if len(problem.all_routes) == 1 else ():
        yield name, problem.replace(microbatches=number(m))
    for name, further in DEVICES.items():
        if like := resized(problem, len(problem.devices) + further):
            yield name, like


def _line(row: Row) -> str:
    return (
        f"{row['problem']:22}{row['changed']:22}{row['distance']:>9.2f}{'yes' if row['found'] else 'no':>6}"
        f"{row['lookup_ms']:>11.0f}{text(row['loss'], '.1%'):>8}{text(row['loss_searched'], '.1%'):>10}"
        f"{text(row['cold_loss'], '.1%'):>8}{text(row['cold_loss_searched'], '.1%'):>10}{text(row['gap'], '.1%'):>7}"
    )


def _groups(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows by what was changed, then all of them by distance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["changed"], []).append(row)
    for low, high in pairwise(DISTANCES):
        groups[f"distance up to {high}"] = [row for row in rows if low < row["distance"] <= high]
    return groups


def _summary(name: str, rows: list[Row]) -> str:
    """A row of a table in Markdown. Where nothing was found, the loss counts as more than any other."""

    def quantile(loss: str, share: float) -> str:
        losses = sorted(float("inf") if row[loss] is None else row[loss] for row in rows)
        value = losses[ceil(share * len(losses)) - 1]
        return "–" if value == float("inf") else f"{value:.1%}"

    def within(most: float) -> str:
        return f"{sum(row['loss'] is not None and row['loss'] <= most for row in rows) / len(rows):.0%}"

    return line(
        (
            name,
            len(rows),
            f"{sum(row['found'] for row in rows) / len(rows):.0%}",
            quantile("loss", 0.5),
            quantile("loss", 0.95),
            within(0.03),
            within(0.05),
            quantile("loss_searched", 0.95),
            quantile("cold_loss", 0.5),
            quantile("cold_loss", 0.95),
            quantile("cold_loss_searched", 0.95),
            quantile("gap", 0.5),
            f"{median(row['lookup_ms'] for row in rows):.0f}",
        )
    )
