"""Waits for what a test expects."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T | None], what: str = "", within_s: float = 120.0) -> T:
    """Wait until the condition is true; return its value."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"it did not happen: {what or condition}"
        time.sleep(0.01)
    return value
