"""One way to time a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(call: Callable[[], T], clock: Callable[[], float] = time.perf_counter) -> tuple[T, float]:
    """What a call returns, and how long it takes in ms.

    `clock` tells seconds: `time.process_time` and `time.thread_time` leave out what other processes compute.
    """
    began = clock()
    value = call()
    return value, (clock() - began) * 1e3


def repeated(call: Callable[[], T], repeats: int, warm_up: int = 3) -> list[T]:
    """What a call returns each time, after some calls that do not count."""
    return [call() for _ in range(warm_up + repeats)][warm_up:]
