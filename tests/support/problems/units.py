"""Problems as papers assume them: all stages are alike, messages take no time, and memory is ample."""

from typing import Any

from optpipe.model.placement import Placement, Shape
from optpipe.model.problem import Problem
from optpipe.model.records import Stage
from optpipe.schedule import Schedule, certify
from support.problems import pipeline, stage, strategies

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
    """p devices with v stages each, and m micro-batches.

    Every stage takes `times` for F, B and W; `held` bytes stay saved from B to W. `costs` are further fields of each
    stage.
    """
    each = stage(times, (ACTIVATION, held), **costs)
    return pipeline(p, m, 10**9, [{"device": d, **each} for d in Placement(chunks=v, shape=shape).along(range(p))])


def paired(problem: Problem, evict_ms: float, load_ms: float) -> Problem:
    """The same stages, of which those of the first half can evict whole activations to a peer device (BPipe).

    The peer of the device of stage s is the device of stage p - 1 - s.
    """
    stages, half = problem.stages, len(problem.stages) // 2
    eviction = {"evict_ms": evict_ms, "load_ms": load_ms, "evict_bytes": ACTIVATION}
    peers = {stages[s].device: stages[-1 - s].device for s in range(half)}
    return problem.replace(
        devices=[device.model_copy(update={"peer": peers.get(d)}) for d, device in enumerate(problem.devices)],
        stages=[stage.model_copy(update=eviction if s < half else {}) for s, stage in enumerate(stages)],
    )


def unevenly(draw: Any, problem: Problem) -> Problem:
    """The same stages with different times, some of them 0, and messages that may take time."""
    names = ("forward_ms", "backward_input_ms", "backward_weight_ms", "recompute_ms")

    def changed(costs: Stage) -> dict[str, Any]:
        fields = costs.model_dump(exclude_none=True)
        return fields | {name: draw(strategies.times) for name in names if name in fields}

    return problem.replace(stages=[changed(stage) for stage in problem.stages], p2p_ms=draw(strategies.times))


def peaks(schedule: Schedule) -> list[float]:
    """What each device holds at its fullest, in activations of one stage."""
    return [peak.bytes / ACTIVATION for peak in certify(schedule.problem, schedule).device]
