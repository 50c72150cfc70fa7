"""The service's log on stderr: a line per event, JSON for machines or readable for people.

A line has `time` (UTC), `level`, `event`, `logger`, and what its place in the code adds: `job`, `attempt`, `worker`,
figures. Modules write `log = structlog.get_logger("optpipe.<part>")` and `log.info("claimed", job=...,
attempt=...)`. What other libraries log (uvicorn, SQLAlchemy, asyncio, warnings, failed threads) goes the same way. No
line contains a key, a password or a body.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import threading
from typing import Any

import structlog
from structlog.typing import EventDict, Processor

from optpipe.text import printable

LONGEST = 16_000  # characters of a value; a traceback fits
_FIRST = ("time", "level", "event", "job", "attempt", "worker")

_SECRETS = (
    (re.compile(r"\bop_(\w{1,32}?)_[\w-]+"), r"op_\1_***"),  # an API key; its id is no secret
    (re.compile(r"(?i)\b(bearer|basic)\s+\S+"), r"\1 ***"),
    (re.compile(r"(://[^\s:/@]*):[^\s/]*@"), r"\1:***@"),  # the password of a URL
    # Input that libraries repeat: SQLAlchemy its parameters, PostgreSQL the row, pydantic the value.
    (re.compile(r"\[parameters: .*\]"), "[parameters: ***]"),
    (re.compile(r"(?m)^DETAIL: .*$"), "DETAIL: ***"),
    (re.compile(r"\binput_value=.*(?=, input_type=)"), "input_value=***"),
)


def _clean(_logger: object, _method: str, event: EventDict) -> EventDict:
    return {name: _plain(event[name]) for name in (*_FIRST, *sorted(event.keys() - set(_FIRST))) if name in event}


def _plain(value: Any) -> Any:
    """A value that JSON can hold, without secrets and of limited length."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = str(value)[:LONGEST]  # first, because the patterns are slow on long texts
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def _for_people(_logger: object, _method: str, event: EventDict) -> EventDict:
    """What a terminal would obey is made visible, which JSON does by itself; only a traceback has lines."""
    return {
        name: "\n".join(map(printable, value.split("\n") if name == "exception" else [value]))
        if isinstance(value, str)
        else value
        for name, value in event.items()
    }


# Applied to every line, also of libraries.
_SHARED: tuple[Processor, ...] = (
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    structlog.stdlib.ExtraAdder(),
)

# Log through the standard library also before `configure`: then only warnings are shown, and stdout stays the user's.
structlog.configure(
    processors=[
        structlog.stdlib.filter_by_level,
        *_SHARED[:-1],
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
    ],
    wrapper_class=structlog.stdlib.BoundLogger,
    logger_factory=structlog.stdlib.LoggerFactory(),
)


def configure(json: bool | None = None) -> None:
    """Write log lines to stderr from now on: the service's own from level `info`, those of libraries from `warning`.
    They are JSON if asked for, by default unless stderr is a terminal."""
    as_json = not sys.stderr.isatty() if json is None else json
    readable = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), sort_keys=False, timestamp_key="time")
    processors: list[Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.format_exc_info,
        _clean,
    ]
    processors += [structlog.processors.JSONRenderer()] if as_json else [_for_people, readable]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=_SHARED, processors=processors))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for ours in ("optpipe", "optpipe_server"):
        logging.getLogger(ours).setLevel(logging.INFO)
    logging.captureWarnings(True)
    threading.excepthook = _log_thread_failure


def _log_thread_failure(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_value is not None:
        log.error("a thread failed", thread=failure.thread.name if failure.thread else "?", exc_info=failure.exc_value)


log = structlog.get_logger("optpipe.logs")
