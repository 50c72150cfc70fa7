"""The cached schedule of a problem, without a job."""

from __future__ import annotations

from typing import Any, Literal

from fastapi.responses import Response

from optpipe.errors import InputError
from optpipe.evaluate.objective import gap, length_ms
from optpipe.model.records import Record
from optpipe.schedule import ScheduleFile
from optpipe_server.http.auth import READ
from optpipe_server.http.bodies import LookupBody
from optpipe_server.http.context import Context
from optpipe_server.http.guarded_route import guarded_router
from optpipe_server.http.replies import ReplyError

router = guarded_router("/v1", "tools")


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


@router.post("/cache/lookup", dependencies=[READ], response_model=Lookup)
async def look_up(sent: LookupBody, context: Context) -> Response:
    """The cached schedule of this problem, or of the most similar one whose schedule is valid for it."""

    def looked_up() -> dict[str, Any] | None:
        try:
            hit = context.service.cache.open().lookup(sent.problem, sent.objective)
        except InputError as error:  # not the client's mistake
            raise ReplyError(503, f"The cache cannot be used: {error}", retry_s=60) from None
        if hit is None:
            return None
        return {
            "exact": hit.exact,
            "source": hit.source,
            "distance": hit.distance,
            "terms": hit.terms,
            "status": hit.status,
            "lower_bound_ms": hit.lower_bound_ms,
            "gap": gap(length_ms(hit.schedule, sent.objective), hit.lower_bound_ms),
            "makespan_ms": hit.schedule.makespan_ms,
            "span_ms": hit.schedule.span_ms,
            "schedule": ScheduleFile.from_schedule(
                hit.schedule, with_ops=False, status=hit.status, lower_bound_ms=hit.lower_bound_ms
            ).model_dump(mode="json", exclude_none=True),
        }

    return await context.computed(context.service.checks, lambda: {"hit": looked_up()})
