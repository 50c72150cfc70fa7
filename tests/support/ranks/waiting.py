"""The demo's training beside a search that takes its time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from optpipe_runtime.demo.train import DemoResult, DemoSettings, Training, train

LIVE_S = 0.5  # before each step beside the search


def for_data(plan: DemoSettings, url: str) -> DemoResult:
    """`train` for the end of the search."""
    with slow_data():
        return train(plan, url)


@contextlib.contextmanager
def slow_data() -> Iterator[None]:
    """As if the demo's data came slowly while the search runs: training leaves the cores to it."""
    step = Training.step

    def slow(self: Training, live: bool) -> None:
        if live:
            time.sleep(LIVE_S)
        step(self, live)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "step", slow)
        yield
