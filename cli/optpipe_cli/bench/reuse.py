"""`optpipe bench reuse`: how good a cached schedule is for a similar problem, against a search of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe_cli.options import with_options
from optpipe_cli.output import Json, print_json

if TYPE_CHECKING:
    import numpy as np

    from optpipe.model.problem import Problem
    from optpipe.options import SolveOptions

NOISE = 0.1  # standard deviation of a time's factor
SHORT_S = 5.0  # of a search that begins with what the cache had


@with_options("SolveOptions")
def reuse(
    problems: Annotated[list[Path], typer.Argument(help="Problem files.")],
    options: SolveOptions,
    json: Json = False,
) -> None:
    """Solve each problem within the time limit, then problems like it: from the cache, from there for 5 s, and anew."""
    import numpy as np

    from optpipe.anytime import solve
    from optpipe.evaluate.objective import length_ms
    from optpipe.model.problem import Problem
    from optpipe_cache import Cache

    loaded = [Problem.load(path) for path in problems]
    random, rows = np.random.default_rng(0), list[dict[str, Any]]()
    short = options.model_copy(update={"time_limit_s": min(SHORT_S, options.time_limit_s)}).arguments()
    if not json:
        typer.echo(f"{'problem':18}{'changed':22}{'distance':>9}{'lookup: ms':>11}{'loss':>8}{'after 5 s':>10}")
    for problem in loaded:
        known = solve(problem, **options.arguments())
        if known.schedule is None:
            typer.echo(f"note: {problem.name}: left out, no schedule found", err=True)
            continue
        with TemporaryDirectory() as folder:
            cache = Cache(Path(folder) / "cache.sqlite")
            cache.add(known.schedule, "feasible", objective=options.objective, verified=True)
            for changed, other in _like(problem, random):
                began = time.perf_counter()
                hit = cache.lookup(other, options.objective)
                lookup_ms = 1000 * (time.perf_counter() - began)
                anew = solve(other, **options.arguments()).value_ms
                if anew is None:
                    typer.echo(f"note: {problem.name}, {changed}: left out, no schedule found", err=True)
                    continue
                later = solve(other, warm_start=hit.schedule, **short).value_ms if hit else None
                at_once = length_ms(hit.schedule, options.objective) if hit else None
                rows.append(
                    {
                        "problem": problem.name,
                        "changed": changed,
                        "distance": hit.distance if hit else None,
                        "lookup_ms": lookup_ms,
                        "loss": at_once / anew - 1 if at_once else None,
                        "loss_after_5_s": later / anew - 1 if later else None,
                    }
                )
                if not json:
                    typer.echo(_line(rows[-1]))
    if json:
        print_json(rows)
        return
    for changed in dict.fromkeys(row["changed"] for row in rows):
        typer.echo(_summary(changed, [row for row in rows if row["changed"] == changed]))


def _like(problem: Problem, random: np.random.Generator) -> Iterator[tuple[str, Problem]]:
    """Problems with other times, less memory, and more and fewer micro-batches."""

    def noisy(record: Any) -> Any:
        times = {name: value for name, value in record if name.endswith("_ms") and value}
        return record.model_copy(update={name: value * random.lognormal(0, NOISE) for name, value in times.items()})

    m = problem.microbatches
    yield "times by a tenth", problem.replace(stages=tuple(map(noisy, problem.stages)))
    less = tuple(
        device.model_copy(update={"activation_budget_bytes": int(0.8 * device.activation_budget_bytes)})
        for device in problem.devices
    )
    yield "a fifth less memory", problem.replace(devices=less)
    if len(problem.all_routes) == 1:
        yield "one micro-batch more", problem.replace(microbatches=m + 1)
        yield "half as many more", problem.replace(microbatches=m + m // 2)
        yield "a quarter fewer", problem.replace(microbatches=m - m // 4)


def _line(row: dict[str, Any]) -> str:
    def shown(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return (
        f"{row['problem']:18}{row['changed']:22}{shown(row['distance'], '.2f'):>9}{row['lookup_ms']:>11.0f}"
        f"{shown(row['loss'], '.1%'):>8}{shown(row['loss_after_5_s'], '.1%'):>10}"
    )


def _summary(changed: str, rows: list[dict[str, Any]]) -> str:
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    if not losses:
        return f"{changed}: nothing found for {len(rows)} problems"
    near = sum(loss <= 0.03 for loss in losses) / len(rows)
    return (
        f"{changed}: found for {len(losses)} of {len(rows)}, loss {median(losses):.1%} in the median and "
        f"{max(losses):.1%} at most; within 3 %: {near:.0%}"
    )
