"""`optpipe diagnose`: a trace in, the cause and the cure out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optpipe_cli.measured import Chunks, Devices, Microbatches, Shape, WeightShare
from optpipe_cli.options import numbers
from optpipe_cli.output import Json, echo, print_figures, print_json, print_table, require_folder, require_writable

if TYPE_CHECKING:
    from rich.table import Table

    from optpipe.diagnose import Diagnosis

BAR = 24  # characters of the whole step
MOST_SAID = 4  # sentences of a kind


def diagnose(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="A trace, the traces of all ranks, or their folder.")
    ],
    form: Annotated[
        str | None,
        typer.Option(help="torch-trace, primus, straggler, megatron-timers or csv. Default: as the files look."),
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option(help="Write lines for torch, megatron, primus or optpipe. Default: as the form says."),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Layers of a stage: of all, or of each with commas between.")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(help="How many activations of a stage a device may hold. Default: as many as the fullest held."),
    ] = None,
    weight_share: WeightShare = None,
    time_limit_s: Annotated[
        float, typer.Option("--time-limit", min=0, help="Seconds for the search of a schedule; 0: none.")
    ] = 10.0,
    microbatches: Microbatches = None,
    devices: Devices = None,
    chunks: Chunks = 1,
    shape: Shape = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with pictures.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Write the files of cures here.")
    ] = None,
    json: Json = False,
) -> None:
    """Say where the time of the steps in a trace goes, why, and what to change in the stack that ran them."""
    from optpipe.diagnose import diagnose as find
    from optpipe.measured.readers import RunFacts
    from optpipe_cli.console import new_console

    require_writable(html)
    require_folder(output)
    counts = numbers("layers", layers, "layers of all stages, or of each with commas between") or []
    with new_console(stderr=True).status("reading") as status:
        diagnosis = find(
            *files,
            form=form,
            stack=stack,
            layers=counts,
            memory=memory,
            weight_share=weight_share,
            time_limit_s=time_limit_s,
            run=RunFacts(microbatches, devices, chunks, shape),
            told=lambda what: status.update(f"trying: {what}"),
        )
    if html:
        from optpipe.diagnose.page import picture

        picture(diagnosis).save(html)
    written = [*_written(diagnosis, output)] if output else []
    if json:
        print_json(diagnosis.to_dict())
        return
    report(diagnosis)
    best = diagnosis.cures.cures[0] if diagnosis.cures.cures else None
    if best and best.file and not output:
        echo(f"--output FOLDER writes {best.file[0]}")
    for path in (*written, *([html] if html else [])):
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
    from optpipe.diagnose.losses import NAMES

    step, rows = diagnosis.losses.measured_ms, []
    for part in diagnosis.losses.parts:
        share, mean = part.ms / step, part.mean_ms / step.mean()
        shares = (f"{mean:.1%}", f"{share.min():.1%}", f"{share.max():.1%}")
        rows.append([NAMES[part.name], "█" * round(BAR * max(0.0, mean)), f"{part.mean_ms:.1f}", *shares])
    print_figures("", ("where the time goes", "", "mean: ms", "of a step", "least", "most"), rows, names=2)


def _cures(diagnosis: Diagnosis) -> Table:
    from rich.table import Table

    table = Table(box=None)
    for name in ("cure", "a step: ms", "less", "at most", "activations"):
        table.add_column(name, no_wrap=name != "cure", justify="left" if name == "cure" else "right")
    for cure in diagnosis.cures.cures:
        held = f"{max(cure.activations):g} (today {max(diagnosis.cures.held):g})"
        table.add_row(cure.title, f"{cure.ms.mean():.5g}", f"{cure.gain:.1%}", f"{cure.most:.1%}", held)
    return table


def _written(diagnosis: Diagnosis, folder: Path) -> Iterator[Path]:
    from optpipe.files import write_file

    for cure in diagnosis.cures.cures:
        if cure.file:
            path = folder / cure.file[0]
            write_file(path, cure.file[1])
            yield path
