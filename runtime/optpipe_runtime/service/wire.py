"""How the client speaks with the solver service: requests, what comes back or does not, server-sent events, how long to
wait.

Nothing is believed: answers are cut off at a length, waited for so long, and read by models of what the client needs.
All of it may be cancelled at any time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, TypeVar

# httpx imports these at its first request: a tenth of a second beside the training, and a full garbage collection,
# which stops it longer.
import anyio._backends._asyncio  # noqa: F401
import httpcore  # noqa: F401
import httpx
from pydantic import BaseModel, FailFast, Field, ValidationError

from optpipe.errors import InputError, input_error

log = logging.getLogger("optpipe.client")

LONGEST_REQUEST = 2**20  # bytes that the service takes
LONGEST_ANSWER = 2**18  # bytes; of an answer with a schedule the problem decides
LONGEST_EVENT = 2**18
LONGEST_WAIT_S = 300.0  # whatever Retry-After says
EVENT_S = 0.01  # between two events: a flood of them would take the training's share of the interpreter
KEY_VARIABLE = "OPTPIPE_KEY"


class AwayError(Exception):
    """The service does not answer, or not now; it may say when."""

    def __init__(self, why: str, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class WrongError(Exception):
    """The service answers what makes no sense."""


class ClosedError(Exception):
    """The service does not take the API key, or wants one."""


class DeniedError(Exception):
    """The service understands, and will not: HTTP status and its sentence."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Job(BaseModel):
    """What the client reads of a job that has just been given a problem."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # goes into addresses
    problem_version: int = 1


class State(BaseModel):
    """How a job is; also its last event."""

    state: str
    reason: str | None = None


class News(BaseModel):
    """An incumbent in short."""

    seq: Annotated[int, Field(ge=1, le=2**53)]
    problem_version: int | None = None


class _Device(BaseModel):
    program: Annotated[list[str], FailFast()]


class _Schedule(BaseModel):
    """Of a schedule document only what decides; times and costs are this client's own."""

    devices: Annotated[list[_Device], FailFast()]
    links: dict[str, Annotated[list[str], FailFast()]] | None = None
    method: str = ""


class Incumbent(BaseModel):
    schedule: _Schedule


Model = TypeVar("Model", bound=BaseModel)


def parsed(model: type[Model], text: str | bytes) -> Model:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise WrongError(str(input_error(error, "its answer"))) from None


class Wire:
    """One service, as one event loop speaks with it. Times are seconds."""

    def __init__(self, url: str, key: str | None, connect_s: float, read_s: float) -> None:
        self._url, self._has_key, self._read_s, self._reply_s = (
            base_url(url),
            key is not None,
            read_s,
            connect_s + read_s,
        )
        self._headers = {"Accept-Encoding": "identity", **({} if key is None else {"Authorization": f"Bearer {key}"})}
        self._timeout = httpx.Timeout(read_s, connect=connect_s)

    async def __aenter__(self) -> Wire:
        self._http = httpx.AsyncClient(timeout=self._timeout, trust_env=False, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        content: Mapping[str, Any] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        longest: int = LONGEST_ANSWER,
    ) -> bytes:
        """The body of the answer to one request, of `longest` bytes at most; raises one of this module's errors where
        there is none."""
        if isinstance(content, Mapping):
            content = json.dumps(content).encode()
        kind = {} if content is None else {"Content-Type": "application/json"}
        request = self._http.build_request(
            method, self._url + path, content=content, headers={**kind, **(headers or {})}
        )
        async with self._in_time(self._reply_s), aclosing(await self._http.send(request, stream=True)) as response:
            return await self._answer(response, longest)

    async def events(self, job: str, after: int) -> AsyncGenerator[tuple[str, str], None]:
        """Server-sent events of a job as (name, data), those after the incumbent of that number; a sign of life has the
        name "". Ends only where the service says that the job is over and nothing is left to tell."""
        request = self._http.build_request(
            "GET", f"{self._url}/v1/jobs/{job}/events", headers={"Last-Event-ID": str(after)}
        )
        async with self._in_time(self._reply_s):
            response = await self._http.send(request, stream=True)
        async with aclosing(response):
            if response.status_code == 204:
                return
            if response.status_code != 200:
                async with self._in_time(self._reply_s):
                    await self._answer(response, LONGEST_ANSWER)
                raise WrongError(f"HTTP status {response.status_code}")
            async with aclosing(_events(response)) as events:
                while True:
                    async with self._in_time(self._read_s):
                        event = await anext(events, None)
                    if event is None:
                        raise AwayError("the stream of events ended before the job")
                    yield event
                    await asyncio.sleep(EVENT_S)

    @asynccontextmanager
    async def _in_time(self, seconds: float) -> AsyncIterator[None]:
        """Whatever comes slowly, byte by byte, too, or not at all, is away."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except (TimeoutError, httpx.TimeoutException):
            raise AwayError(f"no answer within {seconds:g} s") from None
        except httpx.HTTPError as error:
            raise AwayError(str(error) or type(error).__name__) from None

    async def _answer(self, response: httpx.Response, longest: int) -> bytes:
        status, body = response.status_code, bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > longest:
                raise WrongError(f"an answer longer than {longest} bytes")
        if status == 401:
            wants = "it does not know the API key" if self._has_key else "it wants an API key"
            raise ClosedError(f"{wants}; give one of its own by key= or by {KEY_VARIABLE} in the environment")
        if status == 403:
            raise ClosedError(_detail(body))
        if status >= 500 or status in (408, 429):
            raise AwayError(f"HTTP status {status}", _seconds(response.headers.get("retry-after", "")))
        if status >= 400:
            raise DeniedError(status, _detail(body))
        if not 200 <= status < 300:
            raise WrongError(f"HTTP status {status}")
        return bytes(body)


async def _events(response: httpx.Response) -> AsyncGenerator[tuple[str, str], None]:
    rest, size = b"", 0
    name, data = "", ""
    async for chunk in response.aiter_raw():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            size += len(line) + 1
            field, _, value = line.decode(errors="replace").rstrip("\r").partition(":")
            if field == "event":
                name = value.strip()
            elif field == "data":
                data += value
            elif not field:
                yield name, data
                name, data, size = "", "", 0
        if size + len(rest) > LONGEST_EVENT:
            raise WrongError(f"an event longer than {LONGEST_EVENT} bytes")


def _detail(reply: bytes | bytearray) -> str:
    """The sentence of a problem document (RFC 9457)."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return str(json.loads(reply)["detail"])[:300]
    return "it does not say why"


def _seconds(retry_after: str) -> float:
    """What Retry-After asks for, in seconds or as a date."""
    wanted = 0.0
    if re.fullmatch(r"[0-9]{1,9}", retry_after):
        wanted = float(retry_after)
    elif retry_after:
        with suppress(ValueError, TypeError, OverflowError):
            wanted = parsedate_to_datetime(retry_after).timestamp() - time.time()
    return min(max(wanted, 0.0), LONGEST_WAIT_S)


class Backoff:
    """The wait before the next try: from `first` seconds, doubled each time, to `longest`; with jitter, and not less
    than asked."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self.longest = first, longest
        self.failures = 0  # since the service last was of use

    def forget(self) -> None:
        self.failures = 0

    async def wait(self, at_least_s: float = 0.0) -> None:
        delay = min(self.longest, self._first * 2 ** min(self.failures, 30)) * random.uniform(0.5, 1.0)
        self.failures += 1
        await asyncio.sleep(
            max(delay, at_least_s * random.uniform(1.0, 1.2))
        )  # those who were sent away together come back apart


class Outages:
    """One warning an outage, however many tries it takes, and one line when it is over."""

    WORDS = {  # noqa: RUF012
        "away": ("is away", "is there again"),
        "wrong": ("is wrong", "is right again"),
        "closed": ("does not let this client in", "lets this client in again"),
    }

    def __init__(self, url: str) -> None:
        self._url = url
        self.now: set[str] = set()

    def begin(self, kind: str, why: object) -> None:
        if kind not in self.now:
            self.now.add(kind)
            what = self.WORDS[kind][0]
            log.warning(
                "the solver service at %s %s: %s; training goes on with the schedule it has",
                self._url,
                what,
                str(why)[:300],
            )

    def end(self, *kinds: str) -> None:
        for kind in self.now & {*kinds}:
            self.now.remove(kind)
            log.info("the solver service at %s %s", self._url, self.WORDS[kind][1])


def base_url(url: str) -> str:
    """The address of a service, without a slash at its end; `InputError` for what is none."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        parts = httpx.URL("")
    if parts.userinfo:
        raise InputError(
            "url: must be http://HOST:PORT without a name or password; what the service wants is an API key, in "
            f"{KEY_VARIABLE}"
        )
    if parts.scheme not in ("http", "https") or not parts.host:
        raise InputError(f"url = {url[:100]!r}: must be http://HOST:PORT")
    return url.rstrip("/")


def api_key(given: str | None) -> str | None:
    """The key to use: the one given, else the environment's; `InputError`, which does not show it, for what is none."""
    key = given if given is not None else os.environ.get(KEY_VARIABLE) or None
    if key is not None and not re.fullmatch(r"[\x21-\x7e]{1,200}", key):
        where = f"{KEY_VARIABLE} in the environment" if given is None else "key"
        raise InputError(f"{where}: must be an API key of the service, op_..., without spaces or line ends")
    return key
