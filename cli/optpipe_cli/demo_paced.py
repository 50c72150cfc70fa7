"""The part of `optpipe demo` on five ranks whose stages sleep instead of computing: as many devices as that, on any
machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from optpipe_cli import demo_page
from optpipe_cli.fidelity import COLUMNS, cells, measured, show
from optpipe_cli.output import echo

if TYPE_CHECKING:
    from optpipe.comparison import Comparison
    from optpipe.model.problem import Problem
    from optpipe_runtime.fidelity.cases import Task

RANKS = 5
TITLE = f"stages that sleep, {RANKS} ranks"
MEMORY = 1.6  # activations of all stages of a rank; 1F1B needs as many as there are ranks
RECOMPUTED = "chronos-recomp:recomputed=2"  # both stages of a rank
MICROBATCHES, STEPS, SEARCH_S = 8, 5, 15.0


def run(html: Path) -> bool:
    """Measure two published schedules that recompute and the solver's, print them, and write the page; return whether
    both kinds were found."""
    from optpipe.schedule import ScheduleFile

    echo()
    echo(
        f"the same on {RANKS} ranks whose stages sleep instead of computing, so that {RANKS} devices behave as such "
        f"on any machine: {MICROBATCHES} micro-batches, memory for {MEMORY} of the {RANKS} activations that 1F1B "
        "needs, a host link slower than the compute"
    )
    rows = [row for task in tasks() for row in measured(task, RANKS)]
    show(rows, TITLE)
    if len(rows) < 2 or rows[-1].case.method != "auto":
        echo("time: not every schedule was found in its time, so nothing is compared")
        return False
    *theirs, ours = rows
    echo(_shortest(published(ScheduleFile.model_validate(ours.file).problem)))
    best = min(theirs, key=lambda row: row.predicted_ms)
    sure = "a gain" if max(ours.steps_ms) < min(best.steps_ms) else "steps overlap: no gain beyond chance"
    echo(
        f"time: a step takes {1 - ours.measured_ms / best.measured_ms:.1%} less than by {best.found_by}, predicted "
        f"{1 - ours.predicted_ms / best.predicted_ms:.1%}: {sure}"
    )
    demo_page.save(html, best.file, ours.file, (TITLE, COLUMNS[:-1], [cells(row)[:-1] for row in rows]))
    return True


def published(problem: Problem) -> Comparison:
    """Compare all published schedules, each on the stages that it is for."""
    from optpipe.comparison import OWN, compare
    from optpipe_solver.systems import SYSTEMS

    return compare(problem, [*(name for name in SYSTEMS if name not in OWN), RECOMPUTED])


def _shortest(compared: Comparison) -> str:
    """Say which published schedule is the best of those that fit."""
    fit = [row for row in compared.rows if row.fits]
    return (
        f"{len(compared.rows) - len(fit)} of {len(compared.rows)} published schedules do not fit or do not apply; the "
        f"shortest of the others, by prediction: {fit[0].method}, {fit[0].makespan_ms:.0f} ms"
    )


def tasks() -> list[Task]:
    """Return the same work as one stage a rank, for 1F1B with recompute, and as two."""
    from optpipe_runtime.fidelity.cases import Case, Task
    from optpipe_runtime.fidelity.paced import Times

    whole, half = Times(40.0, 40.0, 24.0, 58.0, saved=16), Times(20.0, 20.0, 12.0, 29.0, saved=8)
    two = [Case(RECOMPUTED, 2, memory=MEMORY), Case("auto", 2, memory=MEMORY)]
    return [
        Task([Case("1f1b-recompute", memory=MEMORY)], MICROBATCHES, STEPS, whole),
        Task(two, MICROBATCHES, STEPS, half, solve_s=SEARCH_S),
    ]
