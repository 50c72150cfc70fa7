"""A small job for the API's description: two stages on two devices, two micro-batches."""

from __future__ import annotations

from typing import Any

from optpipe.options import CompareOptions, SolveOptions

ID, SHA256 = "0" * 32, "0" * 64
URL = f"/v1/jobs/{ID}"
AT = "2030-01-01T12:00:00.000+00:00"

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
    "format": "optpipe.problem/2",
    "microbatches": 2,
    "devices": [{"activation_budget_bytes": 2000}, {"activation_budget_bytes": 2000}],
    "stages": [{**_STAGE, "device": 0}, {**_STAGE, "device": 1}],
}
_OPTIONS = SolveOptions(gap=0.01)
SUBMISSION = {"problem": PROBLEM, **_OPTIONS.model_dump(exclude_none=True), "priority": 0}
COMPARE = {"problem": PROBLEM, **CompareOptions(time_limit_s=5.0, methods=("1f1b", "auto")).model_dump(mode="json")}
SCHEDULE = {
    "format": "optpipe.schedule/2",
    "problem": PROBLEM,
    "problem_sha256": SHA256,
    "method": "1f1b",
    "makespan_ms": 9.0,
    "span_ms": 9.0,
    "devices": [{"program": ["0F0", "0F1", "0BW0", "0BW1"]}, {"program": ["1F0", "1BW0", "1F1", "1BW1"]}],
}
INCUMBENT = {
    "seq": 1,
    "source": "heuristic",
    "method": "1f1b",
    "makespan_ms": 9.0,
    "span_ms": 9.0,
    "value_ms": 9.0,
    "problem_version": 1,
    "problem_sha256": SHA256,
    "attempt": 0,
    "found_at": AT,
    "url": f"{URL}/incumbents/1",
}
WHOLE = {**INCUMBENT, "schedule": SCHEDULE}
SAID = {"step": 120, "measured_iteration_ms": 9.2, "adopted_at": AT}
INCUMBENTS = {"incumbents": [{**INCUMBENT, "adoption": SAID}]}
BOUNDS = {"bounds": [{"problem_version": 1, "lower_bound_ms": 8.0, "found_at": AT}]}
SUMMARY = {
    "id": ID,
    "version": 2,
    "state": "queued",
    "reason": None,
    "problem_name": "",
    "problem_sha256": SHA256,
    "problem_version": 1,
    "options": _OPTIONS.model_dump(),
    "priority": 0,
    "status": "feasible",
    "value_ms": 9.0,
    "lower_bound_ms": 8.0,
    "gap": 0.11,
    "attempt": 0,
    "crashes": 0,
    "created_at": AT,
    "started_at": None,
    "ended_at": None,
    "spent_s": 0.0,
    "url": URL,
}
JOB = {**SUMMARY, "best": WHOLE}
JOBS = {"jobs": [SUMMARY], "next": None}
ADOPTION = {**SAID, "seq": 1, "predicted_ms": 9.0, "url": f"{URL}/incumbents/1"}
ADOPTIONS = {"adoptions": [ADOPTION]}
LOG = {
    "lines": [{"number": 1, "at": AT, "attempt": 0, "level": "info", "text": "submitted: auto, makespan, 60 s"}],
    "next": None,
}
TIMELINE = {
    "seq": 1,
    "problem_sha256": SHA256,
    "makespan_ms": 9.0,
    "span_ms": 9.0,
    "bubble": 0.33,
    "ops": [{"kind": "F", "stage": 0, "microbatch": 0, "start_ms": 0.0, "end_ms": 1.0}],
    "devices": [
        {
            "peak_bytes": 2000,
            "peak_at": "0F1",
            "activation_budget_bytes": 2000,
            "host_peak_bytes": 0,
            "host_memory_bytes": None,
        },
    ],
}
ROWS = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
NODES = {
    "format": "optpipe.primus/1",
    "pp_size": 1,
    "vpp_size": 1,
    "micro_batches": 1,
    "first_pp_stage_rank": 0,
    "last_pp_stage_rank": 0,
    "directions": [[{"F": [None, None, None, None], "B": [None, None, None, None]}]],
    "table": [[["F", 0, 0, None], ["BW", 0, 0, None]]],
}
TRACE = {
    "traceEvents": [{"ph": "X", "pid": 0, "tid": 0, "name": "0F0", "cat": "forward", "ts": 0.0, "dur": 1000.0}],
    "displayTimeUnit": "ms",
}
EVENTS = (
    f'id: 1\nevent: incumbent\ndata: {{"seq":1,"makespan_ms":9.0,"url":"{URL}/incumbents/1"}}\n\n'
    'id: 1\nevent: end\ndata: {"state":"done"}\n\n'
)
_ARRAY = {"type": "u1", "base64": ""}
FIGURE = {
    "title": "1f1b",
    "lower_bound_ms": None,
    "gap": None,
    "kinds": [{"letter": "F", "name": "forward", "colour": "#0072b2", "text": "#ffffff"}],
    "letters": ["F"],
    "schedules": [{"method": "1f1b", "makespan_ms": 9.0, "ops": {"kind": _ARRAY}}],
}
QUEUE = {
    "waiting": 1,
    "ahead": 0,
    "most_waiting": 100,
    "running": 1,
    "solves": 1,
    "workers": [{"worker": "host-1", "jobs": [ID]}],
}
ESTIMATE = {"model": "llama-3-8b", "gpu": "H100", "parallelism": {"pp": 4, "tp": 2}, "run": {"microbatches": 8}}
ESTIMATED = {
    "problem": PROBLEM,
    "parameters": 8030000000,
    "state_bytes": [30000000000],
    "workspace_bytes": [1000000000],
    "reserved_bytes": [4294967296],
}
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
_ONCE = {"iqr_ms": 0.0, "count": 1}
PROBLEM_FROM = {
    "problem": PROBLEM,
    "stages": [{"F": {"ms": 1.0, **_ONCE}, "BW": {"ms": 2.0, **_ONCE}}],
    "message": {"ms": 0.0, **_ONCE},
    "measured_ms": 5.0,
    "replayed_ms": 5.0,
    "unknown": ["what stays saved from B until W: the whole activation; edit saved_for_weight_bytes"],
}
WORKBENCH = {
    "rows": [
        {"method": "1f1b", "fits": True, "reason": None, "drawn": 0, "placement": None, "lower_bound_ms": 8.0},
    ],
    "figure": FIGURE,
}
