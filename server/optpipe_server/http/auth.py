"""Who may send which request: keys, their scopes, and this machine only if there are no keys."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
import time
from contextlib import suppress
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
from fastapi import Security
from fastapi.security import HTTPBearer, SecurityScopes
from sqlalchemy.exc import SQLAlchemyError
from starlette.authentication import AuthCredentials, AuthenticationBackend, AuthenticationError, SimpleUser
from starlette.requests import HTTPConnection
from starlette.responses import Response

from optpipe_server.database.keys import SCOPES, Caller, Keys, KnownKeys, is_key
from optpipe_server.http.replies import AWAY, SOON_S, ReplyError, problem_document

REMEMBERED_S = 2.0  # how long keys are remembered, and a revoked one still works
REREAD_S = 0.1  # between two queries of them, however many unknown ones come
OPEN_PATHS = ("/", "/healthz", "/readyz")  # these and the page's files need no key

_BEARER = re.compile(r"bearer +([!-~]{1,200})", re.IGNORECASE)


class _Key(HTTPBearer):
    """Describes the key that a route needs, and refuses one that lacks the scope."""

    async def __call__(self, request: HTTPConnection, needed: SecurityScopes) -> None:  # type: ignore[override]
        for scope in needed.scopes:
            if scope not in request.auth.scopes:
                why = f'error="insufficient_scope", scope="{scope}"'
                raise ReplyError(403, f"The key does not have the scope {scope}.", _challenge(why))


_KEY = _Key(scheme_name="key", description="op_<id>_<secret>; none where the service has no keys", auto_error=False)
READ, SUBMIT, ADMIN = (Security(_KEY, scopes=[scope]) for scope in ("read", "submit", "admin"))


class Callers(AuthenticationBackend):
    """Finds out who sends a request; one without a valid key is refused before its body is read.

    Keeps all keys, by their hashes, for seconds. Another one is looked for in the database, by one query for all who
    wait: made-up keys keep it no busier than `REREAD_S` says, and nobody who has a key waits for them.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._known, self._read_at = KnownKeys({}), -math.inf
        self._reading = asyncio.Lock()
        self._limiter = anyio.CapacityLimiter(1)  # a thread of its own

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser] | None:
        path = conn.scope["path"]
        if path in OPEN_PATHS or path.startswith("/page/"):
            return None
        try:
            caller = await self._caller(conn)
        except SQLAlchemyError:
            raise AuthenticationError(503, AWAY, {"Retry-After": str(SOON_S)}) from None
        return AuthCredentials(sorted(caller.scopes)), SimpleUser(caller.name or "")

    async def _caller(self, conn: HTTPConnection) -> Caller:
        """Raises AuthenticationError: 401 without a valid key, 403 without keys from elsewhere."""
        asked, sent = time.monotonic(), conn.headers.getlist("authorization")
        keys = await self._known_since(asked - REMEMBERED_S)
        if sent:
            bearer = _BEARER.fullmatch(sent[0]) if len(sent) == 1 else None
            caller = keys.check(bearer[1]) if bearer else None
            if caller is None and bearer and is_key(bearer[1]):
                caller = (await self._known_since(asked)).check(bearer[1])
            if caller is None:
                detail = "Authorization: no valid key; expected Bearer op_<id>_<secret>."
                raise AuthenticationError(401, detail, _challenge('error="invalid_token"'))
            return caller
        if keys.any:
            detail = "The service needs a key: Authorization: Bearer op_<id>_<secret>."
            raise AuthenticationError(401, detail, _challenge())
        if refusal := _not_local(conn):
            raise AuthenticationError(403, refusal, {})
        return Caller(None, frozenset(SCOPES))

    async def _known_since(self, when: float) -> KnownKeys:
        """The keys, read at that time or later."""
        if self._read_at < when:
            async with self._reading:
                if self._read_at < when:
                    await asyncio.sleep(self._read_at + REREAD_S - time.monotonic())
                    begun = time.monotonic()
                    self._known = await anyio.to_thread.run_sync(self._keys.read, limiter=self._limiter)
                    self._read_at = begun
        return self._known


def refused(_conn: HTTPConnection, error: Exception) -> Response:
    """Return the reply to a request whose caller has no valid key."""
    status, detail, headers = error.args
    return problem_document(status, detail, {**headers, "Connection": "close"})  # its body is not read


def _challenge(why: str = "") -> dict[str, str]:
    return {"WWW-Authenticate": 'Bearer realm="optpipe"' + (f", {why}" if why else "")}


def _not_local(conn: HTTPConnection) -> str | None:
    """Say why a request without a key, to a service without keys, does not come from this machine.

    A browser on this machine may run pages from anywhere, and a service without keys must not obey them. The name of a
    page's host can be made to mean 127.0.0.1 (DNS rebinding), so Host has to be this machine's. A page of another
    origin may send requests without being allowed to read replies, so Origin, which only browsers send, has to be the
    service's own. With keys neither matters, because no page knows one.
    """
    client, host, origin = conn.client, conn.headers.get("host", ""), conn.headers.get("origin")
    if client is None or not is_loopback(client.host):
        how = "`optpipe keys create NAME --scope submit --scope read` makes a key"
        return f"A service without keys answers this machine only; {how}."
    name = ""
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
    if not is_loopback(name):
        return "Host: a service without keys answers to localhost, 127.0.0.1 and [::1] only."
    if origin is not None and origin.lower() != f"{conn.scope['scheme']}://{host}".lower():
        return "Origin: a service without keys does not answer to other web pages."
    return None


def is_loopback(host: str) -> bool:
    """Return whether the name or address is this machine's loopback, which no other machine can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
