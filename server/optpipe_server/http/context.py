"""What routes need of a request: the service, the caller, and the job in the path."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

import anyio
from fastapi import Depends, Header, Path, Request
from fastapi.responses import Response
from sqlalchemy import Row

from optpipe_server.database.jobs import is_best
from optpipe_server.database.refusals import NO_INCUMBENT, NO_JOB, MissingError
from optpipe_server.http.limits import ComputeQueue
from optpipe_server.http.replies import JsonContent, json_reply
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
        self.request = request
        self.service: Service = request.app.state.service
        self.key_name: str | None = request.state.caller.name

    @asynccontextmanager
    async def cancelled_on_disconnect(self) -> AsyncIterator[None]:
        """Cancel what is awaited in the block if the client disconnects. The request's body must have been read."""

        async def wait_and_cancel() -> None:
            while (await self.request.receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(wait_and_cancel)
                yield
                group.cancel_scope.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the block's own: nothing else raises one

    async def computed(self, queue: ComputeQueue, computation: Callable[[], Response | JsonContent]) -> Response:
        """Compute a reply in the queue, and write it there. Raises as the computation and `ComputeQueue.run` do."""

        def reply() -> Response:
            content = computation()
            return content if isinstance(content, Response) else json_reply(content)

        return await queue.run(reply)

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
        headers = {"ETag": etag(job.version), **(headers or {})}
        if matches_etag(if_none_match, job.version):
            return Response(status_code=304, headers=headers)
        return json_reply(job_document(job, self.best(job)), status, headers)


def etag(number: int) -> str:
    """Return the ETag of a job's version, or of an incumbent's number."""
    return f'"{number}"'


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


def _job(job_id: JobId, context: Context) -> Row[Any]:
    return context.job(job_id)


Job = Annotated[Row[Any], Depends(_job)]
