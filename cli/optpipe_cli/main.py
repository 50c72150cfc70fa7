"""`optpipe` as a program: how it ends, and with which exit code. Nothing is imported before it can be interrupted."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

INTERRUPTED = 130


def main() -> None:
    """Run a command of `optpipe`."""

    def load() -> typer.Typer:
        from optpipe_cli.app import app

        return app

    run(load, "optpipe")


def run(load: Callable[[], typer.Typer], name: str) -> None:
    """Run the commands that `load` imports, and end the process.

    A mistake of the user's ends with one sentence on stderr and exit code 2.
    """
    try:
        code = _exit_code(load, name)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    sys.exit(code)


def _exit_code(load: Callable[[], typer.Typer], name: str) -> Any:
    import typer

    from optpipe.errors import OptPipeError

    # What typer raises for words that a command does not take; it has no name of its own for it.
    wrong_words: Any = typer.BadParameter.__base__
    try:
        return load()(prog_name=name, standalone_mode=False)
    except wrong_words as error:
        if message := error.format_message():  # empty where help was shown instead
            end = "" if message.endswith((".", "?")) else "."
            _tell(f"{message}{end} See {_command(error)} --help.")
    except OptPipeError as error:
        _tell(str(error))
    except OSError as error:  # such as a full disk behind stdout
        _tell(f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}")
        # What is still buffered cannot be written either; without this the interpreter would fail once more at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 2


def _tell(error: str) -> None:
    """Print an error. Lines after its first, such as the grid of a deadlock, are indented: none passes for another."""
    from optpipe.printable import printable

    print("error:", "\n  ".join(map(printable, error.split("\n"))), file=sys.stderr)


def _command(error: Any) -> str:
    """The command that was called, such as `optpipe solve`."""
    return str(error.ctx.command_path) if error.ctx else "optpipe"
