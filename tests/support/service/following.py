"""What tests of the client have in common: options, waits for events, and what its log says."""

import logging

import pytest

from optpipe_runtime import ScheduleClient
from optpipe_runtime.service import job, requests


def set_waits(
    patch: pytest.MonkeyPatch,
    first_s: float = 0.02,
    longest_s: float = 0.1,
    connect_s: float = 60.0,
    read_s: float = 60.0,
) -> None:
    """The service answers in its own time, and is asked again at once if it fails."""
    for module, name, seconds in (
        (job, "FIRST_S", first_s),
        (job, "LONGEST_S", longest_s),
        (requests, "CONNECT_S", connect_s),
        (requests, "READ_S", read_s),
    ):
        patch.setattr(module, name, seconds)


def until_ended(client: ScheduleClient) -> None:
    client._thread.join(120)
    assert not client._thread.is_alive()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return _logged(caplog, range(logging.WARNING, logging.CRITICAL + 1))


def news(caplog: pytest.LogCaptureFixture) -> list[str]:
    return _logged(caplog, range(logging.INFO, logging.INFO + 1))


def _logged(caplog: pytest.LogCaptureFixture, levels: range) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "optpipe.client" and each.levelno in levels]
