"""What routes need of a request: the service, the job in the path, and its schedules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Depends, Path, Request
from fastapi.responses import JSONResponse, Response
from sqlalchemy import Row

from optpipe_server.database.changes import NO_INCUMBENT, NO_JOB, MissingError
from optpipe_server.database.jobs import is_best
from optpipe_server.http.schemas import job_document
from optpipe_server.http.service import Service

LARGEST = 2**53  # number that the database is queried for
NO_SCHEDULE = "The job has no schedule for its problem."
ID = re.compile("[0-9a-f]{32}")


class RequestContext:
    """A request, the name of its key, and the service that answers it.

    Methods that query the database are for threads: routes that FastAPI runs in one, or `service.query`.
    """

    def __init__(self, request: Request) -> None:
        self.service: Service = request.app.state.service
        self.key_name: str | None = request.user.display_name or None

    def job(self, job_id: str) -> Row[Any]:
        """Return the job. Raises `MissingError`."""
        if not ID.fullmatch(job_id):
            raise MissingError(NO_JOB)
        return self.service.jobs.job(job_id)

    def best(self, job: Row[Any]) -> Row[Any] | None:
        """Return the best incumbent for the job's current problem."""
        last = self.service.jobs.incumbent(job.id, job.last_seq) if job.last_seq else None
        return last if last is not None and is_best(job, last) else None

    def incumbent(self, job: Row[Any], seq: int | None) -> Row[Any]:
        """Return the incumbent of this number, or the best for the job's current problem. Raises `MissingError`."""
        if seq is None:
            incumbent = self.best(job)
        else:
            incumbent = self.service.jobs.incumbent(job.id, seq) if seq <= job.last_seq else None
        if incumbent is None:
            raise MissingError(NO_SCHEDULE if seq is None else NO_INCUMBENT)
        return incumbent

    def job_reply(
        self, job_id: str, status: int = 200, headers: Mapping[str, str] | None = None, if_none_match: str | None = None
    ) -> Response:
        """Return the reply that shows a job with its best schedule, or 304. Raises `MissingError`."""
        job = self.job(job_id)
        headers = {"ETag": f'"{job.version}"', **(headers or {})}
        if matches_etag(if_none_match, job.version):
            return Response(status_code=304, headers=headers)
        # Written here, in a thread: FastAPI would read it as records again, and write it in the event loop.
        return JSONResponse(job_document(job, self.best(job)), status, headers)


def matches_etag(header: str | None, version: int) -> bool:
    """Return whether If-None-Match names this version of a job."""
    return header is not None and (
        header.strip() == "*" or f'"{version}"' in (tag.strip().removeprefix("W/") for tag in header.split(","))
    )


async def _context(request: Request) -> RequestContext:  # a coroutine, because FastAPI runs functions in a thread
    return RequestContext(request)


Context = Annotated[RequestContext, Depends(_context)]
JobId = Annotated[str, Path(description="The job's id, 32 hexadecimal digits.", examples=["0" * 32])]


def _job(job_id: JobId, context: Context) -> Row[Any]:
    return context.job(job_id)


Job = Annotated[Row[Any], Depends(_job)]
