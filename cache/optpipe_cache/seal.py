"""Seals on bounds: which bounds in a cache file were proven by this user's own searches.

A bound ends a search: what reaches it is told as proven. Whoever shares, sends or edits a cache file can write any
bound into it, so a cache seals those it is given with a key that only this user has (HMAC-SHA256), and believes no
other one. Schedules need no seal, because they are verified.
"""

from __future__ import annotations

import hmac
import os
import secrets
from contextlib import suppress
from functools import cache
from pathlib import Path

KEY_BYTES = 32
_OF_PROCESS = secrets.token_bytes(KEY_BYTES)  # where no file can have a key, bounds are believed until the process ends


def user_folder() -> Path:
    """Return the folder of OptPipe in the user's cache folder. Raises `RuntimeError` if the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optpipe"


def seal(*fields: object) -> str:
    """Return the seal of these fields, such as a problem's hash and its bound."""
    try:
        key = _key_in(user_folder())
    except (OSError, RuntimeError):
        key = _OF_PROCESS
    return hmac.digest(key, repr(fields).encode(), "sha256").hex()


@cache
def _key_in(folder: Path) -> bytes:
    """The user's key, made when it is first asked for. Raises `OSError` where no file can have it."""
    path = folder / "seal.key"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            with suppress(FileExistsError):  # another process was first
                os.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    key = path.read_bytes()
    return key if len(key) == KEY_BYTES else _OF_PROCESS
