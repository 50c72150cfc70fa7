"""`optpipe diagnose`: a trace in, the cause and the cure out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat
from rich.table import Table

from optpipe.diagnose import Diagnosis
from optpipe.diagnose import diagnose as find
from optpipe.diagnose.losses import NAMES
from optpipe.diagnose.page import picture
from optpipe.files import write_file
from optpipe.measured.readers import RunFacts
from optpipe_cli.measured import RunOptions, WeightShare
from optpipe_cli.options import Numbers
from optpipe_cli.output import FolderOutput, Json, NewFile, echo, print_figures, print_json, print_table
from optpipe_cli.terminal import new_console

BAR = 24  # characters of the whole step
MOST_SAID = 4  # sentences of a kind


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
            *files,
            form=form,
            stack=stack,
            layers=layers,
            memory=memory,
            weight_share=weight_share,
            time_limit_s=time_limit_s,
            run=run,
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
    _print_losses(diagnosis)
    for sentence in diagnosis.causes or ["nothing costs more than 3% of a step"]:
        echo(f"cause: {sentence}")
    if cures.cures:
        print_table(_cures(diagnosis))
        for line in cures.cures[0].lines:
            echo(f"  {line}")
    else:
        echo("no cure gains 1% within what is known")
    for what, sentences in (("would help", cures.asked), ("taken to be so", runs.assumed), ("not used", runs.unused)):
        for sentence in sentences[:MOST_SAID]:
            echo(f"{what}: {sentence}")
        if len(sentences) > MOST_SAID:
            echo(f"{what}: {len(sentences) - MOST_SAID} more, in --json")


def _print_losses(diagnosis: Diagnosis) -> None:
    step, rows = diagnosis.losses.measured_ms, []
    for part in diagnosis.losses.parts:
        share, mean = part.ms / step, part.mean_ms / step.mean()
        shares = (f"{mean:.1%}", f"{share.min():.1%}", f"{share.max():.1%}")
        rows.append([NAMES[part.name], "█" * round(BAR * max(0.0, mean)), f"{part.mean_ms:.1f}", *shares])
    print_figures("", ("where the time goes", "", "mean: ms", "of a step", "least", "most"), rows, names=2)


def _cures(diagnosis: Diagnosis) -> Table:
    table = Table(box=None)
    for name in ("cure", "a step: ms", "less", "at most", "activations"):
        table.add_column(name, no_wrap=name != "cure", justify="left" if name == "cure" else "right")
    for cure in diagnosis.cures.cures:
        held = f"{max(cure.activations):g} (today {max(diagnosis.cures.held):g})"
        table.add_row(cure.title, f"{cure.ms.mean():.5g}", f"{cure.gain:.1%}", f"{cure.most:.1%}", held)
    return table
