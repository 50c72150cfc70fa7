"""Request bodies as strict JSON, read from the raw bytes, which `limits` has capped.

FastAPI's own reader would accept NaN and duplicate names.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from optpipe.errors import input_error
from optpipe.model.problem import Problem
from optpipe.model.records import Ms, Record
from optpipe.options import SolveOptions, TimeLimit
from optpipe.schedule import ScheduleFile
from optpipe_server.http.replies import ReplyError

LONGEST_SOLVE_S = 3600.0
MOST_STAGES = 256
MOST_MICROBATCHES = 4096

JobTimeLimit = Annotated[TimeLimit, Field(le=LONGEST_SOLVE_S)]
Model = TypeVar("Model", bound=BaseModel)


class ProblemBody(Record):
    """A body with a problem, of a size that the service accepts."""

    problem: Problem

    @model_validator(mode="after")
    def _of_a_size(self) -> ProblemBody:
        if (stages := len(self.problem.stages)) > MOST_STAGES:
            raise ValueError(f"problem.stages are {stages}: expected up to {MOST_STAGES} here")
        if (count := self.problem.microbatches) > MOST_MICROBATCHES:
            raise ValueError(f"problem.microbatches = {count}: expected up to {MOST_MICROBATCHES} here")
        if "\0" in self.problem.name:
            raise ValueError("problem.name has a NUL character")
        return self


class Submission(ProblemBody, SolveOptions):
    """`POST /v1/jobs`. `warm_start` is a schedule document, also one for costs that have changed since."""

    time_limit_s: JobTimeLimit = 60.0
    priority: Annotated[int, Field(strict=True, ge=-100, le=100)] = 0  # the highest comes first
    warm_start: ScheduleFile | None = None


class ExtensionBody(Record):
    """`PATCH /v1/jobs/{id}`."""

    time_limit_s: JobTimeLimit


class AdoptionBody(Record):
    """`PUT /v1/jobs/{id}/adoptions/{seq}`: the first step of the training by this schedule, and the iteration time
    since."""

    step: Annotated[int, Field(strict=True, ge=0, le=2**53)]
    measured_iteration_ms: Ms | None = None


def parse(model: type[Model], body: bytes, what: str) -> Model:
    """Read a body.

    Raises
    ------
    ReplyError
        400 if it is not JSON or has the same name twice in an object.
    InputError
        If a field is wrong; the message begins with `what`.
    """
    try:
        parsed = model.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() == 1 and error.errors(include_url=False)[0]["type"] == "json_invalid":
            raise ReplyError(400, "The body is not valid JSON.") from None
        raise input_error(error, what, model) from None
    # Valid by now: neither deep, nor with numbers out of range, nor with many objects.
    json.loads(body, object_pairs_hook=_unique)
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ReplyError(400, "The body has an object with the same name twice.")
