"""What replies look like, for who reads the API's description; `views` writes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from optpipe.evaluate.objective import Objective
from optpipe.model.records import Record
from optpipe.schedule import ScheduleFile, Status, TimedOp
from optpipe_server.database.tables import Level, Source, State

Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
JobId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class ProblemDocument(Record):
    """What went wrong (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str


class Incumbent(Record):
    """A schedule that was found, in short. Times in ms."""

    seq: Annotated[int, Field(ge=1)]
    source: Source
    method: str
    makespan_ms: float
    span_ms: float
    problem_version: int
    problem_sha256: Hash
    attempt: int  # of the job's workers; 0: before any
    found_at: str
    url: str


class WholeIncumbent(Incumbent):
    """A schedule that was found, as a document of `optpipe.schedule/2`, without `ops`."""

    schedule: ScheduleFile


class Adopted(Record):
    """When the training swapped it in, and what an iteration takes since."""

    step: int
    measured_iteration_ms: float | None
    adopted_at: str


class ListedIncumbent(Incumbent):
    """In short, with what the training said of it."""

    adoption: Adopted | None


class Incumbents(Record):
    """Oldest first."""

    incumbents: list[ListedIncumbent]


class JobSummary(Record):
    """A job without its schedules."""

    id: JobId
    version: int  # grows with every change; the ETag
    state: State
    reason: str | None  # why there is no schedule, or no better one
    problem_name: str
    problem_sha256: Hash
    problem_version: int  # 1 as submitted, one more with every drift
    method: str
    objective: Objective
    time_limit_s: float
    gap_limit: float  # the search ends at this gap
    priority: int
    status: Status  # of the best schedule
    lower_bound_ms: float | None
    gap: float | None
    attempt: int  # how often a worker took it
    crashes: int
    created_at: str
    started_at: str | None
    ended_at: str | None
    spent_s: float | None  # of the time limit; not told while it runs
    url: str


class Job(JobSummary):
    """A job with its best schedule for the problem that counts."""

    best: WholeIncumbent | None


class JobList(Record):
    """Newest first; `next` is the address of the older ones."""

    jobs: list[JobSummary]
    next: str | None


class Adoption(Record):
    """Predicted and measured side by side."""

    seq: int
    step: int
    adopted_at: str
    predicted_ms: float
    measured_iteration_ms: float | None
    url: str


class Adoptions(Record):
    adoptions: list[Adoption]


class LogLine(Record):
    number: int
    at: str
    attempt: int
    level: Level
    text: str


class Log(Record):
    """Oldest first; `next` is the address of the later ones."""

    lines: list[LogLine]
    next: str | None


class DeviceUse(Record):
    """The most bytes that a device, and its host memory, holds by this schedule whatever the clock does, and what it
    may hold."""

    peak_bytes: int
    peak_at: str
    activation_budget_bytes: int
    host_peak_bytes: int
    host_memory_bytes: int | None


class Timeline(Record):
    """When every op runs, by nominal times."""

    seq: int
    problem_sha256: Hash
    makespan_ms: float
    span_ms: float
    bubble: float  # the share of the makespan in which devices do not compute
    ops: list[TimedOp]
    devices: list[DeviceUse]


class Trace(Record):
    """The Trace Event format: opens in Perfetto. Times in µs."""

    traceEvents: list[dict[str, Any]]  # noqa: N815
    displayTimeUnit: Literal["ms"]  # noqa: N815


class Health(Record):
    status: Literal["ok"]
    version: str


class Ready(Record):
    """`solves` is how many searches this process runs at a time; with 0 they are workers' of the same database."""

    status: Literal["ready"]
    solves: int
