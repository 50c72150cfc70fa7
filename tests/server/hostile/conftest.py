"""A service that accepts jobs but solves none, and whose queue is never full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest
from support.service import running, settings_in, use_fake_solver
from support.service.requests import PROBLEM, SCHEDULE

from optpipe_server.database.keys import SCOPES
from optpipe_server.http import own_processes


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def taking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A tenant of it, on each database."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        use_fake_solver(patch)
        patch.setattr(own_processes, "MODULE", "support.fakes.own_process")
        url = (
            None
            if request.param == "sqlite"
            else stack.enter_context(request.getfixturevalue("postgres").database("migrated"))
        )
        settings = replace(
            settings_in(tmp_path_factory.mktemp("service"), url), solves=0, queue=10**6, first_schedule_s=1.0
        )
        address, server = stack.enter_context(running(settings))
        key = {"Authorization": f"Bearer {server.service.keys.create('taking', SCOPES)}"}
        yield stack.enter_context(httpx.Client(base_url=address, timeout=240, trust_env=False, headers=key))


@pytest.fixture(scope="module")
def over(taking: httpx.Client) -> str:
    """The id of a job that is over and has an incumbent."""
    reply = taking.post("/v1/jobs", json={"problem": PROBLEM, "method": "hang", "warm_start": SCHEDULE})
    assert reply.json()["best"]["seq"] == 1
    job_id: str = reply.json()["id"]
    assert taking.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelled"
    return job_id
