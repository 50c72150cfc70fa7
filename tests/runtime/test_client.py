"""The client with a real service: schedules arrive, costs change, and the service may end and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.ports import free_port
from support.problems.chain import chain, one_by_one
from support.service import running, settings_in, use_fake_solver
from support.service.following import news, warnings
from support.until import until

from optpipe_runtime.service import client as client_module
from optpipe_runtime.service.client import ScheduleClient
from optpipe_server import Settings
from optpipe_server.database.tables import OPEN

SLOWER = chain(scale=1.5)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    use_fake_solver(monkeypatch)
    return settings_in(tmp_path)


def seen(url: str, key: str | None = None) -> Any:
    return httpx.get(url, trust_env=False, headers={"Authorization": f"Bearer {key}"} if key else None).json()


def jobs_at(url: str) -> list[dict[str, Any]]:
    """The newest first."""
    found: list[dict[str, Any]] = seen(f"{url}/v1/jobs")["jobs"]
    return found


# The service comes and goes


def test_a_service_that_comes_goes_and_comes_back(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with the job, and gets reports of what the training adopted in between."""
    port, waits = free_port(), []
    wait_s = client_module.wait_s
    monkeypatch.setattr(client_module, "wait_s", lambda state: waits.append(wait_s(state)) or waits[-1])
    with ScheduleClient(f"http://127.0.0.1:{port}/", chain(), method="hang") as client:
        until(lambda: len(waits) >= 5)
        with running(settings, port):
            assert len(warnings(caplog)) == 1, "one warning an outage, however many attempts"
            first = until(client.poll)
            until(lambda: news(caplog))
            assert [line.rpartition(" is ")[2] for line in news(caplog)] == ["available again"]
        until(lambda: len(warnings(caplog)) == 2)
        client.adopted(first, 7)
        client.adopted(first, 7, 9.5)
        with running(settings, port) as (url, _):
            until(lambda: not client._adoptions)
            [job] = jobs_at(url)
            assert (job["id"], job["state"] in OPEN) == (first.job, True)
            [incumbent] = seen(f"{url}{job['url']}/incumbents")["incumbents"]
            assert client.poll() is None, "nothing is offered twice"
    adoption = incumbent["adoption"]
    assert (incumbent["makespan_ms"], adoption["step"], adoption["measured_iteration_ms"]) == (
        first.makespan_ms,
        7,
        9.5,
    )


# The costs change


def test_a_search_goes_on_with_new_costs(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """It is the same job, from its best; what runs is the best that is known for the new costs, too, so nothing is
    offered."""
    with running(settings) as (url, _), ScheduleClient(url, chain(), method="hang") as client:
        first = until(client.poll)
        assert not client.ended
        client.update(SLOWER, first.schedule)
        best = until(lambda: (job := seen(f"{url}/v1/jobs/{first.job}"))["problem_version"] == 2 and job["best"])
        until(lambda: client._seen == best["seq"])
        assert client.poll() is None
        assert len(jobs_at(url)) == 1
    assert best["source"] == "carried"
    assert best["makespan_ms"] == one_by_one(SLOWER).makespan_ms
    assert warnings(caplog) == []
