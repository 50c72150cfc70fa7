"""What the robust search gains, under other noise than its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optpipe.anytime import solve
from optpipe.evaluate.jitter import Noise
from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe_cli.options import with_options

OTHER_NOISE = 12_345  # seed of the noise that judges both schedules; neither search has used it


@with_options("SolveOptions", jitter=0.05)
def jitter(
    problems: Annotated[list[Path], typer.Argument(help="Problem files.")],
    options: SolveOptions,
) -> None:
    """Measure by two searches what `solve --jitter` gains, under other noise than the search's."""
    loaded = [Problem.load(path) for path in problems]
    typer.echo(f"{'':18}{'nominal search':>20}{'with --jitter':>20}")
    typer.echo(f"{'problem':18}{'ms':>10}{'95%':>10}{'ms':>10}{'95%':>10}{'gain':>8}{'of noise':>10}")
    for problem in loaded:
        nominal = _searched(problem, options.model_copy(update={"jitter": 0.0}), options.jitter)
        robust = _searched(problem, options, options.jitter)
        typer.echo(f"{problem.name[:17]:18}{_gain(nominal, robust)}")


def _searched(problem: Problem, options: SolveOptions, noise: float) -> tuple[float, float] | None:
    """The length of the schedule that a search finds, in ms, without noise and at the 95th percentile with it."""
    result = solve(problem, **options.arguments())
    if result.schedule is None or result.objective_ms is None:
        return None
    other = Noise(result.schedule.problem, noise, OTHER_NOISE)
    return result.objective_ms, other.percentile_ms(result.schedule.compiled, options.objective)


def _gain(nominal: tuple[float, float] | None, robust: tuple[float, float] | None) -> str:
    if nominal is None or robust is None:
        return "no schedule"
    shown = "".join(f"{value:>10.6g}" for value in (*nominal, *robust))
    before, after = nominal[1], robust[1]
    of_noise = (before - after) / ((before - nominal[0]) or 1.0)
    return f"{shown}{1 - after / before:>8.2%}{of_noise:>10.1%}"
