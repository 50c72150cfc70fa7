"""`RequestContext`: what routes need of a request, such as the service, the tenant and the job in the path."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

import anyio
from fastapi import Depends, Header, Path, Request
from fastapi.responses import Response
from sqlalchemy import Row
from starlette.types import Receive

from optpipe_server.http.replies import ReplyError
from optpipe_server.http.service import Service
from optpipe_server.http.views import etag, incumbent_text, is_best, job_text

T = TypeVar("T")
Job = Row[Any]

LARGEST = 2**53  # number that the database is queried for
NO_SUCH_JOB = "There is no such job."
ID = re.compile("[0-9a-f]{32}")


class RequestContext:
    """A request, its tenant, and the service that answers it. Database queries run in a thread."""

    def __init__(self, request: Request) -> None:
        self.service: Service = request.app.state.service
        self.tenant: str = request.state.caller.tenant
        self._request = request

    @asynccontextmanager
    async def cancelled_on_disconnect(self) -> AsyncIterator[None]:
        """Cancel what is awaited in the block if the client disconnects. The request's body must have been read."""

        async def wait_and_cancel() -> None:
            await disconnected(self._request.receive)
            group.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(wait_and_cancel)
                yield
                group.cancel_scope.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the block's own: nothing else raises one

    def job(self, job_id: str) -> Job:
        """Return the tenant's job without its problem. Raises `ReplyError` (404) if the tenant has no such job."""
        return _found(self.service.jobs.job_without_problem(self.tenant, job_id) if ID.fullmatch(job_id) else None)

    async def query_job(self, job_id: str, query: Callable[[Job], T]) -> T:
        """Query the database about a job. Raises `ReplyError` (404) if there is no such job, or no longer."""

        def both() -> T:
            try:
                return query(self.job(job_id))
            except LookupError:
                raise ReplyError(404, NO_SUCH_JOB) from None

        return await self.service.query(both)

    async def job_reply(self, job_id: str, status: int = 200, headers: dict[str, str] | None = None) -> Response:
        """Return the reply that shows a job with its best schedule."""

        def reply() -> Response:
            jobs = self.service.jobs
            job, last = jobs.job_with_last_incumbent(self.tenant, job_id) if ID.fullmatch(job_id) else (None, None)
            job = _found(job)
            best = incumbent_text(last) if last is not None and is_best(job, last) else None
            return Response(
                job_text(job, best), status, {"ETag": etag(job.version), **(headers or {})}, "application/json"
            )

        return await self.service.query(reply)

    def best(self, job: Job) -> Row[Any] | None:
        """Return the best incumbent for the job's current problem."""
        last = self.service.jobs.incumbent(job.id, job.last_seq) if job.last_seq else None
        return last if last is not None and is_best(job, last) else None


def _found(job: Job | None) -> Job:
    if job is None:
        raise ReplyError(404, NO_SUCH_JOB)
    return job


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def matches_etag(header: str | None, number: int) -> bool:
    """Return whether If-None-Match names this version."""
    return header is not None and (
        header.strip() == "*" or etag(number) in (tag.strip().removeprefix("W/") for tag in header.split(","))
    )


async def _context(request: Request) -> RequestContext:  # a coroutine, because FastAPI runs functions in a thread
    return RequestContext(request)


Context = Annotated[RequestContext, Depends(_context)]
JobId = Annotated[str, Path(description="The job's id, 32 hexadecimal digits.", examples=["0" * 32])]
IfNoneMatch = Annotated[str | None, Header(description="ETags of the versions that the client has.")]
