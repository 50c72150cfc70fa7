"""A client of a service: the search of `optpipe solve --url`, and `optpipe jobs ...`."""

from __future__ import annotations

import asyncio
import json as json_
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from optpipe.anytime import Keeper
from optpipe.errors import InputError, OptPipeError
from optpipe.evaluate.objective import raises
from optpipe.model.problem import Problem
from optpipe.options import SolveOptions
from optpipe.process.protocol import End, Incumbent, Programs
from optpipe.results import Result
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
        self._url, self._problem, self._options, self._start = url, problem, options.for_problem(problem), start
        self._found, self._job, self._is_cancelled = Keeper(problem, self._options), "", False

    @property
    def best(self) -> Result:
        """The best so far."""
        return self._found.result

    def __iter__(self) -> Iterator[Result]:
        """Yield the last result. Raises OptPipeError if the service does not answer, or refuses the problem."""
        yield _connected(self._url, self._searched)

    def cancel(self) -> None:
        """End the search; its result is the best so far."""
        self._is_cancelled = True
        if self._job:
            cancel(self._job, url=self._url)

    async def _searched(self, http: AsyncClient) -> Result:
        from optpipe_runtime.service.job import ServiceJob, retrying
        from optpipe_runtime.service.requests import UnavailableError

        job = ServiceJob(http, self._problem, self._options)

        def is_last(attempts: Any) -> bool:
            no_answer = not (job.id or attempts.outcome.exception().retry_after_s)
            return no_answer or attempts.attempt_number >= TRIES

        async for attempt in retrying(UnavailableError, stop=is_last):
            with attempt:
                if await job.pose(self.best.schedule or self._start):
                    self._job = str(job.id)
                    echo(f"job {job.id}", err=True)
                    if self._is_cancelled:  # before there was an answer
                        await job.cancel()
                async with aclosing(job.schedules()) as schedules:
                    async for _, schedule in schedules:
                        attempt.retry_state.attempt_number = 0
                        self._found.take(Incumbent(method=schedule.method, schedule=Programs.from_schedule(schedule)))
        self._found.take(End())
        bound, best_ms = job.end.lower_bound_ms, self.best.value_ms
        if bound is not None and best_ms is not None and raises(bound, best_ms):
            raise OptPipeError(f"the service claims a bound of {bound} ms, above a schedule of {best_ms} ms")
        result = replace(self.best, lower_bound_ms=bound, reason=job.end.reason)
        is_infeasible = result.schedule is None and job.end.state == "infeasible"
        return replace(result, status="infeasible" if is_infeasible else result.proven_status)


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
        "gap": None if job["gap"] is None else f"{job['gap']:.1%}",
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
    """What the work returns. Raises InputError for no address, OptPipeError if the service fails or refuses."""
    need("client")
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
