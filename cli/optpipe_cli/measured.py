"""`optpipe problem from`: measurements of another program become a problem file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt

from optpipe.measured.convert import problem_from
from optpipe.measured.measurements import Measurements
from optpipe.measured.readers import RunFacts
from optpipe.model.ops import Kind
from optpipe_cli.options import Numbers
from optpipe_cli.output import Json, NewFile, Output, echo, print_figures, print_json

RunOptions = Annotated[RunFacts, Parameter(name="*")]
WeightShare = Annotated[float | None, Parameter(help="W's share of a backward that was measured whole. Default: 0.")]


def from_(
    form: Annotated[str, Parameter(help="torch-trace, primus, straggler, megatron-timers or csv.")],
    files: Annotated[list[Path], Parameter(help="torch-trace: the files, or their folder; primus: the folder.")],
    /,
    *,
    activation_bytes: Annotated[Numbers | None, Parameter(help="What a stage saves in a forward.")] = None,
    activation_budget_bytes: Annotated[NonNegativeInt | None, Parameter(help="Default: what was held at most.")] = None,
    weight_share: WeightShare = None,
    run: RunOptions = RunFacts(),
    step: Annotated[NonNegativeInt | None, Parameter(help="Take one step, with each micro-batch's own times.")] = None,
    replica: Annotated[NonNegativeInt | None, Parameter(help="Of which replica. Default: the first.")] = None,
    output: Output = None,
    schedule: Annotated[NewFile, Parameter(help="Write the order that ran here, as a schedule file.")] = None,
    json: Json = False,
) -> None:
    """`optpipe problem from`."""
    measurements = problem_from(
        form,
        *files,
        activation_bytes=activation_bytes,
        activation_budget_bytes=activation_budget_bytes,
        weight_share=weight_share,
        step=step,
        replica=replica,
        **run._asdict(),
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
        raise SystemExit(1)


def _print_times(measurements: Measurements) -> None:
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
