"""The demo's training beside a search that takes its time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from optpipe_runtime.demo.train import DemoResult, DemoSettings, Training, train

DATA_S = 0.2


def for_data(plan: DemoSettings, url: str) -> DemoResult:
    """`train`, whose data come slowly: it leaves the cores to the search, for whose end it trains."""
    data = Training.data

    def slow(self: Training, step: int) -> Any:
        time.sleep(DATA_S)
        return data(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "data", slow)
        return train(plan, url)
