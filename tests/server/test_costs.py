"""What a request may cost is bounded before anything is computed: by counts of records, and of parts of activations."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from support.service.postgres import shared_on_sqlite

from optpipe_server.accepted import MOST_PARTS
from optpipe_server.http.tools import MOST_FORWARDS

pytestmark = [shared_on_sqlite]
STAGE = {
    "device": 0,
    "forward_ms": 1.0,
    "backward_input_ms": 1.0,
    "backward_weight_ms": 1.0,
    "activation_bytes": 64,
    "saved_for_weight_bytes": 1,
}
DEVICE, PROGRAM = {"activation_budget_bytes": 2**40}, {"program": ["0F0"]}


def problem(stages: int = 64, microbatches: int = 4096, parts: int = 1, in_parts: int | None = None) -> dict[str, Any]:
    """A problem on one device; the first `in_parts` stages, by default all, are offloaded in parts."""
    split = {"offload_ms": 1.0, "reload_ms": 1.0, "offload_bytes": 64, "offload_parts": parts}
    split_stages = stages if in_parts is None else in_parts
    return {
        "microbatches": microbatches,
        "devices": [DEVICE],
        "stages": [STAGE | (split if s < split_stages else {}) for s in range(stages)],
    }


def schedule(of: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"problem": of, "devices": [{"program": []}], **more}


MANY_PARTS, SMALL = problem(parts=64), problem(2, 2)
COSTLY = [
    *(
        (path, {"problem": MANY_PARTS, **more}, "problem has 16777216 activation parts")
        for path, more in (
            ("workbench", {"schedule": schedule(MANY_PARTS)}),
            ("workbench", {"schedule": schedule(SMALL)}),
            ("workbench", {}),
            ("jobs", {}),
            ("cache/lookup", {}),
        )
    ),
    (
        "workbench",
        {"problem": problem(in_parts=1, parts=64), "schedule": schedule(SMALL)},
        "has 16777216 activation parts",
    ),
    ("jobs", {"problem": problem(256)}, f"up to {MOST_PARTS} here"),
    ("workbench", {"problem": problem(8, 64, 8)}, "workbench: problem has 4096 activation parts"),
    ("workbench", {"problem": problem(8, 65)}, f"520 forwards.*up to {MOST_FORWARDS}"),
    (
        "workbench",
        {"problem": problem(1), "schedule": schedule(SMALL, placement={"chunks": 64}, devices=[PROGRAM])},
        None,  # 64 stages are within the limit
    ),
    (
        "workbench",
        {"problem": problem(1, parts=2), "schedule": schedule(SMALL, placement={"chunks": 64})},
        "schedule.placement: the problem on its stages has 524288 activation parts",
    ),
    ("jobs", {"problem": SMALL | {"devices": [DEVICE] * 257}}, "problem.devices are 257: expected up to 256"),
    ("jobs", {"problem": SMALL | {"microbatches": 4097}}, "problem.microbatches = 4097: expected up to 4096"),
    ("workbench", {"problem": SMALL, "schedule": schedule(problem(257, 1))}, "schedule.problem.stages are 257"),
    ("jobs", {"problem": SMALL, "warm_start": schedule(problem(257, 1))}, "warm_start.problem.stages are 257"),
    ("workbench", {"problem": SMALL, "schedule": schedule(SMALL, devices=[PROGRAM] * 257)}, "schedule.devices are 257"),
]


@pytest.mark.parametrize(
    ("path", "body", "refused"), COSTLY, ids=[f"{path}-{n}" for n, (path, *_) in enumerate(COSTLY)]
)
def test_a_body_that_would_cost_too_much_is_refused_in_a_sentence(
    client: httpx.Client, path: str, body: dict[str, Any], refused: str | None
) -> None:
    reply = client.post(f"/v1/{path}", json=body)
    if refused is None:
        assert reply.status_code == 200, reply.text
    else:
        assert reply.status_code == 422, reply.text
        assert re.search(refused, reply.json()["detail"])
