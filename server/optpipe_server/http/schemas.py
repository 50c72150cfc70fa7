"""What routes reply. FastAPI writes these models, and describes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field
from sqlalchemy import Row

from optpipe.evaluate.memory import Certificate
from optpipe.model.placement import Placement
from optpipe.model.problem import Problem
from optpipe.model.records import Record
from optpipe.model.rules import RulesRecord
from optpipe.options import CompareOptions, SolveOptions
from optpipe.schedule import ScheduleFile, Status, TimedOp
from optpipe_server.database.jobs import options_of
from optpipe_server.database.tables import Level, Source, State

Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
JobId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


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
    value_ms: float  # what the search minimizes: the objective, or its 95th percentile where there is jitter
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


class ToldRules(FromRow):
    """Of a step, and when they were told."""

    rules: RulesRecord
    step: int
    predicted_ms: float
    measured_ms: float
    told_at: str


class Stream(Record):
    """A stream's problem, and the rules for it that a training told last."""

    problem: Problem
    told: ToldRules | None


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


class DeviceUse(Record):
    """The most bytes that a device and its host memory hold with this schedule, at any op times, and their limits."""

    peak_bytes: int
    peak_at: str
    activation_budget_bytes: int
    host_peak_bytes: int
    host_memory_bytes: int | None


def device_uses(certificate: Certificate) -> list[dict[str, Any]]:
    """Return a `DeviceUse` of each device, as plain data."""
    return [
        {
            "peak_bytes": device.bytes,
            "peak_at": device.at,
            "activation_budget_bytes": device.limit,
            "host_peak_bytes": host.bytes,
            "host_memory_bytes": host.limit,
        }
        for device, host in zip(certificate.device, certificate.host, strict=True)
    ]


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
    """A tenant's jobs that wait or run. `ahead` are jobs of others whose turn is before that of the first that waits;
    `solves` is the number of searches that this process runs at a time."""

    waiting: int
    ahead: int
    most_waiting: int
    running: int
    solves: int
    workers: list[WorkerJobs]


class Health(Record):
    status: Literal["ok"] = "ok"
    version: str


class Ready(Record):
    """`solves` is the number of searches that this process runs at a time; with 0, workers search."""

    status: Literal["ready"] = "ready"
    solves: int


class Checked(Record):
    """Whether a schedule is valid. `wrong` has a sentence per fault; `devices` is null if memory cannot be computed."""

    valid: bool
    wrong: list[str]
    devices: list[DeviceUse] | None


class Imported(Checked):
    """The schedule of the file, and what `/v1/check` says of it. `schedule` is null if its ops have no times; `wrong`
    tells why."""

    schedule: ScheduleFile | None


class Simulation(Record):
    """A schedule by nominal times, even if it needs too much memory; `ops` are the first by start of `ops_total`."""

    makespan_ms: float
    span_ms: float
    bubble: float  # share of the makespan in which devices do not compute
    ops: list[TimedOp]
    ops_total: int
    devices: list[DeviceUse]


class CompareRow(Record):
    """One method: the figures of its schedule, and why it does not fit or does not apply to the problem."""

    method: str
    placements: str
    found_by: str | None
    fits: bool
    makespan_ms: float | None
    span_ms: float | None
    percentile_ms: float | None  # of the objective, where there is jitter
    bubble: float | None
    lower_bound_ms: float | None
    gap: float | None
    placement: dict[str, Any] | None
    peak_bytes: list[int] | None
    host_peak_bytes: list[int] | None
    reason: str | None
    notes: list[str]  # of a search, such as how the MILP's ended


class Comparison(Record):
    """The rows that fit, the shortest first, then the others: what `optpipe compare --json` prints."""

    problem: str
    options: CompareOptions  # with the threads and the memory that each search had
    k: list[float | None]
    rows: list[CompareRow]


class CacheHit(Record):
    """A cached schedule, verified on this problem. `distance` is 0 if it was solved for this problem (`exact`); `terms`
    is what each feature adds to it. `gap` says by which share a schedule could be shorter at most; it and the bound are
    null unless it is `exact` and a bound is known."""

    exact: bool
    source: Literal["cache", "pack"]
    distance: float
    terms: dict[str, float]
    status: str
    lower_bound_ms: float | None
    gap: float | None
    makespan_ms: float
    span_ms: float
    schedule: ScheduleFile


class Lookup(Record):
    """`hit` is null if no similar problem is known."""

    hit: CacheHit | None


class KnownModel(FromRow):
    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int | None
    source: str


class KnownGpu(Record):
    name: str
    memory_bytes: int
    source: str


class Presets(Record):
    """What `POST /v1/estimate` knows by name."""

    models: list[KnownModel]
    gpus: list[KnownGpu]


class Estimate(Record):
    """The problem, and the bytes of each device's GPU that weights, gradients and optimizer state, workspace, and what
    the driver reserves take; the rest is the budget for activations."""

    problem: Problem
    parameters: int
    state_bytes: list[int]
    workspace_bytes: list[int]
    reserved_bytes: list[int]


class MeasuredTimes(Record):
    """Median and interquartile range of `count` times, in ms."""

    ms: float
    iqr_ms: float
    count: int


class Measured(Record):
    """The problem, the times of each stage's F, B, W or BW and of a message, how long a step took and how long its
    order takes by these times, what is not known, with what the problem has instead, what was measured and is not used,
    with the reason, and the order that ran."""

    problem: Problem
    stages: list[dict[str, MeasuredTimes]]
    message: MeasuredTimes | None
    measured_ms: float | None
    replayed_ms: float | None
    unknown: list[str]
    unused: list[str]
    schedule: ScheduleFile | None


class DiagnosedLoss(Record):
    """What a step loses by one thing, in ms: the mean, and by step."""

    name: str
    what: str
    avoidable: bool
    mean_ms: float
    ms: list[float]


class DiagnosedCure(Record):
    """What to change, with the step before and after it and the bound, in ms by step; shares of a step; activations by
    device; the lines to write, and the file that goes with them."""

    name: str
    what: str
    gain: float
    gain_at_most: float
    ms: list[float]
    before_ms: list[float]
    bound_ms: list[float]
    activations: list[float]
    lines: list[str]
    file: dict[str, str] | None


class Diagnosis(Record):
    """What a trace shows: what `optpipe diagnose --json` prints."""

    form: str
    stack: str
    steps: list[int]
    replicas: int
    devices: int
    stages: int
    measured_ms: list[float]
    replayed_ms: list[float]
    replay_error: float
    losses: list[DiagnosedLoss]
    causes: list[str]
    slow_devices: list[dict[str, Any]]
    uneven_stages: list[dict[str, Any]]
    cures: list[DiagnosedCure]
    cures_on_steps: list[int]
    held_activations: list[float]
    asked: list[str]  # what would help
    assumed: list[str]
    unused: list[str]


class WorkbenchRow(Record):
    """One method: why it has no schedule or does not fit, else its place among `figure.schedules`."""

    method: str
    fits: bool
    reason: str | None
    drawn: int | None
    placement: Placement | None  # which stages it is for, if not for those of the problem
    lower_bound_ms: float | None


class Workbench(Record):
    """The rows that fit, the shortest first, then the others."""

    rows: list[WorkbenchRow]
    figure: Figure | None  # null if no method has a schedule


class JudgedFigure(Record):
    """What is wrong with a schedule, and its picture, unless it has no ops, they wait for each other, or they are not
    those of its problem."""

    wrong: list[str]
    figure: Figure | None
