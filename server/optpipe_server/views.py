"""How jobs and incumbents look from outside."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Row

from optpipe.child import Programs
from optpipe_server.store import OPEN

_SHOWN = (
    *("id", "state", "reason", "problem_name", "problem_sha256", "method", "objective", "time_limit_s"),
    *("status", "lower_bound_ms", "gap", "created_at", "started_at", "ended_at"),
)


def job_view(job: Row[Any], best: dict[str, Any] | None) -> dict[str, Any]:
    """A job; `best` is the view of its last incumbent."""
    shown = {name: getattr(job, name) for name in _SHOWN}
    return {**shown, "notes": json.loads(job.notes), "url": job_url(job.id), "best": best}


def job_url(job_id: str) -> str:
    return f"/v1/jobs/{job_id}"


def incumbent_view(incumbent: Row[Any]) -> dict[str, Any]:
    """An incumbent in short, with the address of the whole."""
    shown = {name: getattr(incumbent, name) for name in ("seq", "source", "method", "makespan_ms", "span_ms", "found_at")}
    return {**shown, "url": f"{job_url(incumbent.job)}/incumbents/{incumbent.seq}"}


def whole_incumbent_view(job: Row[Any], incumbent: Row[Any]) -> dict[str, Any]:
    """An incumbent with its schedule as a document of `optpipe.schedule/1`, without the nominal times, which follow from the rest."""
    programs = Programs.model_validate_json(incumbent.programs)
    links = {link: text.split() for link, text in programs.links.items()}
    schedule = {
        "format": "optpipe.schedule/1",
        "problem": json.loads(job.problem),
        "problem_sha256": job.problem_sha256,
        "method": incumbent.method,
        "makespan_ms": incumbent.makespan_ms,
        "span_ms": incumbent.span_ms,
        "devices": [{"program": text.split()} for text in programs.programs],
        **({"links": links} if links else {}),
    }
    return {**incumbent_view(incumbent), "schedule": schedule}


def end_view(job: Row[Any], best: Row[Any] | None) -> dict[str, Any]:
    """The last event of a job."""
    assert job.state not in OPEN
    return job_view(job, incumbent_view(best) if best else None)
