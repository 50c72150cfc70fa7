"""`/healthz`, `/readyz`, `/metrics` and `/openapi.json`."""

from __future__ import annotations

import time
from typing import Any, Literal, get_args

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import optpipe
from optpipe.model.records import Record
from optpipe_server.database.tables import State
from optpipe_server.http.auth import ADMIN, READ
from optpipe_server.http.context import Context
from optpipe_server.http.guarded_route import guarded_router
from optpipe_server.http.replies import ENDING, SOON_S, ReplyError
from optpipe_server.http.service import Service
from optpipe_server.metrics import JOBS, REGISTRY, REQUESTS

router, guarded = APIRouter(tags=["operation"]), guarded_router("", "operation")  # the first needs no key


class Health(Record):
    status: Literal["ok"] = "ok"
    version: str


class Ready(Record):
    """`solves` is the number of searches that this process runs at a time; with 0, workers search."""

    status: Literal["ready"] = "ready"
    solves: int


@router.get("/healthz")
async def healthz() -> Health:
    """The process answers."""
    return Health(version=optpipe.__version__)


@router.get("/readyz")
async def readyz(request: Request) -> Ready:
    """The service accepts jobs: it is not about to end, and its database stores what is written.

    This says nothing of workers in other processes: without any, jobs wait with their first schedule.
    """
    service: Service = request.app.state.service
    if service.job_updates.closing:
        raise ReplyError(503, ENDING, retry_s=SOON_S)
    await service.probe()
    return Ready(solves=service.settings.solves)


@guarded.get("/metrics", dependencies=[ADMIN], response_class=PlainTextResponse)
def metrics(context: Context) -> Response:
    """The counters of this process in Prometheus' text format, and the number of jobs in each state if the database
    answers."""
    try:
        counted = context.service.jobs.count()
    except SQLAlchemyError:
        JOBS.clear()
    else:
        for state in get_args(State):
            JOBS.labels(state).set(counted.get(state, 0))
    return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)


@guarded.get("/openapi.json", dependencies=[READ])
async def description(request: Request) -> dict[str, Any]:
    """The description of the API."""
    described: dict[str, Any] = request.app.openapi()
    return described


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")  # clients may invent others, and each would stay a label


class RequestMetrics:
    """Measures every request until its reply is complete, except event streams, which stay open."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            if status and not route.endswith("/events"):
                method = scope["method"] if scope["method"] in METHODS else "other"
                REQUESTS.labels(method, route, status).observe(time.perf_counter() - began)
