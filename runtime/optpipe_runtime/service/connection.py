"""`ServiceConnection`: the client's HTTP requests to the solver service.

No answer is trusted: each is cut off at a length and waited for only so long, and only the models in `answers` read it.
Every request can be cancelled at any time.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

# httpx imports these at its first request. That would take a tenth of a second beside the training, and a full garbage
# collection, which stops the training longer.
import anyio._backends._asyncio  # noqa: F401
import httpcore  # noqa: F401
import httpx

from optpipe.errors import InputError
from optpipe.known import ScheduleCache
from optpipe_runtime.service.errors import InvalidAnswerError, RefusedError, UnauthorizedError, UnavailableError

CONNECT_S, READ_S = 2.0, 45.0  # how long to wait for a connection, and for data
LONGEST_REQUEST = 2**20  # bytes that the service accepts
LONGEST_ANSWER = 2**18  # bytes; the problem decides how long an answer with a schedule may be
LONGEST_EVENT = 2**18
LONGEST_WAIT_S = 300.0  # whatever Retry-After says
EVENT_S = 0.01  # between two events: a flood of them would take the interpreter from the training
KEY_VARIABLE, URL_VARIABLE = "OPTPIPE_KEY", "OPTPIPE_URL"
RUNS = {"SLURM_JOB_ID": "slurm", "TORCHELASTIC_RUN_ID": "torchrun"}  # who started the training, by its variable
UNNAMED = ("", "none")  # the second is torchrun's without --rdzv-id


class ServiceConnection:
    """HTTP requests to one service, from one event loop."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url, self._has_key = url, key is not None
        self._read_s, self._reply_s = READ_S, CONNECT_S + READ_S
        self._headers = {"Accept-Encoding": "identity", **({} if key is None else {"Authorization": f"Bearer {key}"})}
        self._timeout = httpx.Timeout(READ_S, connect=CONNECT_S)

    async def __aenter__(self) -> ServiceConnection:
        self._http = httpx.AsyncClient(timeout=self._timeout, trust_env=False, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def request(
        self,
        method: str,
        path: str,
        content: Mapping[str, Any] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        longest: int = LONGEST_ANSWER,
    ) -> bytes:
        """The body of the answer to one request, of at most `longest` bytes. Raises one of `service.errors` if there is
        none."""
        if isinstance(content, Mapping):
            content = json.dumps(content).encode()
        kind = {} if content is None else {"Content-Type": "application/json"}
        request = self._http.build_request(
            method, self._url + path, content=content, headers={**kind, **(headers or {})}
        )
        async with self._in_time(self._reply_s), aclosing(await self._http.send(request, stream=True)) as response:
            return await self._answer(response, longest)

    async def events(self, job: str, after: int) -> AsyncGenerator[tuple[str, str], None]:
        """Server-sent events of a job as (name, data), from those after the incumbent number `after`. A keep-alive has
        the name "". Ends only if the service says that the job is over and has no more events."""
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
                raise InvalidAnswerError(f"HTTP status {response.status_code}")
            async with aclosing(_events(response)) as events:
                while True:
                    async with self._in_time(self._read_s):
                        event = await anext(events, None)
                    if event is None:
                        raise UnavailableError("the stream of events ended before the job")
                    yield event
                    await asyncio.sleep(EVENT_S)

    @asynccontextmanager
    async def _in_time(self, seconds: float) -> AsyncIterator[None]:
        """Raises `UnavailableError` if what runs in this context takes longer, be it that nothing comes or that bytes
        trickle in."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except (TimeoutError, httpx.TimeoutException):
            raise UnavailableError(f"no answer within {seconds:g} s") from None
        except httpx.HTTPError as error:
            raise UnavailableError(str(error) or type(error).__name__) from None

    async def _answer(self, response: httpx.Response, longest: int) -> bytes:
        status, body = response.status_code, bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > longest:
                raise InvalidAnswerError(f"an answer longer than {longest} bytes")
        if status == 401:
            wants = "it does not know the API key" if self._has_key else "it requires an API key"
            raise UnauthorizedError(f"{wants}; give one of its own by key= or by {KEY_VARIABLE} in the environment")
        if status == 403:
            raise UnauthorizedError(_detail(body))
        if status >= 500 or status in (408, 429):
            raise UnavailableError(f"HTTP status {status}", _seconds(response.headers.get("retry-after", "")))
        if status >= 400:
            raise RefusedError(status, _detail(body))
        if not 200 <= status < 300:
            raise InvalidAnswerError(f"HTTP status {status}")
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
            raise InvalidAnswerError(f"an event longer than {LONGEST_EVENT} bytes")


def _detail(reply: bytes | bytearray) -> str:
    """The `detail` of a problem document (RFC 9457)."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return str(json.loads(reply)["detail"])
    return "it does not say why"


def _seconds(retry_after: str) -> float:
    """The seconds that Retry-After asks for; 0 for a date, which the service never gives."""
    seconds = float(retry_after) if re.fullmatch(r"[0-9]{1,9}", retry_after) else 0.0
    return min(seconds, LONGEST_WAIT_S)


def service_url(given: str | None, cache: ScheduleCache | None = None) -> str | None:
    """The address of the service, the one given or the environment's, without a slash at its end.

    None, with a cache or if neither is there: the search runs on this host. Raises `InputError` for a text that is no
    address, and for one beside a cache.
    """
    if given is None:
        named = os.environ.get(URL_VARIABLE)
        return base_url(named, URL_VARIABLE) if named and cache is None else None
    if cache is not None:
        raise InputError(f"url = {given[:100]!r}: with a cache None was expected, the service has its own")
    return base_url(given)


def base_url(url: str, name: str = "url") -> str:
    """The address without a slash at its end. Raises `InputError`, about `name`, for a text that is none."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        parts = httpx.URL("")
    if parts.userinfo:
        raise InputError(
            f"{name}: must be http://HOST:PORT without a name or password; the service takes an API key, in "
            f"{KEY_VARIABLE}"
        )
    if parts.scheme not in ("http", "https") or not parts.host:
        raise InputError(f"{name} = {url[:100]!r}: must be http://HOST:PORT")
    return url.rstrip("/")


def run_name() -> str:
    """What the cluster calls this training, such as `slurm-4711`; "" if nothing has started it that gives it a name."""
    runs = ((who, os.environ.get(variable, "")) for variable, who in RUNS.items())
    return next((f"{who}-{name}" for who, name in runs if name not in UNNAMED), "")[:200]


def api_key(given: str | None) -> str | None:
    """The key to use: the one given, else the environment's. Raises `InputError`, which does not show it, if it cannot
    be a key."""
    key = given if given is not None else os.environ.get(KEY_VARIABLE) or None
    if key is not None and not re.fullmatch(r"[\x21-\x7e]{1,200}", key):
        where = f"{KEY_VARIABLE} in the environment" if given is None else "key"
        raise InputError(f"{where}: must be an API key of the service, op_..., without spaces or line ends")
    return key
