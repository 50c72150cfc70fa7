"""`optpipe`: every command in one place. Each imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import contextlib
import os
import sys

import typer

from optpipe_cli import bench, cache, compare, demo, inspect, keys, profile, serve, solve, worker

app = typer.Typer(
    name="optpipe",
    help="Schedules for pipeline-parallel training: as short as possible, never above the memory limit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    solve.solve,
    compare.compare,
    inspect.check,
    inspect.simulate,
    inspect.show,
    profile.profile,
    serve.serve,
    worker.worker,
    demo.demo,
):
    app.command()(command)
app.add_typer(cache.app, name="cache")
app.add_typer(keys.app, name="keys")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Runs a command. A user's mistake is one sentence on stderr and exit code 2."""
    from optpipe.errors import OptPipeError

    try:
        app()
    except OptPipeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # such as a full disk behind stdout
        print(f"error: {f'{error.filename}: ' if error.filename else ''}{error.strerror or error}", file=sys.stderr)
        with contextlib.suppress(
            OSError
        ):  # what is still buffered cannot be written either: the exit must not trip over it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(2)
