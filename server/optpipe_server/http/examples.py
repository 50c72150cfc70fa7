"""Bodies for the API's description, which work: two stages on two devices, two micro-batches."""

from __future__ import annotations

from typing import Any

from optpipe.options import SolveOptions

_STAGE = {
    "forward_ms": 1.0,
    "backward_input_ms": 1.0,
    "backward_weight_ms": 1.0,
    "activation_bytes": 1000,
    "saved_for_weight_bytes": 500,
    "offload_ms": 0.5,
    "reload_ms": 0.5,
    "offload_bytes": 1000,
}
PROBLEM: dict[str, Any] = {
    "format": "optpipe.problem/3",
    "microbatches": 2,
    "devices": [{"activation_budget_bytes": 2000}, {"activation_budget_bytes": 2000}],
    "stages": [{**_STAGE, "device": 0}, {**_STAGE, "device": 1}],
}
SUBMISSION = {"problem": PROBLEM, **SolveOptions(gap=0.01).model_dump(exclude_none=True), "priority": 0}
SCHEDULE = {
    "format": "optpipe.schedule/2",
    "problem": PROBLEM,
    "method": "1f1b",
    "devices": [{"program": ["0F0", "0F1", "0BW0", "0BW1"]}, {"program": ["1F0", "1BW0", "1F1", "1BW1"]}],
}
