"""A service that accepts jobs but solves none, and and any number of them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.service import client_at, fake_service
from support.service.postgres import database_of
from support.service.requests import PROBLEM, SCHEDULE

from optpipe_server.database.keys import SCOPES


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def taking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of it, on each database."""
    folder, asks_nobody = tmp_path_factory.mktemp("service"), {"solves": 0, "open_jobs": 10**6, "first_schedule_s": 1.0}
    with (
        database_of(request) as database,
        fake_service(folder, database, **asks_nobody) as (url, server),
        client_at(url, server.service.keys.create("taking", SCOPES)) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def over(taking: httpx.Client) -> str:
    """The id of a job that is over and has an incumbent."""
    reply = taking.post("/v1/jobs", json={"problem": PROBLEM, "method": "hang", "warm_start": SCHEDULE})
    assert reply.json()["best"]["seq"] == 1
    job_id: str = reply.json()["id"]
    assert taking.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelled"
    return job_id
