"""What routes are sent; FastAPI reads these models from the JSON that `guarded_route` has let pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from optpipe.errors import InputError
from optpipe.model.figures import Ms
from optpipe.model.problem import Problem
from optpipe.model.records import Record
from optpipe.options import (
    Methods,
    ObjectiveOption,
    PlacementsOption,
    SolveOptions,
    TimeLimit,
)
from optpipe.schedule import Schedule, ScheduleFile
from optpipe_server.first_schedules import count_parts
from optpipe_server.http import examples

LONGEST_SOLVE_S = 3600.0
MOST_STAGES = 256
MOST_MICROBATCHES = 4096
MOST_PARTS = 2**18  # of activations (`count_parts`): about 600 MiB and 6 s for a schedule with all its ops

JobTimeLimit = Annotated[TimeLimit, Field(le=LONGEST_SOLVE_S)]


def _example(example: dict[str, Any]) -> ConfigDict:
    return ConfigDict(json_schema_extra={"example": example})


class ProblemBody(Record):
    """A body with a problem, of a size that the service accepts."""

    model_config = _example({"problem": examples.PROBLEM})

    problem: Problem

    @model_validator(mode="before")
    @classmethod
    def _check_counts(cls, body: Any) -> Any:
        """Count the records before they are read, which is done in the event loop."""
        for field, records in _lists_of_records(body):
            if len(records) > MOST_STAGES:
                raise ValueError(f"{field} are {len(records)}: expected up to {MOST_STAGES} here")
        return body

    @model_validator(mode="after")
    def _check_problem(self) -> ProblemBody:
        if (count := self.problem.microbatches) > MOST_MICROBATCHES:
            raise ValueError(f"problem.microbatches = {count}: expected up to {MOST_MICROBATCHES} here")
        if "\0" in self.problem.name:
            raise ValueError("problem.name has a NUL character")
        require_parts(self.problem, "problem", MOST_PARTS)
        return self


def _lists_of_records(body: Any) -> Iterator[tuple[str, list[Any]]]:
    """The stages and devices of a body's problem and of its schedule, each with the name of its field."""
    content = body if isinstance(body, dict) else {}
    for name in ("problem", "schedule", "warm_start"):
        record = content.get(name)
        inner = {f"{name}.problem": record.get("problem")} if isinstance(record, dict) else {}
        for path, fields in ({name: record} | inner).items():
            for field in ("stages", "devices"):
                if isinstance(fields, dict) and isinstance(fields.get(field), list):
                    yield f"{path}.{field}", fields[field]


def require_parts(problem: Problem, what: str, most: int) -> None:
    """Raise `InputError` if memory and time of an answer, which grow with the parts, would be too much."""
    if (parts := count_parts(problem)) > most:
        raise InputError(
            f"{what} has {parts} activation parts (stages times micro-batches times the largest offload_parts): "
            f"expected up to {most} here"
        )


class Submission(ProblemBody, SolveOptions):
    """`POST /v1/jobs`. `warm_start` is a schedule document, also one for costs that have changed since."""

    model_config = _example(examples.SUBMISSION)

    time_limit_s: JobTimeLimit = 60.0
    priority: Annotated[int, Field(strict=True, ge=-100, le=100)] = 0  # the highest comes first
    warm_start: ScheduleFile | None = None


class ExtensionBody(Record):
    """`PATCH /v1/jobs/{id}`."""

    model_config = _example({"time_limit_s": 600.0})

    time_limit_s: JobTimeLimit


class AdoptionBody(Record):
    """`PUT /v1/jobs/{id}/adoptions/{seq}`: the first step of the training by this schedule, and the iteration time
    since."""

    model_config = _example({"step": 120, "measured_iteration_ms": 9.2})

    step: Annotated[int, Field(strict=True, ge=0, le=2**53)]
    measured_iteration_ms: Ms | None = None


class LookupBody(ProblemBody):
    """`POST /v1/cache/lookup`."""

    model_config = _example({"problem": examples.PROBLEM, "objective": "makespan"})

    objective: ObjectiveOption = "makespan"


class WorkbenchBody(ProblemBody):
    """`POST /v1/workbench`. With a `schedule`, a document that may be invalid, the reply is about that one only."""

    model_config = _example({"problem": examples.PROBLEM, "methods": ["1f1b"]})

    methods: Methods | None = None
    placements: PlacementsOption = "keep"
    schedule: ScheduleFile | None = None

    def read(self, schedule: ScheduleFile) -> Schedule:
        """Return the schedule for the problem, or for the schedule's placement of it. Raises `InputError`."""
        return read_schedule(schedule, self.problem, placed=True)


def read_schedule(file: ScheduleFile, problem: Problem, placed: bool) -> Schedule:
    """Return the schedule of a document for this problem, or where `placed` for the document's placement of it.

    Raises `InputError` for an op that cannot be read, or a placement that does not suit the problem.
    """
    placement = file.placement if placed else None
    problem = placement.apply(problem) if placement else problem
    if len(problem.stages) > MOST_STAGES:
        raise InputError(f"schedule.placement makes {len(problem.stages)} stages: expected up to {MOST_STAGES} here")
    require_parts(problem, "schedule.placement: the problem on its stages", MOST_PARTS)
    return Schedule.parse(problem, (device.program for device in file.devices), file.links, file.method, placement)
