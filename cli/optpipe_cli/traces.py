"""Traces of other programs: `problem from` makes a problem of them, `diagnose` finds causes and cures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, NonNegativeInt
from rich.table import Table

from optpipe.diagnose import Diagnosis
from optpipe.diagnose import diagnose as find
from optpipe.diagnose.losses import NAMES
from optpipe.diagnose.page import picture
from optpipe.files import write_file
from optpipe.measured.convert import problem_from, recording_from
from optpipe.measured.estimate import Measurements
from optpipe.measured.readers import RunFacts
from optpipe.model.ops import Kind
from optpipe_cli.options import FolderOutput, Json, NewFile, Numbers, Output
from optpipe_cli.output import echo, new_console, print_figures, print_json, print_table

BAR = 24  # characters of the whole step
MOST_SAID = 4  # sentences of a kind
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
        _print_measured(measurements)
        for what, path in (("problem", output), ("schedule", schedule if measurements.schedule else None)):
            if path:
                echo(f"{what} file: {path}")
    if schedule and not measurements.schedule:
        echo(f"{schedule}: not written, as the measured order is not used", err=True)
        raise SystemExit(1)


def _print_measured(measurements: Measurements) -> None:
    kinds = [kind for kind in (Kind.F, Kind.B, Kind.W, Kind.BW) if any(kind in times for times in measurements.stages)]
    rows = []
    for s, times in enumerate(measurements.stages):
        cells = [f"{times[kind].ms:.3f} ± {times[kind].iqr_ms:.3f}" if kind in times else "–" for kind in kinds]
        count = sum(times[kind].count for kind in kinds if kind in times)
        rows.append([str(s), str(measurements.problem.stages[s].device), *cells, f"{count} times"])
    columns = ("stage", "device", *(kind.name for kind in kinds), "measured")
    print_figures("times in ms: median ± interquartile range", columns, rows, names=0)
    if measurements.message:
        echo(f"a message: {measurements.message.ms:.3f} ± {measurements.message.iqr_ms:.3f} ms")
    if measurements.measured_ms is not None:
        echo(f"a step as measured: {measurements.measured_ms:.1f} ms")
        if measurements.replayed_ms is not None:
            off = measurements.replayed_ms / measurements.measured_ms - 1
            echo(f"the same order by these times: {measurements.replayed_ms:.1f} ms ({off:+.1%})")
    for line in ("not measured:", *(f"  {sentence}" for sentence in measurements.unknown)):
        echo(line)
    for line in ("not used:", *(f"  {sentence}" for sentence in measurements.unused)) if measurements.unused else ():
        echo(line)


def diagnose(
    files: Annotated[list[Path], Parameter(help="A trace, the traces of all ranks, or their folder.")],
    /,
    *,
    form: Annotated[str | None, Parameter(help="As of `problem from`. Default: as the files look.")] = None,
    stack: Annotated[str | None, Parameter(help="Write lines for torch, megatron, primus or optpipe.")] = None,
    layers: Annotated[Numbers, Parameter(help="Layers of a stage: of all, or of each with commas between.")] = (),
    memory: Annotated[float | None, Parameter(help="Activations that a device may hold. Default: as today.")] = None,
    weight_share: WeightShare = None,
    time_limit_s: Annotated[NonNegativeFloat, Parameter(help="Seconds for the search of a schedule; 0: none.")] = 10.0,
    run: RunOptions = RunFacts(),
    html: Annotated[NewFile, Parameter(help="Write a page with pictures.")] = None,
    output: FolderOutput = None,
    json: Json = False,
) -> None:
    """`optpipe diagnose`."""
    with new_console(stderr=True).status("reading") as status:
        diagnosis = find(
            *recording_from(files, form, run),
            stack=stack,
            layers=layers,
            memory=memory,
            weight_share=weight_share,
            time_limit_s=time_limit_s,
            report=lambda what: status.update(f"trying: {what}"),
        )
    if html:
        picture(diagnosis).save(html)
    files_of_cures = {output / cure.file[0]: cure.file[1] for cure in diagnosis.cures.cures if cure.file and output}
    for path, text in files_of_cures.items():
        write_file(path, text)
    if json:
        print_json(diagnosis.to_dict())
        return
    report(diagnosis)
    best = diagnosis.cures.cures[0] if diagnosis.cures.cures else None
    if best and best.file and not output:
        echo(f"--output FOLDER writes {best.file[0]}")
    if output and not files_of_cures:
        echo(f"written: nothing to {output}, as no cure needs a file")
    for path in (*files_of_cures, *([html] if html else [])):
        echo(f"written: {path}")


def report(diagnosis: Diagnosis) -> None:
    """Print a diagnosis on about one screen."""
    runs, losses, cures = diagnosis.runs, diagnosis.losses, diagnosis.cures
    step = losses.measured_ms
    echo(
        f"{diagnosis.form}: {len(runs.steps)} step{'s' * (len(runs.steps) > 1)} of {len(runs.replicas)} "
        f"replica{'s' * (len(runs.replicas) > 1)}, {len(runs.where)} stages on {runs.devices} devices; a step takes "
        f"{step.mean():.5g} ms ({step.min():.5g} to {step.max():.5g}); replayed within {losses.replay_error:.2%}"
    )
    rows = []
    for part in losses.parts:
        share, mean = part.ms / step, part.mean_ms / step.mean()
        shares = (f"{mean:.1%}", f"{share.min():.1%}", f"{share.max():.1%}")
        rows.append([NAMES[part.name], "█" * round(BAR * max(0.0, mean)), f"{part.mean_ms:.1f}", *shares])
    print_figures("", ("where the time goes", "", "mean: ms", "of a step", "least", "most"), rows, names=2)
    for sentence in diagnosis.causes or ["nothing costs more than 3% of a step"]:
        echo(f"cause: {sentence}")
    if cures.cures:
        table = Table(box=None)
        for name in ("cure", "a step: ms", "less", "at most", "activations"):
            table.add_column(name, no_wrap=name != "cure", justify="left" if name == "cure" else "right")
        for cure in cures.cures:
            held = f"{max(cure.activations):g} (today {max(cures.held):g})"
            table.add_row(cure.title, f"{cure.ms.mean():.5g}", f"{cure.gain:.1%}", f"{cure.most:.1%}", held)
        print_table(table)
        for cure in cures.cures:
            echo(f"to {cure.title}:")
            for line in cure.lines:
                echo(f"  {line}")
    else:
        echo("no cure gains 1% within what is known")
    sentences_of = {"would help": cures.asked, "taken to be so": diagnosis.assumed, "not used": runs.unused}
    for what, sentences in sentences_of.items():
        for sentence in sentences[:MOST_SAID]:
            echo(f"{what}: {sentence}")
        if len(sentences) > MOST_SAID:
            echo(f"{what}: {len(sentences) - MOST_SAID} more, in --json")
