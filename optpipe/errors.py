"""The errors a user can meet. Each message is one sentence: the field, its value, and what would be right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


MOST_COMPLAINTS = (
    1000  # of a file that are looked at: each takes time and memory, and hostile ones have a hundred thousand
)


class OptPipeError(Exception):
    """Base of every error that OptPipe raises on purpose."""


class InputError(OptPipeError, ValueError):
    """What was handed in is not what the format or the call asks for."""


class ScheduleError(OptPipeError, ValueError):
    """A schedule that cannot be simulated: an op is missing or of another problem, or ops wait for each other
    (`DeadlockError`)."""


class SolverError(OptPipeError, RuntimeError):
    """The solver's process failed in a way that is not the problem's fault."""


class FrameError(SolverError):
    """The solver's process wrote what is no answer."""


def field_path(location: tuple[int | str, ...]) -> str:
    """`("stages", 2, "forward_ms")` as `stages[2].forward_ms`."""
    path = ""
    for key in location:
        path += f"[{key}]" if isinstance(key, int) else f".{key}" if path else key
    return path


def input_error(error: ValidationError, what: str) -> InputError:
    """The first of pydantic's complaints as one sentence, with the number of the others."""
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
    """One of pydantic's complaints about a value: the field, the value, and what would be right."""
    return f"{field} = {_shown(complaint['input'])}: {_told(complaint)}"


def _told(complaint: Mapping[str, Any]) -> str:
    return str(complaint["msg"][0].lower() + complaint["msg"][1:])


def _shown(value: Any) -> str:
    """A value short enough for a sentence: hostile input is not echoed back whole."""
    if isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
