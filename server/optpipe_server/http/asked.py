"""What routes ask of a request: the service, who asks, the job in the path, the versions in its headers."""

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

LARGEST = 2**53  # of numbers that the database is asked for
MISSING = "There is no such job."
ID = re.compile("[0-9a-f]{32}")


class Asked:
    """A request and what stands behind it. What reads the database runs in a thread."""

    def __init__(self, request: Request) -> None:
        self.service: Service = request.app.state.service
        self.tenant: str = request.state.caller.tenant
        self._request = request

    @asynccontextmanager
    async def while_there(self) -> AsyncIterator[None]:
        """What is awaited in the block ends when the client hangs up; its body has been read."""

        async def until_hung_up() -> None:
            await hung_up(self._request.receive)
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(until_hung_up)
            yield
            group.cancel_scope.cancel()

    def head(self, job_id: str) -> Job:
        """The tenant's job; anybody else's is none."""
        return _there(self.service.jobs.head(self.tenant, job_id) if ID.fullmatch(job_id) else None)

    async def of_job(self, job_id: str, question: Callable[[Job], T]) -> T:
        """What the database says of the job; 404 where it is purged before the answer."""

        def both() -> T:
            try:
                return question(self.head(job_id))
            except LookupError:
                raise ReplyError(404, MISSING) from None

        return await self.service.ask(both)

    async def shown(self, job_id: str, status: int = 200, headers: dict[str, str] | None = None) -> Response:
        """The job with its best schedule."""

        def reply() -> Response:
            job, last = self.service.jobs.shown(self.tenant, job_id) if ID.fullmatch(job_id) else (None, None)
            job = _there(job)
            best = incumbent_text(last) if last is not None and is_best(job, last) else None
            return Response(
                job_text(job, best), status, {"ETag": etag(job.version), **(headers or {})}, "application/json"
            )

        return await self.service.ask(reply)

    def best(self, job: Job) -> Row[Any] | None:
        """The best schedule for the problem that counts."""
        last = self.service.jobs.incumbent(job.id, job.last_seq) if job.last_seq else None
        return last if last is not None and is_best(job, last) else None


def _there(job: Job | None) -> Job:
    if job is None:
        raise ReplyError(404, MISSING)
    return job


async def hung_up(receive: Receive) -> None:
    """Until the client of a request whose body has been read hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass


def names(header: str | None, number: int) -> bool:
    """Whether If-None-Match names this version."""
    return header is not None and (
        header.strip() == "*" or etag(number) in (tag.strip().removeprefix("W/") for tag in header.split(","))
    )


async def _asked(request: Request) -> Asked:  # what is no coroutine would be called in a thread, for each request
    return Asked(request)


Ask = Annotated[Asked, Depends(_asked)]
JobId = Annotated[str, Path(description="Of a job, 32 hexadecimal digits.", examples=["0" * 32])]
Tags = Annotated[str | None, Header(description="ETags of what is known.")]
