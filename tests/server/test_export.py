"""`GET /v1/jobs/{id}/export`: the rows that `export_schedule` writes."""

from __future__ import annotations

import httpx
from support.chain import chain, gpipe
from support.rest import submit, until_over

from optpipe import export_schedule


def test_rows_for_pytorch(client: httpx.Client) -> None:
    address = f"{until_over(client, submit(client))['url']}/export"
    reply = client.get(address, params={"to": "torch-comms", "seq": 2})
    assert reply.headers["content-type"].startswith("text/csv"), reply.text
    assert reply.text == export_schedule(gpipe(chain()), "torch-comms")
    assert client.get(address, params={"to": "torch-csv"}).text == export_schedule(gpipe(chain()), "torch-csv")
    assert client.get(address, params={"to": "torch-csv", "seq": 3}).status_code == 404
    refused = client.get(address, params={"to": "torch"})
    assert (refused.status_code, "torch-csv" in refused.json()["detail"]) == (422, True)


def test_other_stacks(client: httpx.Client) -> None:
    address = f"{until_over(client, submit(client))['url']}/export"
    reply = client.get(address, params={"to": "primus", "seq": 2})
    assert reply.headers["content-type"] == "application/json", reply.text
    assert reply.text == export_schedule(gpipe(chain()), "primus")
    refused = client.get(address, params={"to": "megatron", "seq": 2})
    assert (refused.status_code, "where Megatron's 1F1B has" in refused.json()["detail"]) == (422, True)
