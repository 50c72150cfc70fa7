"""Who may send which request: keys, their scopes, and this machine only if there are no keys."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
import time
from urllib.parse import urlsplit

import anyio.to_thread
from fastapi import Request, Security
from fastapi.security import HTTPBearer
from starlette.requests import HTTPConnection

from optpipe_server.database.keys import SCOPES, Caller, Keys, KnownKeys, is_key
from optpipe_server.http.replies import ReplyError

REMEMBERED_S = 2.0  # how long keys are remembered, and a revoked one still works
REREAD_S = 0.1  # between two queries of them, however many unknown ones come

_BEARER = re.compile(r"bearer +([!-~]{1,200})", re.IGNORECASE)


class _Key(HTTPBearer):
    """Describes the key that a route needs. `GuardedRoute` has asked for it by the time that FastAPI calls this."""

    async def __call__(self, request: HTTPConnection) -> None:
        pass


_KEY = _Key(scheme_name="key", description="op_<id>_<secret>; none where the service has no keys", auto_error=False)
READ, SUBMIT, ADMIN = (Security(_KEY, scopes=[scope]) for scope in ("read", "submit", "admin"))


class Callers:
    """Tells who sends a request.

    Keeps all keys, by their hashes, for seconds. One that is not among them is looked for in the database; all who
    wait for that wait for one query, so that made-up keys keep it no busier than `REREAD_S` says, and nobody who has a
    key waits for them.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._known, self._read_at = KnownKeys({}), -math.inf
        self._reading = asyncio.Lock()
        self._limiter = anyio.CapacityLimiter(1)  # a thread of its own

    async def authorized(self, request: Request, scope: str) -> Caller:
        """Return the caller. Raises `ReplyError`: 401 without a valid key, 403 if it lacks the scope, or without keys
        from elsewhere."""
        caller = await self._caller(request)
        if scope not in caller.scopes:
            raise _unauthorized(
                403, f"The key does not have the scope {scope}.", f'error="insufficient_scope", scope="{scope}"'
            )
        return caller

    async def _caller(self, request: Request) -> Caller:
        sent = request.headers.getlist("authorization")
        if sent:
            bearer = _BEARER.fullmatch(sent[0]) if len(sent) == 1 else None
            caller = await self._owner(bearer[1]) if bearer else None
            if caller is None:
                raise _unauthorized(
                    401, "Authorization: no valid key; expected Bearer op_<id>_<secret>.", 'error="invalid_token"'
                )
            return caller
        if (await self._known_since(time.monotonic() - REMEMBERED_S)).any:
            raise _unauthorized(401, "The service needs a key: Authorization: Bearer op_<id>_<secret>.")
        _check_local(request)
        return Caller(None, frozenset(SCOPES))

    async def _owner(self, key: str) -> Caller | None:
        asked = time.monotonic()
        caller = (await self._known_since(asked - REMEMBERED_S)).check(key)
        if caller is None and is_key(key):
            caller = (await self._known_since(asked)).check(key)
        return caller

    async def _known_since(self, when: float) -> KnownKeys:
        """The keys as they were read at that time or later."""
        if self._read_at < when:
            async with self._reading:
                if self._read_at < when:
                    await asyncio.sleep(self._read_at + REREAD_S - time.monotonic())
                    begun = time.monotonic()
                    self._known = await anyio.to_thread.run_sync(self._keys.read, limiter=self._limiter)
                    self._read_at = begun
        return self._known


def _unauthorized(status: int, detail: str, why: str = "") -> ReplyError:
    return ReplyError(status, detail, {"WWW-Authenticate": 'Bearer realm="optpipe"' + (f", {why}" if why else "")})


def _check_local(request: Request) -> None:
    """Raise `ReplyError` unless a request without a key, to a service without keys, comes from this machine.

    A browser on this machine may run pages from anywhere, and a service without keys must not obey them. The name of a
    page's host can be made to mean 127.0.0.1 (DNS rebinding), so Host has to be this machine's. A page of another
    origin may send requests without being allowed to read replies, so Origin, which only browsers send, has to be the
    service's own. With keys neither matters, because no page knows one.
    """
    client, host, origin = request.client, request.headers.get("host", ""), request.headers.get("origin")
    if client is None or not is_loopback(client.host):
        how = "`optpipe keys create NAME --scope submit --scope read` makes a key"
        raise ReplyError(403, f"A service without keys answers this machine only; {how}.")
    if not is_loopback(_host_name(f"//{host}")):
        raise ReplyError(403, "Host: a service without keys answers to localhost, 127.0.0.1 and [::1] only.")
    if origin is not None and origin.lower() != f"{request.scope['scheme']}://{host}".lower():
        raise ReplyError(403, "Origin: a service without keys does not answer to other web pages.")


def _host_name(url: str) -> str:
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
