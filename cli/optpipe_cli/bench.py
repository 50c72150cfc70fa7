"""`optpipe bench runtime`: how good predictions are on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optpipe_cli import fidelity
from optpipe_cli.extras import need
from optpipe_cli.output import Json, echo, print_json

if TYPE_CHECKING:
    from optpipe_runtime.fidelity.cases import Row, Task

PACED_RANKS, COMPUTING_RANKS = 4, 2
PACED_MICROBATCHES, COMPUTING_MICROBATCHES = 8, 4

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


@app.command()
def runtime(
    steps: Annotated[int, typer.Option(help="Steps of each schedule that count.", min=2)] = 12,
    json: Json = False,
) -> None:
    """Compare steps and memory of many schedules with their predictions: first of stages that take their time without
    computing, on four ranks, then of the demo's model on two."""
    need("runtime")
    import torch

    from optpipe_runtime.demo import reference
    from optpipe_runtime.fidelity.cases import WARM_UP

    paced = fidelity.measured(paced_task(steps), PACED_RANKS)
    if not json:
        fidelity.show(paced, f"stages that sleep, {PACED_RANKS} ranks")
        echo()
    task = computing_task(steps)
    computed = fidelity.measured(task, COMPUTING_RANKS)
    torch.set_num_threads(1)  # as ranks have
    plain = reference.losses(task.size, COMPUTING_RANKS, task.microbatches, WARM_UP + task.steps)
    if json:
        print_json({"paced": [_figures(row) for row in paced], "computed": [_figures(row, plain) for row in computed]})
    else:
        fidelity.show(computed, f"the demo's model, {COMPUTING_RANKS} ranks", plain)


def _figures(row: Row, plain: Sequence[float] | None = None) -> dict[str, Any]:
    figures = {"measured_ms": row.measured_ms, "spread_ms": row.spread_ms, "deviation": row.deviation}
    return asdict(row) | figures | {"loss_difference": fidelity.difference(row.losses, plain) if plain else None}


def paced_task(steps: int) -> Task:
    """Return ten schedules of all placements; half of them offload."""
    from optpipe_runtime.fidelity.cases import Case, Task
    from optpipe_runtime.fidelity.paced import Times

    cases = [
        Case("1f1b"),
        Case("zb-h1"),
        Case("adaoffload", memory=2.5),
        Case("naive", memory=2.0),
        Case("interleaved", 2),
        Case("po-h", 2, memory=2.5),
        Case("po-f", 2, memory=2.5),
        Case("zb-v", 2, "v"),
        Case("v-min", 2, "v"),
        Case("lns", 2, "v", memory=1.5),
    ]
    return Task(cases, PACED_MICROBATCHES, steps, Times(20.0, 20.0, 16.0, 12.0))


def computing_task(steps: int) -> Task:
    """Return 1F1B and zero bubble with memory for all; PipeOffload and the solver with less than interleaved 1F1B
    needs; the solver with less than 1F1B needs where nothing leaves, without and with cheap recomputation."""
    from optpipe_runtime.fidelity.cases import Case, Task

    return Task(
        [
            Case("1f1b"),
            Case("zb-h1"),
            Case("po-f", 2, memory=1.8),
            Case("auto", 2, memory=1.8),
            Case("auto", memory=1.7, offloads=False),
            Case("auto", memory=1.7, recompute=("cheap", "full"), offloads=False),
        ],
        COMPUTING_MICROBATCHES,
        steps,
    )
