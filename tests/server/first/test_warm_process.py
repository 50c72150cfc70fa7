"""A process of the solver that answers many requests, while it loads and when it hangs."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest
from support.problems.chain import chain

from optpipe.process.protocol import End, Frame, Incumbent, Request
from optpipe_server import warm_process
from optpipe_server.warm_process import WarmProcess

FAKE, SOON_S = "support.fakes.first_process", 60.0  # on a busy machine


def test_a_process_that_still_loads_goes_on_unless_it_never_gets_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PYTHONPATH": Path(__file__).parents[2], "FIRST_GATE": tmp_path / "gate"}.items():
        monkeypatch.setenv(name, str(value))
    told: list[Frame] = []
    request = Request(problem=chain(), method="good")
    with closing(WarmProcess(FAKE)) as process:
        child = process.ensure_running()
        assert not process.ask(request, time.monotonic() + 0.1, told.append)
        (tmp_path / "gate").touch()
        assert process.ask(request, time.monotonic() + SOON_S, told.append)
        assert process.ensure_running() is child
        assert [type(frame) for frame in told] == [Incumbent, End]
    (tmp_path / "gate").unlink()
    monkeypatch.setattr(warm_process, "LOADING_S", 0.0)
    with closing(WarmProcess(FAKE)) as process:
        child = process.ensure_running()
        assert not process.ask(request, time.monotonic() + 0.1, told.append)
        assert process.ensure_running() is not child
