"""The part of `optpipe demo` on four ranks whose stages sleep instead of computing: as many devices as that, on any
machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from optpipe_cli import demo_page
from optpipe_cli.bench.runtime import COLUMNS, RANKS, cells, show
from optpipe_cli.bench.runtime import run as measured
from optpipe_cli.compare import whether_it_fits

if TYPE_CHECKING:
    from optpipe_runtime.bench.fidelity import Task

TITLE = f"stages that sleep, {RANKS} ranks"
MEMORY = 1.6  # activations of all stages of a rank; 1F1B needs four
MICROBATCHES, STEPS, SEARCH_S = 8, 5, 15.0


def run(html: Path) -> bool:
    """Measure the published schedules that fit and the solver's, print them, and write the page; return whether both
    kinds were found."""
    from optpipe.schedule import ScheduleFile

    typer.echo(
        f"\nthe same on {RANKS} ranks whose stages sleep instead of computing, so that {RANKS} devices behave as such "
        f"on any machine: {MICROBATCHES} micro-batches, memory for {MEMORY} of the 4 activations that 1F1B needs, a "
        "host link slower than the compute"
    )
    found = [row for task in tasks() for row in measured(task, RANKS)]
    show(found, TITLE, None, quiet=False)
    if len(found) < 2 or found[-1].case.method != "auto":
        typer.echo("time: not every schedule was found in its time, so nothing is compared")
        return False
    *published, ours = found
    typer.echo(whether_it_fits(ScheduleFile.model_validate(ours.file).problem, "po-f", "PipeOffload"))
    best = min(published, key=lambda row: row.predicted_ms)
    sure = "a gain" if max(ours.steps_ms) < min(best.steps_ms) else "steps overlap: no gain beyond chance"
    typer.echo(
        f"time: a step takes {1 - ours.measured_ms / best.measured_ms:.1%} less than by {best.found_by}, the best "
        f"published one that fits, predicted {1 - ours.predicted_ms / best.predicted_ms:.1%}: {sure}"
    )
    demo_page.save(html, best.file, ours.file, (TITLE, COLUMNS[:-1], [cells(row)[:-1] for row in found]))
    return True


def tasks() -> list[Task]:
    """Return the same work as one stage a rank, for 1F1B with recompute, and as two. PipeOffload does not fit."""
    from optpipe_runtime.bench.fidelity import Case, Task
    from optpipe_runtime.bench.paced import Times

    whole, half = Times(40.0, 40.0, 24.0, 54.0, saved=16), Times(20.0, 20.0, 12.0, 27.0, saved=8)
    two = [Case("chronos-recomp:recomputed=2", 2, memory=MEMORY), Case("auto", 2, memory=MEMORY)]
    return [
        Task([Case("1f1b-recompute", memory=MEMORY)], MICROBATCHES, STEPS, whole),
        Task(two, MICROBATCHES, STEPS, half, solve_s=SEARCH_S),
    ]
