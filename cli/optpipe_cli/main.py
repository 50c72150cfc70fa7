"""`optpipe` as a program: how it ends, and with which exit code. Nothing is imported before it can be interrupted."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

INTERRUPTED = 130


def main() -> None:
    """Run a command of `optpipe`."""

    def load() -> App:
        from optpipe_cli.app import optpipe

        return optpipe()

    run(load, "optpipe")


def run(load: Callable[[], App], name: str) -> None:
    """Run the commands of the program that `load` makes, and end the process.

    A mistake of the user's ends with one sentence on stderr and exit code 2.
    """
    try:
        code = _exit_code(load, name)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    sys.exit(code)


def _exit_code(load: Callable[[], App], name: str) -> int:
    from cyclopts import CycloptsError

    from optpipe.errors import OptPipeError

    try:
        load()(sys.argv[1:])
        return 0
    except CycloptsError as error:
        if isinstance(error.__cause__, OptPipeError):
            _print_error(str(error.__cause__))
            return 2
        message = sentence(error)
        end = "" if message.endswith((".", "?")) else "."
        _print_error(f"{message}{end} See {' '.join((name, *(error.command_chain or ())))} --help.")
    except OptPipeError as error:
        _print_error(str(error))
    except OSError as error:  # such as a full disk behind stdout
        has_reader = not isinstance(error, BrokenPipeError)  # `head` ends once it has what it wanted
        if has_reader:
            _print_error(f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}")
        # What is still buffered cannot be written either; without this the interpreter would fail once more at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2 if has_reader else 1  # 1 as `rich` ends
    return 2


def sentence(error: CycloptsError) -> str:
    """What is wrong with the words of a command: the option, its value, and what would be right."""
    from cyclopts import CoercionError, MissingArgumentError, UnusedCliTokensError
    from pydantic import ValidationError

    from optpipe.errors import complained, field_path
    from optpipe_cli.app import option_name

    if isinstance(error.__cause__, ValidationError):  # of a record of options
        complaint = error.__cause__.errors(include_url=False)[0]
        if not complaint["loc"]:
            return complaint["msg"].removeprefix("Value error, ")
        field, *rest = complaint["loc"]
        return complained(complaint, f"--{option_name(str(field))}{field_path(tuple(rest))}")
    if isinstance(error, MissingArgumentError) and error.argument:
        return f"{error.keyword} has no value" if error.keyword else f"{error.argument.name} is missing"
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"{error.unused_tokens[0]!r}: nothing more was expected"
    if isinstance(error, CoercionError) and error.argument and error.token and error.target_type in (int, float):
        expected = "an integer" if error.target_type is int else "a number"
        return f"{error.argument.name} = {error.token.value!r}: {expected} was expected"
    return str(error)


def _print_error(error: str) -> None:
    """Print an error. Lines after its first, such as the grid of a deadlock, are indented: none passes for another."""
    from optpipe.text import printable

    print("error:", "\n  ".join(map(printable, error.split("\n"))), file=sys.stderr)
