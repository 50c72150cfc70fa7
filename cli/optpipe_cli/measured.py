"""`optpipe problem from`: measurements of another program become a problem file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe_cli.options import numbers, register
from optpipe_cli.output import Json, ProblemOutput, echo, print_figures, print_json, require_writable

if TYPE_CHECKING:
    from optpipe.measured.measurements import Measurements

WeightShare = Annotated[float | None, typer.Option(help="W's share of a backward that was measured whole. Default: 0.")]
Microbatches = Annotated[
    int | None, typer.Option(min=1, max=65536, help="Micro-batches a step, which megatron-timers do not say.")
]
Devices = Annotated[
    int | None, typer.Option(min=1, max=4096, help="Devices of the pipeline in megatron-timers. Default: all ranks.")
]
Chunks = Annotated[int, typer.Option(min=1, max=4096, help="Stages a device in megatron-timers.")]
Shape = Annotated[
    str | None,
    typer.Option(help="How the stages of a device are placed: looped or v. Default: as the times of primus tell."),
]
app = typer.Typer(help="Make a problem of what another program has measured.", no_args_is_help=True)


@app.callback()
def problem() -> None:
    """Make a problem of what another program has measured."""


def from_(
    form: Annotated[
        str,
        typer.Argument(
            metavar="torch-trace|primus|straggler|megatron-timers|csv", help="The program that wrote the files."
        ),
    ],
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="torch-trace: a file of each rank, or their folder; primus: the folder."
        ),
    ],
    activation_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]", help="Bytes that a stage saves in a forward: one number, or one for each stage."
        ),
    ] = None,
    activation_budget_bytes: Annotated[
        int | None, typer.Option(min=0, help="A device's budget. Default: what the measured order holds at most.")
    ] = None,
    weight_share: WeightShare = None,
    microbatches: Microbatches = None,
    devices: Devices = None,
    chunks: Chunks = 1,
    shape: Shape = None,
    step: Annotated[
        int | None,
        typer.Option(min=0, help="Take one step, with each micro-batch's own times; straggler: the last."),
    ] = None,
    replica: Annotated[
        int | None, typer.Option(min=0, help="Of which replica, where several were measured. Default: the first.")
    ] = None,
    output: ProblemOutput = None,
    schedule: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the order that ran here, as a schedule file.")
    ] = None,
    json: Json = False,
) -> None:
    """Make a problem of op times that another program has measured; tell what they do not say, and what was not used.

    Exit code 1: no order is known that --schedule could write.
    """
    from optpipe.measured.convert import problem_from

    require_writable(output)
    require_writable(schedule)
    sizes = numbers("activation_bytes", activation_bytes, "bytes of all stages, or of each with commas between")
    measurements = problem_from(
        form,
        *files,
        activation_bytes=sizes,
        activation_budget_bytes=activation_budget_bytes,
        weight_share=weight_share,
        microbatches=microbatches,
        devices=devices,
        chunks=chunks,
        shape=shape,
        step=step,
        replica=replica,
    )
    if output:
        measurements.problem.save(output)
    if schedule and measurements.schedule:
        measurements.schedule.save(schedule)
    if json:
        print_json(measurements.to_dict())
    else:
        _print_times(measurements)
        for line in _lines(measurements):
            echo(line)
        for what, path in (("problem", output), ("schedule", schedule if measurements.schedule else None)):
            if path:
                echo(f"{what} file: {path}")
    if schedule and not measurements.schedule:
        echo(f"{schedule}: not written, as the measured order is not used", err=True)
        raise typer.Exit(1)


register(app, None, from_)


def _print_times(measurements: Measurements) -> None:
    from optpipe.model.ops import Kind

    kinds = [kind for kind in (Kind.F, Kind.B, Kind.W, Kind.BW) if any(kind in times for times in measurements.stages)]
    rows = []
    for s, times in enumerate(measurements.stages):
        cells = [f"{times[kind].ms:.3f} ± {times[kind].iqr_ms:.3f}" if kind in times else "–" for kind in kinds]
        count = sum(times[kind].count for kind in kinds if kind in times)
        rows.append([str(s), str(measurements.problem.stages[s].device), *cells, f"{count} times"])
    columns = ("stage", "device", *(kind.name for kind in kinds), "measured")
    print_figures("times in ms: median ± interquartile range", columns, rows, names=0)


def _lines(measurements: Measurements) -> Iterator[str]:
    if measurements.message:
        yield f"a message: {measurements.message.ms:.3f} ± {measurements.message.iqr_ms:.3f} ms"
    if measurements.measured_ms is not None:
        yield f"a step as measured: {measurements.measured_ms:.1f} ms"
        if measurements.replayed_ms is not None:
            off = measurements.replayed_ms / measurements.measured_ms - 1
            yield f"the same order by these times: {measurements.replayed_ms:.1f} ms ({off:+.1%})"
    yield "not measured:"
    for sentence in measurements.unknown:
        yield f"  {sentence}"
    if measurements.unused:
        yield "not used:"
    for sentence in measurements.unused:
        yield f"  {sentence}"
