"""Waiting for a database that is away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import structlog
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, TimeoutError

# The database is stopped, starting, full, read-only, or busy for too long.
DATABASE_AWAY = (OperationalError, InterfaceError, InternalError, TimeoutError)
RETRY_S = 0.5

log = structlog.get_logger("optpipe.work")
T = TypeVar("T")


def retry_while_away(call: Callable[[], T], give_up: threading.Event) -> T:
    """Call until the database answers, and return the result. Raises the call's error once `give_up` is set.

    A call that failed may have been committed all the same, so `call` must be safe to repeat.
    """
    logged = False
    while True:
        try:
            result = call()
        except DATABASE_AWAY as error:
            if give_up.is_set():
                raise
            if not logged:
                log.warning("the database is away", error=first_line(error))
                logged = True
            give_up.wait(RETRY_S)
        else:
            if logged:
                log.info("the database is back")
            return result


def first_line(error: Exception) -> str:
    """Return the first line of the database's message."""
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
