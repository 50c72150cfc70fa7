"""`optpipe demo --packed`: packed documents of very different lengths, with a schedule for every step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from optpipe_cli import demo_page
from optpipe_cli.fidelity import difference
from optpipe_cli.gain import gain_of
from optpipe_cli.launch import answered_on_ranks
from optpipe_cli.output import echo, print_figures

if TYPE_CHECKING:
    from optpipe_runtime.fidelity.packed import Result, Task, Way

MICROBATCHES, DOCUMENTS, LONGEST = 8, 4, 512  # of a step; of a micro-batch; tokens of a document
RANKS, SLEEPING_RANKS = 2, 5
COLUMNS = ("schedule", "predicted", "measured", "off by", "a schedule for every step takes less", "predicted")
TITLE = "ms a step, medians over the batches"


def run(html: Path, tolerance: float) -> bool:
    """Train the GPT, then the same on stages that sleep; print both and write a page of the latter. Return whether the
    losses were those of a plain run, within memory."""
    import torch

    from optpipe_runtime.demo import reference

    echo(
        f"{MICROBATCHES} micro-batches a step, each of {DOCUMENTS} documents in one row, without padding: at most "
        f"{LONGEST} tokens a document"
    )
    training, sleeping = tasks()
    echo(f"training a GPT: {RANKS} ranks")
    trained = measured(training, RANKS)
    print_figures(f"the GPT on {RANKS} ranks; {TITLE}", COLUMNS, rows(trained))
    echo(f"the same {len(trained.losses)} steps in one plain process, to compare the losses")
    torch.set_num_threads(1)  # as ranks have
    plain = list(reference.trained(training.size, RANKS, training.steps()))
    off = difference(trained.losses, plain)
    echo(f"losses: relative difference to the plain run at most {off:.1e} (tolerance {tolerance:g})")
    within = "within what was certified" if trained.within_memory else "ABOVE what was certified"
    echo(f"memory: measured peaks {within} in every step")
    echo()
    echo(f"the same on {SLEEPING_RANKS} ranks whose stages sleep instead of computing")
    slept = measured(sleeping, SLEEPING_RANKS)
    title = f"stages that sleep, {SLEEPING_RANKS} ranks; {TITLE}"
    print_figures(title, COLUMNS, rows(slept))
    fixed, planned = slept.ways[1], slept.ways[-1]
    demo_page.save(html, fixed.file, planned.file, (title, COLUMNS, rows(slept)))
    return off <= tolerance and trained.within_memory and slept.within_memory


def tasks() -> tuple[Task, Task]:
    """Return the training of the GPT, and the same batches on stages that sleep."""
    from optpipe_runtime.demo.gpt import Size
    from optpipe_runtime.fidelity.paced import Times
    from optpipe_runtime.fidelity.packed import Task

    size = Size(width=128, context=LONGEST)
    return (
        Task(MICROBATCHES, DOCUMENTS, rounds=8, size=size),
        Task(MICROBATCHES, DOCUMENTS, rounds=12, size=size, paced_ms=Times(20.0, 20.0, 12.0, 0.0, saved=2)),
    )


def measured(task: Task, ranks: int) -> Result:
    """Start the ranks; return what they measured."""
    from optpipe_runtime.fidelity.packed import Result

    return answered_on_ranks(Result, ranks, "optpipe_runtime.fidelity.packed", task)


def rows(result: Result) -> list[list[str]]:
    """Return a row of texts for each way, for `COLUMNS`."""
    return [_row(way, result.ways[-1]) for way in result.ways]


def _row(way: Way, planned: Way) -> list[str]:
    predicted, taken = median(way.predicted_ms), median(way.measured_ms)
    off = median(ms / expected - 1 for ms, expected in zip(way.measured_ms, way.predicted_ms, strict=True))
    cells = [way.name, f"{predicted:.0f}", f"{taken:.0f}", f"{off:+.1%}"]
    if way is planned:
        return [*cells, "", ""]
    gain = gain_of(_less(planned.measured_ms, way.measured_ms))
    expected = median(_less(planned.predicted_ms, way.predicted_ms))
    return [*cells, f"{gain.median:.1%} ({gain.low:.1%} to {gain.high:.1%})", f"{expected:.1%}"]


def _less(planned: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return how much less time each batch takes, as a share."""
    return [1 - ours / theirs for ours, theirs in zip(planned, other, strict=True)]
