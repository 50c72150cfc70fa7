"""kill -9 of the API while clients submit: what was acknowledged is there, once, and no worse."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.ports import free_port
from support.problems.chain import chain
from support.service import client_at
from support.service.serve_process import serve_process

from optpipe.schedule import ScheduleFile, check

CLIENTS = 2
STARTS_S = 60.0


class Client(threading.Thread):
    """Submits one job after the other, each until it is acknowledged, repeated with the same key if need be."""

    def __init__(self, number: int, url: str, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._number, self._url, self._stop_asked = number, url, stop
        self.acknowledged: dict[str, dict[str, Any]] = {}  # key -> the job as it was told
        self.wrong: list[str] = []

    def run(self) -> None:
        n = 0
        with client_at(self._url) as http:
            while not self._stop_asked.is_set():
                self._submit(http, f"{self._number}-{n}", 1.0 + n + self._number / CLIENTS)
                n += 1

    def _submit(self, http: httpx.Client, key: str, forward: float) -> None:
        body = {"problem": chain(forward=forward).to_dict(), "method": "plain"}
        while True:
            try:
                reply = http.post("/v1/jobs", json=body, headers={"Idempotency-Key": key})
            except httpx.TransportError:
                time.sleep(0.1)
                continue
            if reply.status_code in (200, 201):
                self.acknowledged[key] = reply.json()
            else:
                self.wrong.append(f"{reply.status_code} {reply.text}")
            return


@pytest.mark.parametrize("kills", [1, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_no_acknowledged_job_is_lost(kills: int, database_url: str, tmp_path: Path) -> None:
    chance = random.Random(kills)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    stop = threading.Event()
    clients = [Client(n, url, stop) for n in range(CLIENTS)]
    try:
        for n in range(kills):
            with serve_process(tmp_path, database_url, port) as (started, _):
                for client in clients if n == 0 else []:
                    client.start()
                known = [len(client.acknowledged) for client in clients]
                while known == [len(client.acknowledged) for client in clients]:
                    time.sleep(0.01)
                time.sleep(chance.uniform(0.0, 0.3))
                started.kill()
                started.wait(60)
    finally:
        stop.set()
    with serve_process(tmp_path, database_url, port) as (_, http):
        for client in clients:  # each ends when its last job is acknowledged
            client.join(STARTS_S)
            assert not client.is_alive()
        acknowledged = {key: job for client in clients for key, job in client.acknowledged.items()}
        assert [wrong for client in clients for wrong in client.wrong] == []
        ids, address = set(), "/v1/jobs?limit=200"
        while address:
            page = http.get(address).json()
            ids |= {job["id"] for job in page["jobs"]}
            address = page["next"]
        assert {job["id"] for job in acknowledged.values()} == ids, (
            "what was not acknowledged was said again, and is one job"
        )
        assert len(ids) == len(acknowledged), "a job of its own for every key"
        for told in acknowledged.values():
            now = http.get(told["url"]).json()
            assert now["best"]["makespan_ms"] <= told["best"]["makespan_ms"]
            assert now["state"] in ("queued", "running", "done")
            schedule = ScheduleFile.model_validate(now["best"]["schedule"]).schedule()
            assert check(schedule.problem, schedule) == []
