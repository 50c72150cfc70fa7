"""What tests of the client have in common: options, waits for events, and what its log says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from optpipe_runtime.service.background import Background

# The service answers in its own time, and is asked again at once if it fails.
PATIENT: dict[str, Any] = {"connect_timeout_s": 60.0, "read_timeout_s": 60.0}
QUICK: dict[str, Any] = {"backoff_s": (0.02, 0.1), **PATIENT}

T = TypeVar("T")


def until(look: Callable[[], T | None], within_s: float = 120.0) -> T:
    """What `look` returns once that is true."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.01)
    raise AssertionError("it did not happen in time")


def until_ended(client: Background) -> None:
    """Waits for the client's thread, after `close`."""
    client._thread.join(120)
    assert not client._thread.is_alive()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "optpipe.client" and record.levelno >= logging.WARNING
    ]


def news(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "optpipe.client" and record.levelno == logging.INFO
    ]
