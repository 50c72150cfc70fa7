"""A job's incumbents as server-sent events: `id` is the number, a comment is a sign of life, `end` is the last."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Row

from optpipe_server.changes import Changes, wait_for
from optpipe_server.store import OPEN, Store
from optpipe_server.views import end_view, incumbent_view


async def stream(store: Store, changes: Changes, job_id: str, after: int, ping_s: float) -> AsyncIterator[str]:
    """Every incumbent numbered above `after`, those that are there and those to come, until the job or the service ends."""
    with changes.watching(job_id) as changed:
        while not changes.closing:
            changed.clear()
            job, new = await run_in_threadpool(_look, store, job_id, after)
            for incumbent in new:
                after = incumbent.seq
                yield _event("incumbent", incumbent_view(incumbent), after)
            if job.state not in OPEN:
                yield _event("end", end_view(job, await run_in_threadpool(store.incumbent, job_id)))
                return
            if not await wait_for(changed, ping_s):
                yield ": ping\n\n"


def _look(store: Store, job_id: str, after: int) -> tuple[Row[Any], list[Row[Any]]]:
    """The job first: what it has found by then, the incumbents read after it cannot lack."""
    job = store.job(job_id)
    assert job is not None
    return job, list(store.incumbents(job_id, after))


def _event(name: str, data: dict[str, Any], number: int | None = None) -> str:
    identity = "" if number is None else f"id: {number}\n"
    return f"{identity}event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
