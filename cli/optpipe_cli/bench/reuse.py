"""`optpipe bench reuse`: how good a cached schedule is for a similar problem, against searches of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from math import ceil, log
from operator import eq
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe_cli.bench.results import Results, ResultsFile
from optpipe_cli.options import with_options
from optpipe_cli.output import Json, print_json

if TYPE_CHECKING:
    from optpipe.evaluate.objective import Objective
    from optpipe.model.problem import Problem
    from optpipe.options import SolveOptions
    from optpipe.schedule import Schedule

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
WORK = 10**6  # ops: where searches count, as much as a short one simulates
SHORT_S = 5.0  # where they do not: of a search from what the cache had, and of one from nothing
DISTANCES = (-1.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0)

HEADER = (
    "| problems like it | cases | found | loss: median | 95 % | within 3 % | within 5 % | searched: 95 % | from "
    "nothing: median | 95 % | searched: 95 % | gap: median | lookup: ms |\n" + "| --- " + "| ---: " * 12 + "|"
)

Row = dict[str, Any]
Found = tuple["Schedule | None", float | None]  # with a lower bound
Search = Callable[["Problem", "Schedule | None"], Found]


@with_options("SolveOptions")
def reuse(
    options: SolveOptions,
    problems: Annotated[list[Path] | None, typer.Argument(help="Problem files. Default: a grid of 32.")] = None,
    first: Annotated[int | None, typer.Option(min=1, help="Only so many problems.")] = None,
    changed: Annotated[
        list[str] | None, typer.Option(help="Only what is changed like that, such as 'one device more'; repeatable.")
    ] = None,
    work: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="In place of the time limit: millions of ops that a search simulates; a short one does one million.",
        ),
    ] = None,
    results: ResultsFile = None,
    json: Json = False,
) -> None:
    """Solve each problem within the time limit, then problems like it: from the cache at once, from there for 5 s, from
    nothing at once and for 5 s, and from nothing within the limit. Losses are against the shortest of these; the gap
    says how much shorter a schedule could be at most. What is out of reach of a lookup is adapted all the same. Lookups
    are in processor time. With --work searches are among the rules of a list scheduler and count, so that a table is
    the same on every machine."""
    from optpipe.errors import InputError
    from optpipe.model.problem import Problem

    if unknown := sorted(set(changed or CHANGES).difference(CHANGES)):
        raise InputError(f"--changed = {unknown[0]!r}: unknown; expected one of {', '.join(map(repr, CHANGES))}")
    loaded = [Problem.load(path) for path in problems] if problems else list(_grid())
    kept = Results(results, "reuse", ("problem", "changed"), options, work=work)
    rows = kept.rows
    if not json:
        typer.echo(
            f"{'problem':22}{'changed':22}{'distance':>9}{'found':>6}{'lookup: ms':>11}{'loss':>8}{'searched':>10}"
            f"{'cold':>8}{'searched':>10}{'gap':>7}"
        )
    for problem in loaded[:first]:
        like = {
            name: other
            for name, other in _like(problem)
            if name in (changed or CHANGES) and not kept.find(problem.name, name)
        }
        for row in _measured(problem, like, _searches(options, work), options.objective) if like else ():
            kept.add(row)
            if not json:
                typer.echo(_line(row))
    if json:
        print_json(rows)
        return
    groups = {
        changed: [row for row in rows if row["changed"] == changed] for changed in {row["changed"]: 0 for row in rows}
    }
    for low, high in pairwise(DISTANCES):
        groups[f"distance up to {high}"] = [row for row in rows if low < row["distance"] <= high]
    typer.echo(f"\n{HEADER}")
    for of, group in groups.items():
        if group:
            typer.echo(_summary(of, group))


def _searches(options: SolveOptions, work: int | None) -> tuple[Search, Search]:
    """A search for as long as is asked for, and a short one."""
    from optpipe.anytime import solve

    def within(seconds: float) -> Search:
        asked = options.model_copy(update={"time_limit_s": min(seconds, options.time_limit_s)}).arguments()

        def search(problem: Problem, start: Schedule | None) -> Found:
            result = solve(problem, warm_start=start, **asked)
            return result.schedule, result.lower_bound_ms

        return search

    if work is None:
        return within(options.time_limit_s), within(SHORT_S)
    return _counted(work * WORK, options.objective), _counted(WORK, options.objective)


def _counted(most: int, objective: Objective) -> Search:
    from optpipe.evaluate.objective import length_ms
    from optpipe.reuse.by_rules import by_rules
    from optpipe.schedule import check
    from optpipe_solver.bounds import lower_bound

    def search(problem: Problem, start: Schedule | None) -> Found:
        found = by_rules(problem, start, objective, most)
        valid = [found] if found and not check(problem, found) else []
        best = min(valid + ([start] if start else []), key=lambda each: length_ms(each, objective), default=None)
        return best, lower_bound(problem, objective)

    return search


def _measured(
    problem: Problem, like: dict[str, Problem], searches: tuple[Search, Search], objective: Objective
) -> Iterator[Row]:
    from optpipe.evaluate.jit import compile_at_once
    from optpipe.evaluate.objective import gap, length_ms
    from optpipe.reuse.adapt import adapt
    from optpipe.reuse.by_rules import MOST_SIMULATED
    from optpipe.reuse.devices import resized
    from optpipe_cache import Cache, distance, features

    search, shortly, at_once = *searches, _counted(MOST_SIMULATED, objective)
    known, _ = search(problem, None)
    if known is None:
        typer.echo(f"note: {problem.name}: left out, no schedule found", err=True)
        return
    with TemporaryDirectory() as folder:
        cache = Cache(Path(folder) / "cache.sqlite")
        cache.add(known, "feasible", objective=objective, verified=True)
        compile_at_once()
        cache.lookup(next(iter(like.values())), objective)  # the first one waits for what is compiled
        for changed, other in like.items():
            began = time.process_time()
            hit = cache.lookup(other, objective)
            lookup_ms = 1000 * (time.process_time() - began)
            reused = hit.schedule if hit else adapt(other, known, objective)
            cold, _ = at_once(other, None)
            anew, bound_ms = search(other, None)
            found = {
                "loss": reused,
                "loss_searched": shortly(other, reused)[0] if reused else None,
                "cold_loss": cold,
                "cold_loss_searched": shortly(other, None)[0],
            }
            found_ms = {name: length_ms(schedule, objective) for name, schedule in found.items() if schedule}
            if anew is None or not found_ms:
                typer.echo(f"note: {problem.name}, {changed}: left out, no schedule found", err=True)
                continue
            best_ms = min(length_ms(anew, objective), *found_ms.values())
            yield {
                "problem": problem.name,
                "changed": changed,
                "distance": abs(log(len(other.devices) / len(problem.devices)))
                + distance(features(other), features(resized(problem, len(other.devices)) or problem)),
                "found": hit is not None,
                "lookup_ms": lookup_ms,
                "gap": gap(best_ms, bound_ms),
                **{name: found_ms[name] / best_ms - 1 if name in found_ms else None for name in found},
            }


def _grid() -> Iterator[Problem]:
    """Pipelines of 4 and 8 devices: times of ops as two models have them, memory for all micro-batches in flight that
    1F1B has or for half of them, and links on which an activation moves in half a forward or in three.

    The first 8 have each two values of p, times, memory and link twice (a fractional factorial design); the next 8 have
    the other pairs. Twice as many micro-batches come last.
    """
    from optpipe.model.problem import Problem
    from optpipe.model.records import Device, Stage

    size = 10**9
    shapes = product((4, 8), ((10, 10, 10), (10, 13, 8)), (1.0, 0.5), (0.5, 3.0), (2, 4))
    others = (8, (10, 13, 8), 0.5, 3.0)

    def by_halves(shape: tuple[Any, ...]) -> tuple[int, int]:
        return shape[-1], sum(map(eq, shape, others)) % 2

    for p, (forward, backward, weight), memory, link, rounds in sorted(shapes, key=by_halves):
        stage = Stage(
            device=0,
            forward_ms=forward,
            backward_input_ms=backward,
            backward_weight_ms=weight,
            activation_bytes=size,
            saved_for_weight_bytes=size // 2,
            offload_ms=link * forward,
            reload_ms=link * forward,
            offload_bytes=size,
        )
        yield Problem(
            name=f"{p}x{rounds * p} B{backward} M{memory:g} O{link:g}",
            microbatches=rounds * p,
            p2p_ms=0.5,
            devices=(Device(activation_budget_bytes=int(memory * p * size)),) * p,
            stages=tuple(stage.model_copy(update={"device": d}) for d in range(p)),
        )


def _like(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Problems with other times, less and more memory, more and fewer micro-batches and devices; the same in each
    run."""
    import numpy as np

    from optpipe.reuse.devices import resized

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
    for name, more in DEVICES.items():
        if like := resized(problem, len(problem.devices) + more):
            yield name, like


def _line(row: Row) -> str:
    return (
        f"{row['problem']:22}{row['changed']:22}{row['distance']:>9.2f}{'yes' if row['found'] else 'no':>6}"
        f"{row['lookup_ms']:>11.0f}{_percent(row['loss']):>8}{_percent(row['loss_searched']):>10}"
        f"{_percent(row['cold_loss']):>8}{_percent(row['cold_loss_searched']):>10}{_percent(row['gap']):>7}"
    )


def _percent(share: float | None) -> str:
    return "–" if share is None else format(share, ".1%")


def _summary(of: str, rows: list[Row]) -> str:
    """A row of a table in Markdown. Where nothing was found, the loss counts as more than any other."""

    def quantile(name: str, share: float) -> str:
        losses = sorted(float("inf") if row[name] is None else row[name] for row in rows)
        value = losses[ceil(share * len(losses)) - 1]
        return "–" if value == float("inf") else f"{value:.1%}"

    def within(most: float) -> str:
        return f"{sum(row['loss'] is not None and row['loss'] <= most for row in rows) / len(rows):.0%}"

    cells = (
        of,
        len(rows),
        f"{sum(row['found'] for row in rows) / len(rows):.0%}",
        *(quantile("loss", share) for share in (0.5, 0.95)),
        *map(within, (0.03, 0.05)),
        quantile("loss_searched", 0.95),
        *(quantile("cold_loss", share) for share in (0.5, 0.95)),
        quantile("cold_loss_searched", 0.95),
        quantile("gap", 0.5),
        f"{median(row['lookup_ms'] for row in rows):.0f}",
    )
    return f"| {' | '.join(map(str, cells))} |"
