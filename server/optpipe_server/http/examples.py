"""Bodies for the API's description, which work: two stages on two devices, two micro-batches."""

from __future__ import annotations

from typing import Any

from optpipe.options import CompareOptions, SolveOptions

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
RULES = {
    "rules": {
        "in_flight": [2, 1],
        "wait_ms": [[0.0, 0.0], [0.0, 0.0]],
        "leaves": [[0, 0], [0, 0]],
        "lead_ms": [0.0, 0.0],
        "order": [0, 1],
    },
    "step": 120,
    "predicted_ms": 9.0,
    "measured_ms": 9.2,
}
COMPARE = {"problem": PROBLEM, **CompareOptions(time_limit_s=5.0, methods=("1f1b", "auto")).model_dump(mode="json")}
SCHEDULE = {
    "format": "optpipe.schedule/2",
    "problem": PROBLEM,
    "method": "1f1b",
    "devices": [{"program": ["0F0", "0F1", "0BW0", "0BW1"]}, {"program": ["1F0", "1BW0", "1F1", "1BW1"]}],
}
ROWS = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
ESTIMATE = {"model": "llama-3-8b", "gpu": "H100", "parallelism": {"pp": 4, "tp": 2}, "run": {"microbatches": 8}}
MEASURED = {
    "files": [
        {
            "name": "ops.csv",
            "text": "stage,op,microbatch,start_ms,end_ms\n0,F,0,0,1\n0,BW,0,3,5\n1,F,0,1,2\n1,BW,0,2,3\n",
        }
    ],
    "activation_bytes": [1000],
    "activation_budget_bytes": 2000,
    "weight_share": 0.5,
}
