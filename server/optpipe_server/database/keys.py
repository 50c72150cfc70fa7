"""API keys `op_<id>_<secret>`: shown once, stored as a hash."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy import Row, insert, select, update

from optpipe.errors import InputError
from optpipe_server.database.engine import Database, now
from optpipe_server.database.tables import keys

Scope = Literal["submit", "read", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

# 192 random bits, so a plain hash is enough: nobody can guess them.
_KEY = re.compile(r"op_([0-9a-f]{16})_([0-9a-f]{48})")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NOBODY = hashlib.sha256(secrets.token_bytes()).hexdigest()  # compared with the secret of an unknown id


@dataclass(frozen=True)
class Caller:
    """Who sends a request, and what they may do."""

    name: str | None  # of the key; None where the service has no keys
    scopes: frozenset[str]


@dataclass(frozen=True)
class KnownKeys:
    """Keys as they were read: by id, the hash of the secret, and whose it is; whether there ever was `any`."""

    callers: Mapping[str, tuple[str, Caller]]
    any: bool = False

    def check(self, text: str) -> Caller | None:
        """Return whose key this is; None if it is unknown or wrong, after the same work in each case."""
        parts = _KEY.fullmatch(text)
        if parts is None:
            return None
        key_id, secret = parts.groups()
        secret_sha256, caller = self.callers.get(key_id, (_NOBODY, None))
        return caller if hmac.compare_digest(_sha256(secret), secret_sha256) else None


class Keys:
    """The keys of the service."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str, scopes: Collection[str]) -> str:
        """Create a key, whose name its jobs show, and return it; it cannot be shown again.

        Raises `InputError` for a wrong name or scope."""
        if not _NAME.fullmatch(name):
            raise InputError(f"name = {name!r}: expected 1 to 64 letters, digits, '.', '_' or '-'")
        if wrong := sorted({*scopes} - {*SCOPES}):
            raise InputError(f"scope = {wrong[0]!r}: expected {', '.join(SCOPES)}")
        if not scopes:
            raise InputError(f"scope: a key needs at least one; expected {', '.join(SCOPES)}")
        key_id, secret = secrets.token_hex(8), secrets.token_hex(24)
        texts = {"secret_sha256": _sha256(secret), "scopes": " ".join(scope for scope in SCOPES if scope in scopes)}
        with self._database.write() as db:
            db.execute(insert(keys).values(id=key_id, name=name, created_at=now(), **texts))
        return f"op_{key_id}_{secret}"

    def read(self) -> KnownKeys:
        """Return the keys, to check texts against. Revoked ones count as `any`: a service does not open when its last
        key is revoked."""
        rows = self._database.rows(select(keys))
        callers = {
            row.id: (row.secret_sha256, Caller(row.name, frozenset(row.scopes.split())))
            for row in rows
            if row.revoked_at is None
        }
        return KnownKeys(callers, any=bool(rows))

    def list(self) -> Sequence[Row[Any]]:
        """Return all keys without their secrets, oldest first: id, name, scopes (separated by spaces), created_at,
        revoked_at."""
        shown = [column for column in keys.c if column.name != "secret_sha256"]
        return self._database.rows(select(*shown).order_by(keys.c.created_at, keys.c.id))

    def revoke(self, key_id: str) -> None:
        """Revoke a key; again, it changes nothing. Raises `InputError` if there is no such key."""
        if _KEY.fullmatch(key_id):  # not shown, because it is a secret
            raise InputError("id: this is a whole key; expected its id, the middle of op_<id>_<secret>")
        with self._database.write() as db:
            key = db.execute(select(keys).where(keys.c.id == key_id).with_for_update()).one_or_none()
            if key is None:
                raise InputError(f"id = {key_id!r}: no key has this id; `optpipe keys list` shows them")
            if key.revoked_at is None:
                db.execute(update(keys).where(keys.c.id == key_id).values(revoked_at=now()))


def is_key(text: str) -> bool:
    """Return whether a text has the form of a key."""
    return _KEY.fullmatch(text) is not None


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
