"""Problems in the papers' unit models: all stages alike, transfers between stages for nothing, memory for
everything."""

from __future__ import annotations

from typing import Any

from optpipe.model.placement import Placement, Shape
from optpipe.model.problem import Problem
from optpipe.model.records import Stage
from support import strategies

ACTIVATION = 1000  # bytes of one stage's activation


def units(
    p: int,
    m: int,
    *,
    v: int = 1,
    shape: Shape = "looped",
    times: tuple[float, float, float] = (1, 1, 1),
    held: int = ACTIVATION,
    **costs: Any,
) -> Problem:
    """p devices, v stages on each, m micro-batches; every stage takes `times` for F, B and W and holds `held` bytes
    from B to W.

    `costs` are further fields of each stage.
    """
    f, b, w = map(float, times)
    stage = {
        "forward_ms": f,
        "backward_input_ms": b,
        "backward_weight_ms": w,
        "activation_bytes": ACTIVATION,
        "saved_for_weight_bytes": held,
    }
    row = Problem.from_dict(
        {
            "microbatches": m,
            "devices": [{"activation_budget_bytes": 10**9}] * p,
            "stages": [{"device": d, **stage, **costs} for d in range(p)],
        }
    )
    order = Placement(chunks=v, shape=shape).order(row)
    return row.replace(stages=[{"device": d, **stage, **costs} for d in order])


def paired(problem: Problem, evict_ms: float, load_ms: float) -> Problem:
    """The same, where the device of each stage of the first half may evict whole activations to that of stage p - 1 - s
    (BPipe)."""
    stages, half = problem.stages, len(problem.stages) // 2
    eviction = {"evict_ms": evict_ms, "load_ms": load_ms, "evict_bytes": ACTIVATION}
    peers = {stages[s].device: stages[-1 - s].device for s in range(half)}
    return problem.replace(
        devices=[device.model_copy(update={"peer": peers.get(d)}) for d, device in enumerate(problem.devices)],
        stages=[stage.model_copy(update=eviction if s < half else {}) for s, stage in enumerate(stages)],
    )


def unevenly(draw: Any, problem: Problem) -> Problem:
    """The same stages with times of their own, some of them 0, and messages that may take time; `draw` is
    hypothesis'."""
    names = ("forward_ms", "backward_input_ms", "backward_weight_ms", "recompute_ms")

    def changed(costs: Stage) -> dict[str, Any]:
        fields = costs.model_dump(exclude_none=True)
        return fields | {name: draw(strategies.times) for name in names if name in fields}

    return problem.replace(stages=[changed(stage) for stage in problem.stages], p2p_ms=draw(strategies.times))
