"""What the service says on stderr: a line an event, JSON for machines and readable for people.

A line has `time` (UTC), `level`, `event`, `logger`, and what the place that wrote it adds: `job`, `attempt`, `worker`,
`tenant`, figures. Modules write `log = structlog.get_logger("optpipe.<part>")` and `log.info("claimed", job=...,
attempt=...)`. The lines of other libraries (uvicorn, SQLAlchemy, asyncio, warnings, threads that die) go the same way.
No line holds a key, a password or a body.
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

LONGEST = 16_000  # characters of a value; a traceback fits
_FIRST = ("time", "level", "event", "job", "attempt", "worker")

_SECRETS = (
    (re.compile(r"\bop_(\w{1,32}?)_[\w-]+"), r"op_\1_***"),  # an API key: its id may be seen
    (re.compile(r"(?i)\b(bearer|basic)\s+\S+"), r"\1 ***"),
    (re.compile(r"(://[^\s:/@]*):[^\s/]*@"), r"\1:***@"),  # the password of a URL
    # What libraries repeat of their input: SQLAlchemy its parameters, PostgreSQL the row, pydantic the value.
    (re.compile(r"\[parameters: .*\]"), "[parameters: ***]"),
    (re.compile(r"(?m)^DETAIL: .*$"), "DETAIL: ***"),
    (re.compile(r"\binput_value=.*(?=, input_type=)"), "input_value=***"),
)


def _clean(_logger: object, _method: str, event: EventDict) -> EventDict:
    return {name: _plain(event[name]) for name in (*_FIRST, *sorted(event.keys() - set(_FIRST))) if name in event}


def _plain(value: Any) -> Any:
    """A value that JSON can hold, without secrets and not long."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = str(value)[:LONGEST]  # first: the patterns would take long over a long text
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


# What every line gets, whoever wrote it.
_SHARED: tuple[Processor, ...] = (
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    structlog.stdlib.ExtraAdder(),
)

# Through the standard library's loggers, also before `configure`: then only warnings are seen, and stdout stays the
# user's.
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
    """Lines on stderr from now on, of the service's own doings from `info`, of libraries from `warning`; JSON where no
    person looks on."""
    as_json = not sys.stderr.isatty() if json is None else json
    readable = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), sort_keys=False, timestamp_key="time")
    rendered: Processor = structlog.processors.JSONRenderer() if as_json else readable
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_SHARED,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            _clean,
            rendered,
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for ours in ("optpipe", "optpipe_server"):
        logging.getLogger(ours).setLevel(logging.INFO)
    logging.captureWarnings(True)
    threading.excepthook = _thread_died


def _thread_died(died: threading.ExceptHookArgs) -> None:
    if died.exc_value is not None:
        thread = died.thread.name if died.thread else "?"
        log.error("a thread died", thread=thread, exc_info=(died.exc_type, died.exc_value, died.exc_traceback))


log = structlog.get_logger("optpipe.logs")
