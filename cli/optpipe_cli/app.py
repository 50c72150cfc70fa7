"""`optpipe`: registers every command. Each imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from optpipe_cli import (
    cache,
    calibrate,
    compare,
    diagnose,
    example,
    keys,
    measured,
    model,
    plan,
    profile,
    schedule_commands,
    serve,
    solve,
    worker,
)
from optpipe_cli.options import register

app = typer.Typer(
    name="optpipe",
    help="Schedules for pipeline-parallel training: as short as possible, never above the memory limit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(asked: bool) -> None:
    if asked:
        from optpipe import __version__

        typer.echo(f"optpipe {__version__}")
        raise typer.Exit


@app.callback()
def optpipe(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None: ...


register(app, "Start here", example.try_, solve.solve, compare.compare, diagnose.diagnose, plan.plan)
register(app, "Problems", model.model, calibrate.calibrate, profile.profile)
app.add_typer(measured.app, name="problem", rich_help_panel="Problems")
register(
    app,
    "Schedules",
    schedule_commands.show,
    schedule_commands.check,
    schedule_commands.simulate,
    schedule_commands.export,
    schedule_commands.import_,
)
app.add_typer(cache.app, name="cache", rich_help_panel="Schedules")
register(app, "Service", serve.serve, worker.worker)
app.add_typer(keys.app, name="keys", rich_help_panel="Service")
