"""HTTP requests to the solver service.

No answer is trusted: each is cut off at a length and waited for only so long. Every request can be cancelled at any
time.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

# httpx imports these at its first request. That would take a tenth of a second beside the training, and a full garbage
# collection, which stops the training longer.
import anyio._backends._asyncio  # noqa: F401
import httpcore  # noqa: F401
import httpx
from httpx_sse import ServerSentEvent, SSEError, aconnect_sse

from optpipe.anytime import ScheduleCache
from optpipe.errors import InputError
from optpipe.text import printable

CONNECT_S, READ_S = 2.0, 45.0  # how long to wait for a connection, and for data
LONGEST_REQUEST = 2**20  # bytes that the service accepts
LONGEST_ANSWER = 2**18  # bytes; the problem decides how long an answer with a schedule may be
LONGEST_EVENT = 2**18
LONGEST_WAIT_S = 300.0  # at most, by Retry-After
LONGEST_REASON = 300  # characters of a text of the service that are repeated
PAUSE_S = 0.01  # between two events: a flood of them would take the interpreter from the training
KEY_VARIABLE, URL_VARIABLE = "OPTPIPE_KEY", "OPTPIPE_URL"
RUNS = {"SLURM_JOB_ID": "slurm", "TORCHELASTIC_RUN_ID": "torchrun"}  # who started the training, by its variable
UNNAMED = ("", "none")  # the second is torchrun's without --rdzv-id


class ServiceError(Exception):
    """What can go wrong between client and service, in one line, however much the service has said. `retry_after_s` is
    how long it asks to wait."""

    def __init__(self, why: str, retry_after_s: float = 0.0) -> None:
        super().__init__(printable(why, LONGEST_REASON))
        self.retry_after_s = retry_after_s


class UnavailableError(ServiceError):
    """The service does not answer, or cannot now."""


class InvalidAnswerError(ServiceError):
    """The service gives an answer that makes no sense."""


class UnauthorizedError(ServiceError):
    """The service does not accept the API key, or requires one."""


class RefusedError(ServiceError):
    """The service refuses a request: the HTTP status and its reason."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def http_client(url: str, key: str | None) -> httpx.AsyncClient:
    """For requests to one service, from one event loop."""
    headers = {"Accept-Encoding": "identity", **({} if key is None else {"Authorization": f"Bearer {key}"})}
    timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
    return httpx.AsyncClient(base_url=url, timeout=timeout, trust_env=False, headers=headers)


async def request(
    http: httpx.AsyncClient,
    method: str,
    path: str,
    content: Mapping[str, Any] | bytes | None = None,
    headers: Mapping[str, str] | None = None,
    longest: int = LONGEST_ANSWER,
) -> bytes:
    """The body of the answer to one request, of at most `longest` bytes. Raises a `ServiceError` if there is none."""
    body = json.dumps(content).encode() if isinstance(content, Mapping) else content
    kind = {} if content is None else {"Content-Type": "application/json"}
    async with (
        _in_time(CONNECT_S + READ_S),
        http.stream(method, path, content=body, headers={**kind, **(headers or {})}) as response,
    ):
        return await _body(response, longest)


async def events(http: httpx.AsyncClient, job: str, after: int) -> AsyncGenerator[ServerSentEvent, None]:
    """Server-sent events of the job at this path, from those after the incumbent number `after`. Ends only if the
    service says that the job is over and has no more events."""
    now = asyncio.get_running_loop().time
    async with (
        _in_time(CONNECT_S + READ_S) as limit,
        aconnect_sse(http, "GET", f"{job}/events", headers={"Last-Event-ID": str(after)}) as source,
    ):
        response = source.response
        if response.status_code == 204:
            return
        if response.status_code != 200 or "Content-Encoding" in response.headers:
            await _body(response, LONGEST_ANSWER)
            raise InvalidAnswerError(f"HTTP status {response.status_code}")
        pieces = _Pieces(response.stream, lambda: limit.reschedule(now() + READ_S))
        response.stream = pieces
        async for event in source.aiter_sse():
            pieces.size = 0
            limit.reschedule(None)  # while it is handled
            yield event
            await asyncio.sleep(PAUSE_S)
            limit.reschedule(now() + READ_S)
    raise UnavailableError("the stream of events ended before the job")


class _Pieces(httpx.AsyncByteStream):
    """A stream of events that may not flood: it pauses, and ends if one is too long. Calls `renew` after each line."""

    def __init__(self, stream: Any, renew: Callable[[], None]) -> None:
        self._stream, self._renew = stream, renew
        self.size = 0  # of the event so far

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            self.size += len(piece)
            if self.size > LONGEST_EVENT:
                raise InvalidAnswerError(f"an event longer than {LONGEST_EVENT} bytes")
            if b"\n" in piece:
                self._renew()
            if piece.endswith((b"\n\n", b"\r\n\r\n")):  # such as a keep-alive
                self.size = 0
            yield piece
            await asyncio.sleep(PAUSE_S)

    async def aclose(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def _in_time(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Raises `UnavailableError` if this context takes longer, whether nothing comes or bytes trickle in."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield limit
    except (TimeoutError, httpx.TimeoutException):
        raise UnavailableError(f"no answer within {seconds:g} s") from None
    except SSEError as error:
        raise InvalidAnswerError(str(error)) from None
    except httpx.HTTPError as error:
        raise UnavailableError(str(error) or type(error).__name__) from None


async def _body(response: httpx.Response, longest: int) -> bytes:
    status, body = response.status_code, bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > longest:
            raise InvalidAnswerError(f"an answer longer than {longest} bytes")
    if status == 401:
        has_key = "Authorization" in response.request.headers
        wants = "it does not know the API key" if has_key else "it requires an API key"
        raise UnauthorizedError(f"{wants}; give one of its own by key= or by {KEY_VARIABLE} in the environment")
    if status == 403:
        raise UnauthorizedError(_detail(body))
    if status >= 500 or status in (408, 429):
        raise UnavailableError(f"HTTP status {status}", retry_after_s(response.headers.get("retry-after", "")))
    if status >= 400:
        raise RefusedError(status, _detail(body))
    if not 200 <= status < 300:
        raise InvalidAnswerError(f"HTTP status {status}")
    return bytes(body)


def _detail(reply: bytes | bytearray) -> str:
    """The `detail` of a problem document (RFC 9457)."""
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        return str(json.loads(reply)["detail"])
    return "it does not say why"


def retry_after_s(text: str) -> float:
    """The seconds that a header Retry-After asks for; 0 for a date, which the service never gives."""
    seconds = float(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0.0
    return min(seconds, LONGEST_WAIT_S)


def service_url(url: str | None, cache: ScheduleCache | None = None) -> str | None:
    """The address of the service, this one or the environment's, without a slash at its end. None, with a cache or if
    neither is there: the search runs on this host. Raises `InputError` for a text that is no address, and for one
    beside a cache."""
    name = "url"
    if url is not None and cache is not None:
        raise InputError(f"url = {url[:100]!r}: with a cache None was expected, the service has its own")
    if url is None and cache is None:
        url, name = os.environ.get(URL_VARIABLE) or None, URL_VARIABLE
    if url is None:
        return None
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


def api_key(key: str | None) -> str | None:
    """This key, else the environment's. Raises `InputError`, which does not show it, if it cannot be a key."""
    where = "key"
    if key is None:
        key, where = os.environ.get(KEY_VARIABLE) or None, f"{KEY_VARIABLE} in the environment"
    if key is not None and not re.fullmatch(r"[\x21-\x7e]{1,200}", key):
        raise InputError(f"{where}: must be an API key of the service, op_..., without spaces or line ends")
    return key


def run_name() -> str:
    """What the cluster calls this training, such as `slurm-4711`; "" if nothing has started it that gives it a name."""
    names = ((who, os.environ.get(variable, "")) for variable, who in RUNS.items())
    return next((f"{who}-{name}" for who, name in names if name not in UNNAMED), "")[:200]
