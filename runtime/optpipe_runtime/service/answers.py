"""Models of what the client reads of the service's answers. Nothing else in an answer is used."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, FailFast, Field, ValidationError

from optpipe.errors import input_error
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.model.rules import RulesRecord
from optpipe.printable import printable
from optpipe_runtime.service.errors import LONGEST, InvalidAnswerError

# What a service says for people: one line, of which the beginning is kept. It is logged.
Said = Annotated[str, AfterValidator(lambda text: printable(text, LONGEST))]


class JobAnswer(BaseModel):
    """A job that has just been given a problem."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # becomes part of addresses
    problem_version: int = 1


class JobState(BaseModel):
    """The state of a job; also its last event."""

    state: Said
    reason: Said | None = None


class IncumbentEvent(BaseModel):
    """A new incumbent: its number in the job, and the version of the problem that it was found for."""

    seq: Annotated[int, Field(ge=1, le=2**53)]
    problem_version: int | None = None


class _Device(BaseModel):
    program: Annotated[list[str], FailFast()]


class _Schedule(BaseModel):
    """The programs of a schedule document. Its times and costs are not read: the client computes its own."""

    devices: Annotated[list[_Device], FailFast()]
    links: dict[str, Annotated[list[str], FailFast()]] | None = None
    method: Said = ""
    placement: Placement | None = None  # where the search may choose the stages


class IncumbentAnswer(BaseModel):
    schedule: _Schedule


class _ToldRules(BaseModel):
    rules: RulesRecord
    step: int


class StreamAnswer(BaseModel):
    """A stream: its problem, and the rules that a training has told for it."""

    problem: Problem
    told: _ToldRules | None


Model = TypeVar("Model", bound=BaseModel)


def parse(model: type[Model], text: str | bytes) -> Model:
    """Raises `InvalidAnswerError` if the text is not of this model."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise InvalidAnswerError(str(input_error(error, "its answer"))) from None
