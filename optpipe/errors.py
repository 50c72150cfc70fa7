"""The errors that users see. Each message is one sentence: the field, its value, and what would be right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

# Beyond it only their number is reported: each takes time and memory, and a hostile file has a hundred thousand.
MOST_COMPLAINTS = 1000


class OptPipeError(Exception):
    """Base of every error that OptPipe raises on purpose."""


class InputError(OptPipeError, ValueError):
    """An argument, a file or a request is not what the call or the format asks for."""


class ScheduleError(OptPipeError, ValueError):
    """A schedule cannot be simulated: an op is missing or of another problem, or ops wait for each other.

    The last is a `DeadlockError`.
    """


class SolverError(OptPipeError, RuntimeError):
    """The solver's process failed, and not because of the problem."""


class FrameError(SolverError):
    """The solver's process wrote something that is not a frame of the protocol."""


def field_path(location: tuple[int | str, ...]) -> str:
    """Writes `("stages", 2, "forward_ms")` as `stages[2].forward_ms`."""
    path = ""
    for key in location:
        path += f"[{key}]" if isinstance(key, int) else f".{key}" if path else key
    return path


def input_error(error: ValidationError, what: str) -> InputError:
    """Makes one sentence of the first of pydantic's complaints about `what`, with the number of the others."""
    if error.error_count() > MOST_COMPLAINTS:
        return InputError(f"{what}: {error.error_count()} of its fields are wrong or missing")
    complaints = error.errors(include_url=False)
    first = complaints[0]
    path = field_path(first["loc"])
    message = f"{what}: {path}" if path else what
    if first["type"] == "missing":
        message += " is missing"
    elif first["type"] == "extra_forbidden":
        message += " is not a field of this format"
    elif first["type"] == "value_error":
        message += f": {first['msg'].removeprefix('Value error, ')}"
    else:
        message = complained(first, message) if path else f"{what}: {_told(first)}"
    if len(complaints) > 1:
        message += f" (and {len(complaints) - 1} more)"
    return InputError(message)


def complained(complaint: Mapping[str, Any], field: str) -> str:
    """Makes one sentence of a complaint of pydantic: the field, its value, and what would be right."""
    return f"{field} = {_shown(complaint['input'])}: {_told(complaint)}"


def _told(complaint: Mapping[str, Any]) -> str:
    return str(complaint["msg"][0].lower() + complaint["msg"][1:])


def _shown(value: Any) -> str:
    """A value, cut so that hostile input is not repeated in full."""
    if isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
