"""What a busy machine may take, where a program gives up sooner."""

import threading
from collections.abc import Callable

import pytest

GRACE_S = 100.0  # for a solver to end after its time limit


def hold_timers(monkeypatch: pytest.MonkeyPatch, until: Callable[[], object]) -> None:
    """Timers begin to count once `until` returns, however long a busy machine takes to get there."""

    class Held(threading.Timer):
        def run(self) -> None:
            until()
            super().run()

    monkeypatch.setattr(threading, "Timer", Held)
