"""A client of a service: the search of `optpipe solve --url`, and `optpipe jobs ...`."""

from __future__ import annotations

import asyncio
import json as json_
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from uuid import uuid4

from cyclopts import Parameter

from optpipe.errors import InputError, OptPipeError
from optpipe.evaluate.objective import raises
from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe.results import NOTHING_YET, Improvement, Result
from optpipe.schedule import Schedule, ScheduleFile, check
from optpipe_cli.options import Json, Output, need
from optpipe_cli.output import echo, print_json, print_rows

if TYPE_CHECKING:
    from httpx import AsyncClient

T = TypeVar("T")

TRIES = 10  # in a row, to reach a service that is full, or was there before
LONGEST = 2**26  # bytes of a reply
LISTED = 100  # jobs
Url = Annotated[str | None, Parameter(help="The service's address. Default: OPTPIPE_URL. Its key is in OPTPIPE_KEY.")]
Id = Annotated[str, Parameter(help="Its id, as `list` shows it.")]


class ServiceSearch:
    """A service's search, iterated over and cancelled as `optpipe.anytime.Search`. Every schedule is checked here."""

    def __init__(self, url: str, problem: Problem, options: SolveOptions, start: Schedule | None) -> None:
        options = options.for_problem(problem)
        self._url, self._problem, self._options = url, problem, options
        self._content: dict[str, Any] = {"problem": problem.to_dict(), **options.model_dump(exclude_none=True)}
        if start is not None:
            file = ScheduleFile.from_schedule(start, with_ops=False)
            self._content["warm_start"] = file.model_dump(mode="json", exclude_none=True)
        self.best = Result(
            "unknown", objective=options.objective, reason=NOTHING_YET, placements=options.placements_of(problem)
        )
        self._began, self._key = time.monotonic(), uuid4().hex
        self._path, self._seen = "", 0  # of the job, once there is one; the number of its last schedule here

    def __iter__(self) -> Iterator[Result]:
        """Yield the last result. Raises OptPipeError if the service does not answer, or refuses the problem."""
        yield _connected(self._url, self._followed)

    def cancel(self) -> None:
        """End the search; its result is the best so far."""
        if self._path:
            _ask(self._url, "POST", f"{self._path}/cancel")

    async def _followed(self, http: AsyncClient) -> Result:
        from optpipe_runtime.service.requests import UnavailableError

        tries = 0  # in a row
        while True:
            place = self._path, self._seen
            try:
                return await self._follow(http)
            except UnavailableError as error:
                tries = tries + 1 if (self._path, self._seen) == place else 1
                if tries == TRIES or not (self._path or error.retry_after_s):
                    raise
                await asyncio.sleep(max(1.0, error.retry_after_s))

    async def _follow(self, http: AsyncClient) -> Result:
        """Submit a job, unless there is one, and take its schedules as they come; return the result at its end."""
        from optpipe_runtime.service.requests import IncumbentEvent, JobAnswer, events, parse, request, verified

        if not self._path:
            headers = {"Idempotency-Key": self._key}
            job = parse(JobAnswer, await request(http, "POST", "/v1/jobs", self._content, headers, LONGEST)).id
            self._path = f"/v1/jobs/{job}"
            echo(f"job {job}", err=True)
        async with aclosing(events(http, self._path.rpartition("/")[2], self._seen)) as stream:
            async for event in stream:
                if event.event == "incumbent":
                    self._seen = parse(IncumbentEvent, event.data).seq
                    reply = await request(http, "GET", f"{self._path}/incumbents/{self._seen}", longest=LONGEST)
                    self._take(verified(reply, self._problem, self._options.placements_of(self._problem)))
        job = json_.loads(await request(http, "GET", self._path, longest=LONGEST))
        result = replace(self.best, reason=job["reason"], time_s=time.monotonic() - self._began)
        if result.schedule is None:
            return replace(result, status="infeasible" if job["state"] == "infeasible" else "unknown")
        bound, value_ms = job["lower_bound_ms"], result.value_ms
        if bound is not None and value_ms is not None and raises(bound, value_ms):
            raise OptPipeError(f"the service claims a bound of {bound} ms, above a schedule of {value_ms} ms")
        result = replace(result, lower_bound_ms=bound)
        return replace(result, status=result.proven_status)

    def _take(self, schedule: Schedule) -> None:
        found = Result.from_schedule(schedule, self._options)
        step = Improvement(time.monotonic() - self._began, found.method, found.value_ms or 0.0, None)
        self.best = replace(found, history=(*self.best.history, step))


def list_(*, url: Url = None, json: Json = False) -> None:
    """`optpipe jobs list`."""
    jobs = _ask(url, "GET", f"/v1/jobs?limit={LISTED}")["jobs"]
    if json:
        print_json(jobs)
    else:
        print_rows([_row(job) for job in jobs], "there are no jobs")


def show(
    job: Id,
    /,
    *,
    url: Url = None,
    output: Annotated[Output, Parameter(help="Write its best schedule here.")] = None,
    json: Json = False,
) -> None:
    """`optpipe jobs show`."""
    shown = _ask(url, "GET", f"/v1/jobs/{job}")
    best = shown.pop("best")
    if output and best is None:
        raise InputError(f"{job}: the job has no schedule")
    if output:
        file = ScheduleFile.model_validate(best["schedule"])
        schedule = file.schedule()
        if wrong := check(schedule.problem, schedule):
            raise OptPipeError(f"the service's schedule is invalid: {wrong[0]}")
        file.save(output)
    if json:
        print_json(shown)
        return
    for name, value in _row(shown).items():
        if value:
            echo(f"{name}: {value}")
    for line in _ask(url, "GET", f"/v1/jobs/{job}/log")["lines"]:
        echo(f"{line['at']} {line['text']}")


def extend(
    job: Id, /, *, time_limit_s: Annotated[float, Parameter(help="Seconds that it may take in all.")], url: Url = None
) -> None:
    """`optpipe jobs extend`."""
    seen = {"If-Match": f'"{_ask(url, "GET", f"/v1/jobs/{job}")["version"]}"'}
    _ask(url, "PATCH", f"/v1/jobs/{job}", {"time_limit_s": time_limit_s}, seen)


def cancel(job: Id, /, *, url: Url = None) -> None:
    """`optpipe jobs cancel`."""
    _ask(url, "POST", f"/v1/jobs/{job}/cancel")


def _row(job: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "job": job["id"],
        "name": job["problem_name"],
        "state": job["state"],
        "ms": job["value_ms"],
        "gap": job["gap"],
        "method": job["options"]["method"],
        "submitted": job["created_at"][:19],
        "why": job["reason"],
    }


def _ask(url: str | None, method: str, path: str, content: Mapping[str, Any] | None = None, headers: Any = None) -> Any:
    """The service's answer. Raises as `_connected`."""

    async def answer(http: AsyncClient) -> Any:
        from optpipe_runtime.service.requests import request

        return json_.loads(await request(http, method, path, content, headers, LONGEST))

    return _connected(url, answer)


def _connected(url: str | None, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
    """What the work returns. Raises InputError for what is no address, and OptPipeError with the service's if it does
    not answer, or refuses."""
    need("runtime", "httpx", "httpx_sse")
    from optpipe_runtime.service.requests import ServiceError, api_key, http_client, service_url

    address, key = service_url(url), api_key(None)
    if address is None:
        raise InputError("--url is missing, and OPTPIPE_URL is not set: the address of a service is expected")

    async def run() -> T:
        async with http_client(address, key) as http:
            return await work(http)

    try:
        return asyncio.run(run())
    except ServiceError as error:
        raise OptPipeError(f"{address}: {error}") from None
