"""The models of replies, for the API's description; `views` writes the replies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from optpipe.model.records import Record
from optpipe.options import SolveOptions
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
    """A schedule that was found, in short form. Times in ms."""

    seq: Annotated[int, Field(ge=1)]
    source: Source
    method: str
    makespan_ms: float
    span_ms: float
    value_ms: float  # what the search minimizes: the objective, or its 95th percentile where there is jitter
    problem_version: int
    problem_sha256: Hash
    attempt: int  # of the job; 0 if before any worker
    found_at: str
    url: str


class WholeIncumbent(Incumbent):
    """A schedule that was found, as a document of `optpipe.schedule/2` without `ops`."""

    schedule: ScheduleFile


class Adopted(Record):
    """When the training swapped it in, and the iteration time since."""

    step: int
    measured_iteration_ms: float | None
    adopted_at: str


class ListedIncumbent(Incumbent):
    """A schedule in short form, with its adoption."""

    adoption: Adopted | None


class Incumbents(Record):
    """Oldest first."""

    incumbents: list[ListedIncumbent]


class KnownBound(Record):
    """No schedule for this version of the problem is shorter."""

    problem_version: int
    lower_bound_ms: float
    found_at: str


class Bounds(Record):
    """Oldest first. A bound that is higher by less than a thousandth is there only with a schedule or the job's end."""

    bounds: list[KnownBound]


class JobSummary(Record):
    """A job without its schedules."""

    id: JobId
    version: int  # grows with every change; the ETag
    state: State
    reason: str | None  # why there is no schedule, or no better one
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
    spent_s: float | None  # of the time limit; null while it runs
    url: str


class Job(JobSummary):
    """A job with the best schedule for its current problem."""

    best: WholeIncumbent | None


class JobList(Record):
    """Newest first; `next` is the address of older ones."""

    jobs: list[JobSummary]
    next: str | None


class Adoption(Record):
    """Predicted and measured times of a schedule that was swapped in."""

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
    """Oldest first; `next` is the address of later lines."""

    lines: list[LogLine]
    next: str | None


class DeviceUse(Record):
    """The most bytes that a device and its host memory hold with this schedule, at any op times, and their limits."""

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
    bubble: float  # share of the makespan in which devices do not compute
    ops: list[TimedOp]
    devices: list[DeviceUse]


class Trace(Record):
    """The Trace Event format, for Perfetto. Times in µs."""

    traceEvents: list[dict[str, Any]]  # noqa: N815
    displayTimeUnit: Literal["ms"]  # noqa: N815


class Figure(Record):
    """What the interactive picture draws, as `optpipe.show.figure` writes it. Arrays are typed ones, in base64."""

    title: str
    lower_bound_ms: float | None
    gap: float | None
    kinds: list[dict[str, Any]]
    letters: list[str]
    schedules: list[dict[str, Any]]  # two if another one is shown beside it: that one first


class WorkerJobs(Record):
    worker: str
    jobs: list[JobId]


class Queue(Record):
    """A tenant's jobs that wait or run. `ahead` are jobs of others that will run before the first of those that wait;
    `solves` is the number of searches that this process runs at a time."""

    waiting: int
    ahead: int
    most_waiting: int
    running: int
    solves: int
    workers: list[WorkerJobs]


class Health(Record):
    status: Literal["ok"]
    version: str


class Ready(Record):
    """`solves` is the number of searches that this process runs at a time; with 0, workers search."""

    status: Literal["ready"]
    solves: int
