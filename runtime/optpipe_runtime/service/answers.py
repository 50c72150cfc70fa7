"""What the client reads of the service's answers. Nothing else in an answer is used."""

from __future__ import annotations

import json
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, FailFast, Field, ValidationError

from optpipe.errors import InputError, input_error
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.options import Placements
from optpipe.schedule import Schedule, check
from optpipe.text import printable
from optpipe_runtime.service.requests import LONGEST_REASON, InvalidAnswerError

MOST_TIMES_STAGES = 16  # a placement that is read has at most so many times the stages of the problem

# What a service says for people: one line, of which the beginning is kept. It is logged.
Line = Annotated[str, AfterValidator(lambda text: printable(text, LONGEST_REASON))]


class JobAnswer(BaseModel):
    """A job that has just been given a problem."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # becomes part of addresses
    problem_version: int = 1


class JobState(BaseModel):
    """The state of a job; also its last event."""

    state: Line
    reason: Line | None = None


class IncumbentEvent(BaseModel):
    """A new incumbent: its number in the job, and the version of the problem that it was found for."""

    seq: Annotated[int, Field(ge=1, le=2**53)]
    problem_version: int | None = None


class _Device(BaseModel):
    program: Annotated[list[str], FailFast()]


class _Programs(BaseModel):
    """The programs of a schedule document. Its times and costs are not read: the client computes its own."""

    devices: Annotated[list[_Device], FailFast()]
    links: dict[str, Annotated[list[str], FailFast()]] | None = None
    method: Line = ""
    placement: Placement | None = None  # where the search may choose the stages


class IncumbentAnswer(BaseModel):
    schedule: _Programs


Model = TypeVar("Model", bound=BaseModel)


def parse(model: type[Model], text: str | bytes) -> Model:
    """Raises `InvalidAnswerError` if the text is not of this model."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise InvalidAnswerError(str(input_error(error, "its answer"))) from None


def verified(text: bytes, problem: Problem, placements: Placements) -> Schedule:
    """The schedule of an incumbent, checked on the client's own problem. Raises `InvalidAnswerError` if it is not
    valid."""
    found = parse(IncumbentAnswer, text).schedule
    if found.placement and placements == "keep":
        raise InvalidAnswerError("a schedule for other stages than the problem's")
    try:
        placed = found.placement.apply(problem) if found.placement else problem
        programs = (device.program for device in found.devices)
        schedule = Schedule.parse(placed, programs, found.links, found.method, found.placement)
        wrong = check(placed, schedule)
    except InputError as error:
        wrong = [str(error)]
    if wrong:
        raise InvalidAnswerError(f"an invalid schedule: {wrong[0]}")
    return schedule


def longest_answer(problem: Problem, placements: Placements = "keep") -> int:
    """An upper bound on the bytes of a schedule document of this problem. Reading a longer answer could hold the
    interpreter for longer than a step may wait."""
    ops = problem.microbatches * sum(12 + 2 * stage.offload_parts for stage in problem.stages)
    longest = 2**14 + 2 * len(json.dumps(problem.to_dict())) + 2 * 16 * ops  # in programs, and again in links' orders
    return longest * (MOST_TIMES_STAGES if placements == "all" else 1)
