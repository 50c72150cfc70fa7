"""The largest bodies that are read, several at once: the process stays within its memory, and others are answered."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.problems.chain import chain
from support.service.serve_process import serve_process

from optpipe_server.accepted import MOST_MICROBATCHES, MOST_PARTS
from optpipe_server.http.app import LONGEST_BODY

MOST_MIB = 1536  # `docker-compose.yml` gives the process 2 GB


def peak_mib(pid: int) -> int:
    told = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert told
    return int(told[1]) >> 10


def test_the_largest_bodies_leave_memory_and_turns_to_others(tmp_path: Path) -> None:
    largest = chain(m=MOST_MICROBATCHES, memory=MOST_MICROBATCHES).to_dict()
    largest["stages"] = [largest["stages"][0] | {"device": s % 2} for s in range(MOST_PARTS // MOST_MICROBATCHES)]
    split = {"offload_ms": 1.0, "reload_ms": 1.0, "offload_bytes": 1, "offload_parts": 64}
    parted = largest | {"microbatches": 64, "stages": [stage | split for stage in largest["stages"]]}
    ops = [f"0F{j % 4096}" for j in range(LONGEST_BODY // 9)]
    whole = {"problem": chain().to_dict(), "devices": [{"program": ops}, {"program": []}]}

    def bodies(problem: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        return [
            ("workbench", {"problem": problem, "schedule": whole}),
            ("workbench", {"problem": problem, "schedule": whole | {"devices": [{"program": []}] * 2}}),
            ("cache/lookup", {"problem": problem}),
            ("jobs", {"problem": problem, "method": "plain"}),
            ("jobs", {"problem": problem, "method": "plain", "warm_start": whole}),
        ]

    with serve_process(tmp_path) as (process, client), ThreadPoolExecutor(32) as pool:
        refused = parted | {"microbatches": MOST_MICROBATCHES}  # 16,777,216 parts
        asked = [body for problem in (refused, largest, parted) for body in bodies(problem) * 2]
        replies = [pool.submit(client.post, f"/v1/{path}", json=body) for path, body in asked]
        small = client.post("/v1/jobs", json={"problem": chain().to_dict(), "method": "plain"})
        assert small.status_code == 201
        assert small.json()["best"]
        assert not all(reply.done() for reply in replies), "it has not waited for all of them"
        assert {reply.result().status_code for reply in replies} <= {200, 201, 422, 429, 503}
        assert {reply.result().status_code for reply in replies[: len(asked) // 3]} == {422}
        jobs = client.get("/v1/jobs").json()["jobs"]
        shown = list(pool.map(client.get, [job["url"] for job in jobs] * 4))
        assert {reply.status_code for reply in shown} == {200}
        assert peak_mib(process.pid) < MOST_MIB
