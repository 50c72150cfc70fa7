"""The errors that users see. Each message is one sentence: the field, its value, and what would be right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, get_args

from optpipe.text import printable

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

# Beyond it only their number is reported: each takes time and memory, and a hostile file has a hundred thousand.
MOST_COMPLAINTS = 1000
# The forms of a figure that is one number or a list: in pydantic's path of a field, not in ours.
A_NUMBER, A_LIST = "(a number)", "(a list)"
MOST_SHOWN, LONGEST_SHOWN = 3, 120  # of the other fields that complaints are about, and their characters in all


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
        if key in (A_NUMBER, A_LIST):
            continue
        name = key if isinstance(key, int) else printable(key, LONGEST_SHOWN)
        path += f"[{name}]" if isinstance(name, int) else f".{name}" if path else name
    return path


def input_error(error: ValidationError, what: str, record: type[BaseModel] | None = None) -> InputError:
    """Makes one sentence of one of pydantic's complaints about `what`, and names the fields of the others.

    A wrong format comes first, then an unknown field: both explain complaints about other fields. If `record` is what
    was expected, the field that may be meant is named.
    """
    if error.error_count() > MOST_COMPLAINTS:
        return InputError(f"{what}: {error.error_count()} of its fields are wrong or missing")
    complaints = error.errors(include_url=False)
    first = min(complaints, key=lambda each: (each["loc"] != ("format",), each["type"] != "extra_forbidden"))
    path = field_path(first["loc"])
    message = f"{what}: {path}" if path else what
    if first["type"] == "missing":
        message += " is missing"
    elif first["type"] == "extra_forbidden":
        *place, name = first["loc"]
        missing = [each["loc"][-1] for each in complaints if each["type"] == "missing" and [*each["loc"][:-1]] == place]
        meant = _nearest(str(name), map(str, missing))
        complaints = [each for each in complaints if not meant or each["loc"] != (*place, meant)]
        message += f" is not a field of this format{_ask(meant or _nearest(str(name), _fields(record, place)), ': ')}"
    elif first["loc"] == ("format",) and first["type"] == "literal_error":
        found, expected = str(first["input"]), first["ctx"]["expected"]  # both such as optpipe.problem/3
        if found.startswith("optpipe.problem/") and "schedule" in expected:
            hint = f"a problem, a schedule is expected: make one with optpipe solve {what} -o S.json"
            return InputError(f"{what} is {hint}")
        if found.startswith("optpipe.schedule/") and "problem" in expected:
            hint = "a schedule, a problem is expected: its field `problem` has the one that it is for"
            return InputError(f"{what} is {hint}")
        return InputError(complained(first, f"{what}: format"))
    elif first["type"] == "value_error":
        message += f": {first['msg'].removeprefix('Value error, ')}"
    else:
        message = complained(first, message) if path else f"{what}: {_expected(first)}"
    places = {each["loc"][:n] for each in complaints for n in range(len(each["loc"]))}  # what they are parts of
    others = [field_path(each["loc"]) for each in complaints if each is not first and each["loc"] not in places]
    if others:
        first_names = ", ".join(others[:MOST_SHOWN]) + (", ..." if len(others) > MOST_SHOWN else "")
        message += f" (and {len(others)} more: {first_names[:LONGEST_SHOWN]})"
    return InputError(printable(message))  # it may be logged


def did_you_mean(word: str, words: Iterable[str], before: str) -> str:
    """Asks for the nearest of the words in any case, such as `; did you mean gpipe?` with "; " before; "" if none is
    near."""
    return _ask(_nearest(word, words), before)


def _nearest(word: str, words: Iterable[str]) -> str | None:
    """The nearest of the words in any case; None if none is near."""
    by_lower_case = {each.lower(): each for each in words}
    near = get_close_matches(word[:100].lower(), list(by_lower_case), n=1)
    return by_lower_case[near[0]] if near else None


def _ask(meant: str | None, before: str) -> str:
    return f"{before}did you mean {meant}?" if meant else ""


def _fields(record: Any, place: Iterable[int | str]) -> Iterable[str]:
    """The fields of the record at this place in a record; none if there is no record, or a choice of them."""
    for key in place:
        if isinstance(key, str) and record is not None:
            field = record.model_fields.get(key)
            records = [each for each in _types(field.annotation) if hasattr(each, "model_fields")] if field else []
            record = records[0] if len(records) == 1 else None
    return record.model_fields if record is not None else ()


def _types(annotation: Any) -> Iterator[Any]:
    """The types that an annotation such as `tuple[Device, ...]` consists of."""
    yield annotation
    for part in get_args(annotation):
        yield from _types(part)


def complained(complaint: Mapping[str, Any], field: str) -> str:
    """Makes one sentence of a complaint of pydantic: the field, its value, and what would be right."""
    return f"{field} = {shown(complaint['input'])}: {_expected(complaint)}"


def _expected(complaint: Mapping[str, Any]) -> str:
    if complaint["type"] in ("too_short", "string_too_short"):
        return f"a length of at least {complaint['ctx']['min_length']} was expected"
    return str(complaint["msg"][0].lower() + complaint["msg"][1:])


def shown(value: Any) -> str:
    """A value for a sentence, cut so that hostile input is not repeated in full."""
    if isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
