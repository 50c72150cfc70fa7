"""`optpipe export` and `optpipe import`: between schedule files and the forms of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optpipe_cli.output import Json, SchedulePath, echo, require_writable
from optpipe_cli.schedule_commands import tell


def export(
    schedule: SchedulePath,
    to: Annotated[
        str,
        typer.Option(metavar="torch-csv|torch-comms|torch-comms-waits|megatron|primus|json", help="The form to write."),
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it here, not to stdout.")] = None,
    without_offload: Annotated[
        bool, typer.Option("--without-offload", help="Leave out offloads, drops and reloads; tell the memory it costs.")
    ] = False,
) -> None:
    """Write a schedule in the form that another program takes, such as PyTorch's pipelining or Megatron-LM."""
    from optpipe.files import write_file
    from optpipe.formats.convert import export as exported_as
    from optpipe.schedule import Schedule

    require_writable(output)
    exported = exported_as(Schedule.load(schedule), to, without_offload)
    for sentence in exported.costs or [f"note: {misfit}" for misfit in exported.misfits]:
        echo(sentence, err=True)
    if output:
        write_file(output, exported.text)
    else:
        typer.echo(exported.text, nl=False)


def import_(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="PyTorch's CSV if named .csv; otherwise lists of op texts.")
    ],
    problem: Annotated[Path, typer.Option(help="The problem that the schedule is for.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the schedule file here.")],
    json: Json = False,
) -> None:
    """Read a schedule that another program wrote, write it as a schedule file, and tell what `check` says of it."""
    from optpipe.formats.convert import import_schedule
    from optpipe.model.problem import Problem
    from optpipe.schedule import check

    require_writable(output)
    imported = import_schedule(file, Problem.load(problem))
    imported.save(output)
    tell(imported, check(imported.problem, imported), json)
