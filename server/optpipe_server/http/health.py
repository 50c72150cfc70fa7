"""`/healthz`, `/readyz`, `/metrics` and `/openapi.json`."""

from __future__ import annotations

from typing import Any, Literal, get_args

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from sqlalchemy.exc import SQLAlchemyError

import optpipe
from optpipe.model.records import Record
from optpipe_server.database.tables import State
from optpipe_server.http.auth import ADMIN, READ
from optpipe_server.http.context import Context
from optpipe_server.http.replies import ENDING, SOON_S, ReplyError
from optpipe_server.http.service import Service
from optpipe_server.metrics import JOBS, REGISTRY

router = APIRouter(tags=["operation"])


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


@router.get("/metrics", dependencies=[ADMIN], response_class=PlainTextResponse)
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


@router.get("/openapi.json", dependencies=[READ])
async def description(request: Request) -> dict[str, Any]:
    """The description of the API."""
    described: dict[str, Any] = request.app.openapi()
    return described
