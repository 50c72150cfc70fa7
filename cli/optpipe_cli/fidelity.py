"""Predicted and measured times of steps side by side, for `optpipe bench runtime` and `optpipe demo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from optpipe_cli.launch import answered_on_ranks
from optpipe_cli.output import print_figures

if TYPE_CHECKING:
    from optpipe_runtime.fidelity.cases import Row, Task

COLUMNS = ("schedule", "stages", "predicted", "measured", "off by", "peak predicted", "measured", "losses off by")


def measured(task: Task, ranks: int) -> list[Row]:
    """Start the ranks; return the cases for which a schedule was found."""
    from optpipe_runtime.fidelity.cases import Row

    return answered_on_ranks(list[Row], ranks, "optpipe_runtime.fidelity.cases", task)


def difference(losses: Sequence[float], plain: Sequence[float]) -> float:
    """Return the largest relative difference of a loss."""
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, plain, strict=True))


def show(rows: Sequence[Row], title: str, plain: Sequence[float] | None = None) -> None:
    """Print a table of the rows; `plain` are the losses of the same steps in one plain process."""
    print_figures(f"{title}; ms a step: median ± interquartile range", COLUMNS, [cells(row, plain) for row in rows], 2)


def cells(row: Row, plain: Sequence[float] | None = None) -> list[str]:
    """Return a case as texts, for `COLUMNS`."""
    from optpipe.sizes import bytes_text

    return [
        row.found_by,
        row.case.stages,
        f"{row.predicted_ms:.1f}",
        f"{row.measured_ms:.1f} ± {row.spread_ms:.1f}",
        f"{row.deviation:+.1%}",
        bytes_text(max(row.predicted_peak)),
        bytes_text(max(row.measured_peak)),
        "" if plain is None else f"{difference(row.losses, plain):.1e}",
    ]
