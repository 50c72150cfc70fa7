"""A database that is away: who works waits for it, and goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import structlog
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, TimeoutError

AWAY = (
    OperationalError,
    InterfaceError,
    InternalError,
    TimeoutError,
)  # not there, starting, full, read-only, or busy for too long
AGAIN_S = 0.5

log = structlog.get_logger("optpipe.work")
T = TypeVar("T")


def patiently(call: Callable[[], T], giving_up: threading.Event) -> T:
    """What the call returns, as soon as the database answers. Raises its error where `giving_up` is set before.

    A call that ended in an error may have been committed all the same: `call` must bear being repeated.
    """
    told = False
    while True:
        try:
            result = call()
        except AWAY as error:
            if giving_up.is_set():
                raise
            if not told:
                log.warning("the database is away", error=said(error))
                told = True
            giving_up.wait(AGAIN_S)
        else:
            if told:
                log.info("the database is back")
            return result


def said(error: Exception) -> str:
    """The first line of what the database said."""
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
