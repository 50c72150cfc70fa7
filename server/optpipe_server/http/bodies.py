"""What routes are sent; FastAPI reads these models."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from optpipe.model.figures import Ms
from optpipe.model.problem import Problem
from optpipe.model.records import Record
from optpipe.options import Methods, ObjectiveOption, PlacementsOption, SolveOptions, TimeLimit
from optpipe.schedule import ScheduleFile
from optpipe_server.accepted import MOST_MICROBATCHES, MOST_PARTS, MOST_STAGES, require_parts

LONGEST_SOLVE_S = 3600.0

JobTimeLimit = Annotated[TimeLimit, Field(le=LONGEST_SOLVE_S)]

# Examples for the API's description, which work: two stages on two devices, two micro-batches.
_STAGE = {
    "forward_ms": 1.0,
    "backward_input_ms": 1.0,
    "backward_weight_ms": 1.0,
    "activation_bytes": 1000,
    "saved_for_weight_bytes": 500,
    "offload_ms": 0.5,
    "reload_ms": 0.5,
    "offload_bytes": 1000,
}
PROBLEM: dict[str, Any] = {
    "format": "optpipe.problem/3",
    "microbatches": 2,
    "devices": [{"activation_budget_bytes": 2000}, {"activation_budget_bytes": 2000}],
    "stages": [{**_STAGE, "device": 0}, {**_STAGE, "device": 1}],
}
SCHEDULE = {
    "format": "optpipe.schedule/2",
    "problem": PROBLEM,
    "method": "1f1b",
    "devices": [{"program": ["0F0", "0F1", "0BW0", "0BW1"]}, {"program": ["1F0", "1BW0", "1F1", "1BW1"]}],
}


def _example(**example: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"example": example})


class ProblemBody(Record):
    """A body with a problem, of a size that the service accepts."""

    model_config = _example(problem=PROBLEM)

    problem: Problem

    @model_validator(mode="before")
    @classmethod
    def _check_counts(cls, body: Any) -> Any:
        """Count stages and devices of the problem and of a schedule before they are read."""
        content = body if isinstance(body, dict) else {}
        for name in ("problem", "schedule", "warm_start"):
            record = content.get(name)
            inner = {f"{name}.problem": record.get("problem")} if isinstance(record, dict) else {}
            for path, fields in ({name: record} | inner).items():
                for field in ("stages", "devices"):
                    records = fields.get(field) if isinstance(fields, dict) else None
                    if isinstance(records, list) and len(records) > MOST_STAGES:
                        raise ValueError(f"{path}.{field} are {len(records)}: expected up to {MOST_STAGES} here")
        return body

    @model_validator(mode="after")
    def _check_problem(self) -> ProblemBody:
        if (count := self.problem.microbatches) > MOST_MICROBATCHES:
            raise ValueError(f"problem.microbatches = {count}: expected up to {MOST_MICROBATCHES} here")
        if "\0" in self.problem.name:
            raise ValueError("problem.name has a NUL character")
        require_parts(self.problem, "problem", MOST_PARTS)
        return self


class Submission(ProblemBody, SolveOptions):
    """`POST /v1/jobs`. `warm_start` is a schedule document, also one for costs that have changed since."""

    model_config = _example(problem=PROBLEM, priority=0, **SolveOptions(gap=0.01).model_dump(exclude_none=True))

    time_limit_s: JobTimeLimit = 60.0
    priority: Annotated[int, Field(strict=True, ge=-100, le=100)] = 0  # the highest comes first
    warm_start: ScheduleFile | None = None


class ExtensionBody(Record):
    """`PATCH /v1/jobs/{id}`."""

    model_config = _example(time_limit_s=600.0)

    time_limit_s: JobTimeLimit


class AdoptionBody(Record):
    """`PUT /v1/jobs/{id}/adoptions/{seq}`: the first step of the training by this schedule, and the iteration time
    since."""

    model_config = _example(step=120, measured_iteration_ms=9.2)

    step: Annotated[int, Field(strict=True, ge=0, le=2**53)]
    measured_iteration_ms: Ms | None = None


class LookupBody(ProblemBody):
    """`POST /v1/cache/lookup`."""

    model_config = _example(problem=PROBLEM, objective="makespan")

    objective: ObjectiveOption = "makespan"


class WorkbenchBody(ProblemBody):
    """`POST /v1/workbench`. With a `schedule`, a document that may be invalid, the reply is about that one only."""

    model_config = _example(problem=PROBLEM, methods=["1f1b"])

    methods: Methods | None = None
    placements: PlacementsOption = "keep"
    schedule: ScheduleFile | None = None
