"""`optpipe`: registers every command. Each imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import typer

from optpipe_cli import (
    cache,
    compare,
    demo,
    example,
    formats,
    keys,
    model,
    profile,
    schedule_commands,
    serve,
    solve,
    worker,
)
from optpipe_cli.bench.commands import app as bench_app
from optpipe_cli.options import register

app = typer.Typer(
    name="optpipe",
    help="Schedules for pipeline-parallel training: as short as possible, never above the memory limit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
register(
    app,
    solve.solve,
    compare.compare,
    schedule_commands.check,
    schedule_commands.simulate,
    schedule_commands.show,
    model.model,
    formats.export,
    profile.profile,
    serve.serve,
    worker.worker,
    demo.demo,
)
app.command(name="try")(example.try_)
app.command(name="import")(formats.import_)
app.add_typer(cache.app, name="cache")
app.add_typer(keys.app, name="keys")
app.add_typer(bench_app, name="bench")


# What typer raises for words that a command does not take; it has no name of its own for it.
WrongWords: Any = typer.BadParameter.__base__


def main() -> None:
    """Run a command. A mistake of the user's ends with one sentence on stderr and exit code 2."""
    from optpipe.errors import OptPipeError

    try:
        sys.exit(app(prog_name="optpipe", standalone_mode=False))
    except WrongWords as error:
        if message := error.format_message():  # empty where help was shown instead
            end = "" if message.endswith((".", "?")) else "."
            print(f"error: {message}{end} See {_command(error)} --help.", file=sys.stderr)
        sys.exit(2)
    except OptPipeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # such as a full disk behind stdout
        print(f"error: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}", file=sys.stderr)
        # What is still buffered cannot be written either; without this the interpreter would fail once more at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(2)


def _command(error: Any) -> str:
    """The command that was called, such as `optpipe solve`."""
    return str(error.ctx.command_path) if error.ctx else "optpipe"
