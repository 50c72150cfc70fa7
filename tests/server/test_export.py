"""`GET /v1/jobs/{id}/export`: the rows that `export_schedule` writes."""

from __future__ import annotations

import json

import httpx
from support.problems.chain import chain, gpipe
from support.service.rest import submit, until_over

from optpipe import Schedule, ScheduleFile, export_schedule


def test_rows_for_pytorch(client: httpx.Client) -> None:
    address = f"{until_over(client, submit(client))['url']}/export"
    reply = client.get(address, params={"to": "torch-comms", "seq": 2})
    assert reply.headers["content-type"].startswith("text/csv"), reply.text
    assert reply.text == export_schedule(gpipe(chain()), "torch-comms")
    assert client.get(address, params={"to": "torch-csv"}).text == export_schedule(gpipe(chain()), "torch-csv")
    assert client.get(address, params={"to": "torch-csv", "seq": 3}).status_code == 404
    refused = client.get(address, params={"to": "torch"})
    assert (refused.status_code, "torch-csv" in refused.json()["detail"]) == (422, True)


def test_what_does_not_fit_is_refused_or_asked_for(client: httpx.Client) -> None:
    """Without its offloads the schedule needs memory for two micro-batches, and there is memory for one."""
    problem = chain(memory=1)
    programs = [[f"{s}{op}" for op in ("F0", "O0", "D0", "F1", "BW1", "R0", "BW0")] for s in range(2)]
    offloads = Schedule.parse(problem, programs)
    given = json.loads(ScheduleFile.from_schedule(offloads).to_json())
    job = submit(client, problem, method="silent", warm_start=given)
    asked = {"to": "torch-csv", "without_offload": True}
    refused = client.get(f"{job['url']}/export", params=asked)
    assert (refused.status_code, refused.headers["content-type"]) == (409, "application/problem+json")
    assert refused.json()["detail"].startswith(
        "It does not fit without offloads: device 0 needs 2 kB during 0F1 and has 1"
    )
    reply = client.get(f"{job['url']}/export", params=asked | {"despite_memory": True})
    assert reply.text == export_schedule(offloads, "torch-csv", without_offload=True)
