"""How jobs and incumbents look in replies: JSON text into which problems and programs are inserted as stored."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row

from optpipe.evaluate.memory import Certificate
from optpipe.model.problem import Problem
from optpipe.process.protocol import Programs
from optpipe.schedule import ScheduleFile
from optpipe_server.database.tables import OPEN

# fmt: off
_JOB_FIELDS = (
    "id", "version", "state", "reason", "problem_name", "problem_sha256", "problem_version", "priority",
    "status", "value_ms", "lower_bound_ms", "gap", "attempt", "crashes", "created_at",
    "started_at", "ended_at",
)
_INCUMBENT_FIELDS = (
    "seq", "source", "method", "makespan_ms", "span_ms", "value_ms", "problem_version", "problem_sha256",
    "attempt", "found_at",
)
# fmt: on


def text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def over(job: Row[Any]) -> bool:
    return job.state not in OPEN


def job_url(job_id: str) -> str:
    return f"/v1/jobs/{job_id}"


def etag(number: int) -> str:
    """The ETag of a job's version, or of an incumbent's number."""
    return f'"{number}"'


def cursor(number: int) -> str:
    """Where a list of jobs goes on, as an opaque text."""
    return urlsafe_b64encode(str(number).encode()).rstrip(b"=").decode()


def from_cursor(given: str) -> int:
    """Return the number in a cursor. Raises `ValueError` for a text that `cursor` has not made."""
    number = int(urlsafe_b64decode(given + "=" * (-len(given) % 4)))
    if given != cursor(number) or not 0 < number < 2**53:
        raise ValueError(given)
    return number


def job_view(job: Row[Any]) -> dict[str, Any]:
    """A job without its best schedule.

    `spent_s` is null while the job runs, because it grows then without a new version.
    """
    shown = {name: getattr(job, name) for name in _JOB_FIELDS}
    spent_s = None if job.state == "running" else job.spent_s
    return {**shown, "options": json.loads(job.options), "spent_s": spent_s, "url": job_url(job.id)}


def job_text(job: Row[Any], best: str | None) -> str:
    """A job with the text of its best incumbent, or None."""
    return f'{text(job_view(job))[:-1]},"best":{best or "null"}}}'


def incumbent_view(incumbent: Row[Any]) -> dict[str, Any]:
    """An incumbent in short form, with its address: all of it that never changes."""
    shown = {name: getattr(incumbent, name) for name in _INCUMBENT_FIELDS}
    return {**shown, "url": f"{job_url(incumbent.job)}/incumbents/{incumbent.seq}"}


def incumbent_text(incumbent: Row[Any]) -> str:
    """An incumbent with its schedule as a document of `optpipe.schedule/2`, without the times of ops."""
    written = json.loads(incumbent.programs)
    if written["placement"]:
        return f'{text(incumbent_view(incumbent))[:-1]},"schedule":{_placed(incumbent)}}}'
    devices = ",".join(_object({"program": _words(ops)}) for ops in written["programs"])
    links = {link: _words(ops) for link, ops in written["links"].items()}
    parts = {
        "format": '"optpipe.schedule/2"',
        "problem": incumbent.problem,
        "problem_sha256": text(incumbent.problem_sha256),
        "method": text(incumbent.method),
        "makespan_ms": text(incumbent.makespan_ms),
        "span_ms": text(incumbent.span_ms),
        "devices": f"[{devices}]",
        **({"links": _object(links)} if links else {}),
    }
    return f'{text(incumbent_view(incumbent))[:-1]},"schedule":{_object(parts)}}}'


def _placed(incumbent: Row[Any]) -> str:
    """The document of a schedule for other stages than the job's problem has."""
    problem = Problem.from_json(incumbent.problem)
    schedule = Programs.model_validate_json(incumbent.programs).schedule(problem, incumbent.method)
    return ScheduleFile.of(schedule).model_copy(update={"ops": None}).to_json()


def _words(ops: str) -> str:
    """Ops separated by spaces, as a JSON list of texts. Ops have no characters that JSON would escape."""
    return '["' + ops.replace(" ", '","') + '"]' if ops else "[]"


def _object(parts: Mapping[str, str]) -> str:
    """JSON texts by name, as one JSON object."""
    return "{" + ",".join(f"{text(name)}:{value}" for name, value in parts.items()) + "}"


def adoption_view(incumbent: Row[Any]) -> dict[str, Any]:
    """An adoption, with predicted and measured times."""
    return {
        "seq": incumbent.seq,
        "step": incumbent.step,
        "adopted_at": incumbent.adopted_at,
        "predicted_ms": incumbent.makespan_ms,
        "measured_iteration_ms": incumbent.measured_iteration_ms,
        "url": f"{job_url(incumbent.job)}/incumbents/{incumbent.seq}",
    }


def listed_view(incumbent: Row[Any]) -> dict[str, Any]:
    """An incumbent in short form with its adoption, which may be recorded later."""
    adoption = {name: getattr(incumbent, name) for name in ("step", "measured_iteration_ms", "adopted_at")}
    return {**incumbent_view(incumbent), "adoption": adoption if incumbent.step is not None else None}


def bound_view(bound: Row[Any]) -> dict[str, Any]:
    return {name: getattr(bound, name) for name in ("problem_version", "lower_bound_ms", "found_at")}


def log_view(lines: Sequence[Row[Any]]) -> list[dict[str, Any]]:
    return [{name: getattr(line, name) for name in ("number", "at", "attempt", "level", "text")} for line in lines]


def uses(certificate: Certificate) -> list[dict[str, Any]]:
    """The most bytes that each device and its host memory hold, and their limits."""
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


def event(name: str, data: Mapping[str, Any], number: int | None = None) -> bytes:
    """A server-sent event."""
    identity = "" if number is None else f"id: {number}\n"
    return f"{identity}event: {name}\ndata: {text(data)}\n\n".encode()


def end_event(job: Row[Any], last: Row[Any] | None) -> bytes:
    """The last event of a job: the job, and its best incumbent in short form. Its id is that of the last incumbent."""
    best = incumbent_view(last) if last is not None and is_best(job, last) else None
    return event("end", {**job_view(job), "best": best}, job.last_seq)


def is_best(job: Row[Any], last: Row[Any]) -> bool:
    """Whether the last incumbent is one for the job's current problem."""
    return last.seq == job.last_seq and bool(last.problem_version == job.problem_version)
