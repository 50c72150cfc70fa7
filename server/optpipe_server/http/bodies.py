"""Request bodies: strict JSON of raw bytes, which `limits` has capped. FastAPI's own reader takes NaN and duplicate
names."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from optpipe.errors import input_error
from optpipe.evaluate.objective import Objective
from optpipe.model.problem import Problem
from optpipe.model.records import Ms, Record
from optpipe.schedule import ScheduleFile
from optpipe_server.http.replies import ReplyError

LONGEST_SOLVE_S = 3600.0
MOST_STAGES = 256
MOST_MICROBATCHES = 4096

TimeLimit = Annotated[float, Field(strict=True, gt=0, le=LONGEST_SOLVE_S, allow_inf_nan=False)]
Model = TypeVar("Model", bound=BaseModel)


class Posed(Record):
    """A body that poses a problem, of a size that the service takes."""

    problem: Problem

    @model_validator(mode="after")
    def _of_a_size(self) -> Posed:
        if (stages := len(self.problem.stages)) > MOST_STAGES:
            raise ValueError(f"problem.stages are {stages}: the service takes up to {MOST_STAGES}")
        if (count := self.problem.microbatches) > MOST_MICROBATCHES:
            raise ValueError(f"problem.microbatches = {count}: the service takes up to {MOST_MICROBATCHES}")
        if "\0" in self.problem.name:
            raise ValueError("problem.name has a NUL character")
        return self


class Submission(Posed):
    """`POST /v1/jobs`. `warm_start` is a schedule document, also one for costs that have since changed."""

    method: Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00]*$")] = "auto"
    time_limit_s: TimeLimit = 60.0
    gap: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.0  # the search ends at this gap
    objective: Objective = "makespan"
    priority: Annotated[int, Field(strict=True, ge=-100, le=100)] = 0  # the highest is solved first
    warm_start: ScheduleFile | None = None


class MoreTime(Record):
    """`PATCH /v1/jobs/{id}`."""

    time_limit_s: TimeLimit


class Adopt(Record):
    """`PUT /v1/jobs/{id}/adoptions/{seq}`: the first step of the training by this schedule, and what an iteration takes
    since."""

    step: Annotated[int, Field(strict=True, ge=0, le=2**53)]
    measured_iteration_ms: Ms | None = None


def parse(model: type[Model], body: bytes, what: str) -> Model:
    """Reads a body; raises `ReplyError` for what is no JSON, `InputError`, which names `what`, for a wrong field."""
    try:
        parsed = model.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() == 1 and error.errors(include_url=False)[0]["type"] == "json_invalid":
            raise ReplyError(400, "The body is not valid JSON.") from None
        raise input_error(error, what) from None
    json.loads(
        body, object_pairs_hook=_unique
    )  # valid by now, so neither deep nor with numbers out of range, and with few objects
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ReplyError(400, "The body has an object with the same name twice.")
