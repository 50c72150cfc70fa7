"""`optpipe try`: a problem whose memory binds, the published schedules on it, and what OptPipe makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table

from optpipe import solvers
from optpipe.comparison import Comparison
from optpipe.model.problem import Problem
from optpipe.options import CompareOptions
from optpipe.show.page import plot
from optpipe.sizes import bytes_text
from optpipe_cli.compare import gain_lines, watched
from optpipe_cli.output import echo, print_table, require_writable

PROBLEM = Path(__file__).parent / "tight-4x8.json"
SEARCH_S = 4.0  # of each of the two searches: on the stages as given, and on any


def try_(
    *,
    html: Annotated[
        Path, Parameter(validator=require_writable, help="Where the page with both schedules is written.")
    ] = Path("optpipe-try.html"),
) -> None:
    """`optpipe try`."""
    problem = Problem.load(PROBLEM)
    (budget,) = {device.activation_budget_bytes for device in problem.devices}
    echo(
        f"{len(problem.devices)} devices with {bytes_text(budget)} for activations, {len(problem.stages)} stages, "
        f"{problem.microbatches} micro-batches"
    )
    echo()
    comparison = watched(problem, CompareOptions(time_limit_s=SEARCH_S))
    print_table(table(comparison))
    before, after = comparison.best_published, comparison.best
    if before is None or before.schedule is None or after is None or after.schedule is None or before is after:
        echo("The search found nothing better in its time, as on a very busy machine.")
        raise SystemExit(1)
    echo()
    for line in gain_lines(before.schedule, after.schedule):
        print_table(line)
    plot(after.schedule, before.schedule, after.lower_bound_ms).save(html)
    echo()
    echo(f"Both on one time scale, with their memory: {html.resolve()}")


def table(comparison: Comparison) -> Table:
    """A row for each schedule that applies to the problem: how long it takes, how much of that devices wait, and what
    it holds. Those that do not fit come last."""
    table = Table(box=None, pad_edge=False)
    for name in ("schedule", "iteration", "waiting", "memory", ""):
        table.add_column(name, no_wrap=True, justify="left" if name in ("schedule", "") else "right")
    best = comparison.best
    for row in comparison.rows:
        if row.schedule is None or row.peak is None or (row.method in solvers.installed().OWN and row is not best):
            continue
        peak = row.peak[1]
        table.add_row(
            f"OptPipe ({row.schedule.method})" if row is best else row.method,
            f"{row.makespan_ms:.0f} ms",
            f"{row.bubble:.0%}",
            bytes_text(peak.bytes),
            "" if row.fits else f"does not fit in {bytes_text(peak.limit or 0)}",
            style="bold" if row is best else None if row.fits else "dim",
        )
    return table
