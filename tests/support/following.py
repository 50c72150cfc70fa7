"""What tests of the client have in common: short waits, and what its log says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

QUICK: dict[str, Any] = {"backoff_s": (0.02, 0.1), "read_timeout_s": 2.0}

T = TypeVar("T")


def until(look: Callable[[], T | None], within_s: float = 20.0) -> T:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.01)
    raise AssertionError("it did not happen in time")


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
