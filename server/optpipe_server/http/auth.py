"""Who may send which request: keys, their scopes, and this machine only if there are no keys.

A route that is not in the table `ROUTES` is not served.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
import time
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

import anyio.to_thread
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from optpipe_server.database.keys import SCOPES, Caller, Keys, KnownKeys, is_key
from optpipe_server.http.limits import BodyLimits
from optpipe_server.http.replies import ReplyError
from optpipe_server.settings import LOCAL

WITHOUT_KEY = ("/healthz", "/readyz", "/", "/page/{name:path}")
READ, SUBMIT, ADMIN = {"GET": "read"}, {"POST": "submit"}, {"GET": "admin"}
ROUTES: Mapping[str, Mapping[str, str]] = {  # path -> method -> scope; the first match counts
    "/metrics": ADMIN,
    "/openapi.json": READ,
    "/v1/queue": READ,
    "/v1/presets": READ,
    "/v1/estimate": {"POST": "read"},
    "/v1/problem-from/{form}": {"POST": "read"},
    "/v1/figure": {"POST": "read"},
    "/v1/workbench": {"POST": "read"},
    "/v1/jobs": READ | SUBMIT,
    "/v1/jobs/{job_id}": READ | {"PATCH": "submit", "DELETE": "submit"},
    "/v1/jobs/{job_id}/cancel": SUBMIT,
    "/v1/jobs/{job_id}/problem": SUBMIT,
    "/v1/jobs/{job_id}/adoptions": READ,
    "/v1/jobs/{job_id}/adoptions/{seq}": {"PUT": "submit"},
    "/v1/jobs/{job_id}/incumbents": READ,
    "/v1/jobs/{job_id}/bounds": READ,
    "/v1/jobs/{job_id}/incumbents/best": READ,
    "/v1/jobs/{job_id}/incumbents/{seq}": READ,
    "/v1/jobs/{job_id}/events": READ,
    "/v1/jobs/{job_id}/log": READ,
    "/v1/jobs/{job_id}/trace": READ,
    "/v1/jobs/{job_id}/timeline": READ,
    "/v1/jobs/{job_id}/figure": READ,
    "/v1/jobs/{job_id}/export": READ,
    "/v1/check": {"POST": "read"},
    "/v1/import": {"POST": "read"},
    "/v1/simulate": {"POST": "read"},
    "/v1/compare": {"POST": "read"},
    "/v1/cache/lookup": {"POST": "read"},
}

REMEMBERED_S = 2.0  # how long keys are remembered, and a revoked one still works
REREAD_S = 0.1  # between two queries of them, however many unknown ones come

_PATHS = [(compile_path(path)[0], methods) for path, methods in ROUTES.items()]
_OPEN = [compile_path(path)[0] for path in WITHOUT_KEY]
_BEARER = re.compile(r"bearer +([!-~]{1,200})", re.IGNORECASE)


def install(app: FastAPI, keys: Keys) -> None:
    """Put authentication and body limits before the app, with the app's own error handlers for their replies."""
    handlers = {kind: handler for kind, handler in app.exception_handlers.items() if kind not in (500, Exception)}
    app.add_middleware(BodyLimits)
    app.add_middleware(AuthMiddleware, keys=keys)
    app.add_middleware(ExceptionMiddleware, handlers=handlers)
    app.add_middleware(SafeHeaders)


class AuthMiddleware:
    """Puts the caller into `request.state.caller`, or raises `ReplyError`: 401, 403, 404, 405.

    A browser on this machine may run pages from anywhere, and a service without keys must not obey them. The name of a
    page's host can be made to mean 127.0.0.1 (DNS rebinding), so Host has to be this machine's. A page of another
    origin may send requests without being allowed to read replies, so Origin, which only browsers send, has to be the
    service's own. With keys neither matters, because no page knows one.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._callers = app, _Callers(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not (scope["method"] == "GET" and _is_open(scope["path"])):
            caller = await self._caller(scope)
            wanted = _wanted(scope["method"], scope["path"])
            if wanted not in caller.scopes:
                raise _unauthorized(
                    403, f"The key does not have the scope {wanted}.", f'error="insufficient_scope", scope="{wanted}"'
                )
            scope.setdefault("state", {})["caller"] = caller
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        await self._app(scope, receive, send)

    async def _caller(self, scope: Scope) -> Caller:
        headers = Headers(scope=scope)
        sent = headers.getlist("authorization")
        if sent:
            bearer = _BEARER.fullmatch(sent[0]) if len(sent) == 1 else None
            caller = await self._callers.of(bearer[1]) if bearer else None
            if caller is None:
                raise _unauthorized(
                    401, "Authorization: no valid key; expected Bearer op_<id>_<secret>.", 'error="invalid_token"'
                )
            return caller
        if await self._callers.expected():
            raise _unauthorized(401, "The service needs a key: Authorization: Bearer op_<id>_<secret>.")
        _from_this_machine(scope, headers)
        return Caller(LOCAL, frozenset(SCOPES))


class _Callers:
    """Keeps all keys, by their hashes, for seconds. One that is not among them is looked for in the database; all who
    wait for that wait for one query, so that made-up keys keep it no busier than `REREAD_S` says, and nobody who has a
    key waits for them."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._known, self._read_at = KnownKeys({}), -math.inf
        self._expected, self._look_again = False, 0.0
        self._reading = asyncio.Lock()
        self._limiter = anyio.CapacityLimiter(1)  # a thread of its own

    async def of(self, key: str) -> Caller | None:
        asked = time.monotonic()
        if asked >= self._read_at + REMEMBERED_S:
            await self._read(asked)
        caller = self._known.check(key)
        if caller is None and self._read_at < asked and is_key(key):
            await self._read(asked)
            caller = self._known.check(key)
        return caller

    async def expected(self) -> bool:
        """Return whether there are keys. Once there are, this process asks for one for ever."""
        if not self._expected and time.monotonic() >= self._look_again:
            until = time.monotonic() + REMEMBERED_S
            there_are = await anyio.to_thread.run_sync(self._keys.any, limiter=self._limiter)
            # Set after the query, so that requests in the meantime wait, too.
            self._expected, self._look_again = self._expected or there_are, until
        return self._expected

    async def _read(self, asked: float) -> None:
        """Read all keys, unless somebody has since `asked`."""
        async with self._reading:
            if self._read_at < asked:
                await asyncio.sleep(self._read_at + REREAD_S - time.monotonic())
                begun = time.monotonic()
                self._known = await anyio.to_thread.run_sync(self._keys.read, limiter=self._limiter)
                self._read_at = begun


def _wanted(method: str, path: str) -> str:
    """The scope that a request needs."""
    for pattern, methods in _PATHS:
        if pattern.fullmatch(path):
            if method not in methods:
                raise _other_method(methods)
            return methods[method]
    if _is_open(path):
        raise _other_method(("GET",))
    raise ReplyError(404, "There is no such route; GET /openapi.json describes all routes.")


def _is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return any(pattern.fullmatch(path) for pattern in _OPEN)


def _other_method(methods: Iterable[str]) -> ReplyError:
    right = ", ".join(methods)
    return ReplyError(405, f"The route does not have this method; expected {right}.", {"Allow": right})


def _unauthorized(status: int, detail: str, why: str = "") -> ReplyError:
    return ReplyError(status, detail, {"WWW-Authenticate": 'Bearer realm="optpipe"' + (f", {why}" if why else "")})


def _from_this_machine(scope: Scope, headers: Headers) -> None:
    """Raise `ReplyError` unless a request without a key, to a service without keys, comes from this machine."""
    client, host, origin = scope.get("client"), headers.get("host", ""), headers.get("origin")
    if client is None or not is_loopback(client[0]):
        raise ReplyError(403, "A service without keys answers this machine only; `optpipe keys create` makes a key.")
    if not is_loopback(_name(f"//{host}")):
        raise ReplyError(403, "Host: a service without keys answers to localhost, 127.0.0.1 and [::1] only.")
    if origin is not None and origin.lower() != f"{scope['scheme']}://{host}".lower():
        raise ReplyError(403, "Origin: a service without keys does not answer to other web pages.")


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Return whether the name or address is this machine's loopback, which no other machine can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class SafeHeaders:
    """Adds headers to every reply: it is not stored, and browsers do not guess its type."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Cache-Control", "no-store")
                headers.setdefault("X-Content-Type-Options", "nosniff")
            await send(message)

        await self._app(scope, receive, send_with_headers)
