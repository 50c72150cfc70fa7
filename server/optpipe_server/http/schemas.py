"""What routes are sent, and what they reply of jobs. FastAPI describes these models, reads the former, and writes most
of the latter."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator
from sqlalchemy import Row

from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.model.records import Ms, Record
from optpipe.options import CompareOptions, Methods, ObjectiveOption, PlacementsOption, SolveOptions, TimeLimit
from optpipe.schedule import ScheduleFile, Status
from optpipe_server.accepted import MOST_MICROBATCHES, MOST_PARTS, MOST_STAGES, require_parts
from optpipe_server.database.jobs import options_of
from optpipe_server.database.tables import Level, Source, State

Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
JobId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]

LONGEST_SOLVE_S = 3600.0

JobTimeLimit = Annotated[TimeLimit, Field(le=LONGEST_SOLVE_S)]

# Examples for the API's description, which work: two stages on two devices, two micro-batches.
_STAGE = {
    "forward_ms": 1.0,
    "backward_input_ms": 1.0,
    "backward_weight_ms": 1.0,
    "activation_bytes": 1000,
    "saved_for_weight_bytes": 500,
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
    """`POST /v1/jobs`. `warm_start` is a schedule document, also one for costs that have changed since.

    With `lease_s` the job is cancelled once `PUT /v1/jobs/{id}/lease` was not sent for so long.
    """

    model_config = _example(problem=PROBLEM, priority=0, **SolveOptions(gap=0.01).model_dump(exclude_none=True))

    time_limit_s: JobTimeLimit = 60.0
    priority: Annotated[int, Field(strict=True, ge=-100, le=100)] = 0  # the highest comes first
    warm_start: ScheduleFile | None = None
    lease_s: Annotated[float, Field(strict=True, ge=1, le=LONGEST_SOLVE_S)] | None = None


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
    placements: PlacementsOption = CompareOptions().placements
    schedule: ScheduleFile | None = None


def job_url(job_id: str) -> str:
    return f"/v1/jobs/{job_id}"


def incumbent_url(incumbent: Row[Any]) -> str:
    return f"{job_url(incumbent.job)}/incumbents/{incumbent.seq}"


class FromRow(Record):
    """A reply that shows a row of the database, or a record."""

    @classmethod
    def from_row(cls, row: Any, **others: Any) -> Self:
        """Return the reply; its fields are those of the row, except for these `others`."""
        return cls(**{name: getattr(row, name) for name in cls.model_fields if name not in others}, **others)


class Incumbent(FromRow):
    """A schedule that was found, in short form: all of it that never changes. Times in ms."""

    seq: Annotated[int, Field(ge=1)]
    source: Source
    method: str
    makespan_ms: float
    span_ms: float
    value_ms: float  # what the search minimizes
    problem_version: int
    problem_sha256: Hash
    attempt: int  # of the job; 0 if before any worker
    found_at: str
    url: str

    @classmethod
    def from_row(cls, row: Any, **others: Any) -> Self:
        return super().from_row(row, url=incumbent_url(row), **others)


class WholeIncumbent(Incumbent):
    """A schedule that was found, as a document of `optpipe.schedule/2` without `ops`."""

    schedule: ScheduleFile


class Adopted(FromRow):
    """When the training swapped it in, and the iteration time since."""

    step: int
    measured_iteration_ms: float | None
    adopted_at: str


class ListedIncumbent(Incumbent):
    """A schedule in short form, with its adoption, which may be recorded later."""

    adoption: Adopted | None

    @classmethod
    def from_row(cls, row: Any, **others: Any) -> Self:
        return super().from_row(row, adoption=Adopted.from_row(row) if row.step is not None else None, **others)


class Incumbents(Record):
    """Oldest first."""

    incumbents: list[ListedIncumbent]


class KnownBound(FromRow):
    """No schedule for this version of the problem is shorter."""

    problem_version: int
    lower_bound_ms: float
    found_at: str


class Bounds(Record):
    """Oldest first. A bound that is higher by less than a thousandth is there only with a schedule or the job's end."""

    bounds: list[KnownBound]


class JobSummary(FromRow):
    """A job without its schedules."""

    id: JobId
    version: int  # grows with every change; the ETag
    state: State
    reason: str | None  # why there is no schedule or no better one, what would fit, or be shorter on other stages
    key_name: str | None  # of the key that submitted it; null without keys
    problem_name: str
    problem_sha256: Hash
    problem_version: int  # 1 as submitted, one more with every change
    options: SolveOptions  # as submitted; a worker gives a search fewer threads or less memory if it has no more
    priority: int
    status: Status  # of the best schedule
    value_ms: float | None  # of the best schedule: what the search minimizes
    lower_bound_ms: float | None
    gap: float | None
    attempt: int  # how often a worker has claimed it
    crashes: int
    created_at: str
    started_at: str | None
    ended_at: str | None
    spent_s: float | None  # of the time limit; null while it runs, because it grows then without a new version
    url: str

    @classmethod
    def from_row(cls, row: Any, **others: Any) -> Self:
        spent_s = None if row.state == "running" else row.spent_s
        return super().from_row(row, options=options_of(row), spent_s=spent_s, url=job_url(row.id), **others)


class Job(JobSummary):
    """A job with the best schedule for its current problem."""

    best: WholeIncumbent | None


class EndedJob(JobSummary):
    """A job that is over, in its last event."""

    best: Incumbent | None


class JobList(Record):
    """Newest first; `next` is the address of older ones."""

    jobs: list[JobSummary]
    next: str | None


class Adoption(FromRow):
    """Predicted and measured times of a schedule that was swapped in."""

    seq: int
    step: int
    adopted_at: str
    predicted_ms: float
    measured_iteration_ms: float | None
    url: str

    @classmethod
    def from_row(cls, row: Any, **others: Any) -> Self:
        return super().from_row(row, predicted_ms=row.makespan_ms, url=incumbent_url(row), **others)


class Adoptions(Record):
    adoptions: list[Adoption]


class LogLine(FromRow):
    number: int
    at: str
    attempt: int
    level: Level
    text: str


class Log(Record):
    """Oldest first; `next` is the address of later lines."""

    lines: list[LogLine]
    next: str | None


def job_document(job: Row[Any], best: Row[Any] | None) -> dict[str, Any]:
    """Return a `Job` as plain data."""
    shown = JobSummary.from_row(job).model_dump(mode="json")
    return {**shown, "best": incumbent_document(best) if best is not None else None}


def incumbent_document(incumbent: Row[Any]) -> dict[str, Any]:
    """Return a `WholeIncumbent` as plain data.

    Its problem and programs were verified before they were stored; to read them as records again would take many times
    as long as all else.
    """
    programs, problem, sha256 = json.loads(incumbent.programs), json.loads(incumbent.problem), incumbent.problem_sha256
    placement = {name: value for name, value in (programs["placement"] or {}).items() if value is not None}
    if placement:  # for other stages than the stored problem has
        placed = Placement.from_dict(placement).apply(Problem.from_dict(problem))
        problem, sha256 = placed.to_dict(), placed.sha256
    schedule = {
        "format": "optpipe.schedule/2",
        "problem": problem,
        "problem_sha256": sha256,
        "placement": placement,
        "method": incumbent.method,
        "makespan_ms": incumbent.makespan_ms,
        "span_ms": incumbent.span_ms,
        "devices": [{"program": ops.split()} for ops in programs["programs"]],
        "links": {link: ops.split() for link, ops in programs["links"].items()},
    }
    for name in ("placement", "links"):
        if not schedule[name]:
            del schedule[name]
    return {**Incumbent.from_row(incumbent).model_dump(), "schedule": schedule}
