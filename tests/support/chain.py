"""A small problem in two variants of memory, with two schedules that can be told apart, for tests of what stores and
carries schedules."""

from __future__ import annotations

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule


def chain(
    memory: int = 2,
    m: int = 2,
    scale: float = 1.0,
    forward: float = 1.0,
    offload: float | None = 1.0,
    link: str | None = None,
) -> Problem:
    """Two devices, one stage each, activations of 1000 bytes and memory for `memory` of them."""
    leave = (
        {} if offload is None else {"offload_ms": offload * scale, "reload_ms": offload * scale, "offload_bytes": 1000}
    )
    stage = {
        "forward_ms": forward * scale,
        "backward_input_ms": scale,
        "backward_weight_ms": scale,
        "activation_bytes": 1000,
        "saved_for_weight_bytes": 500,
        **leave,
    }
    return Problem.from_dict(
        {
            "microbatches": m,
            "p2p_ms": 0.1 * scale,
            "devices": [{"activation_budget_bytes": memory * 1000, "link": link}] * 2,
            "stages": [{**stage, "device": d} for d in range(2)],
        }
    )


def gpipe(problem: Problem) -> Schedule:
    """All forwards, then all backwards: needs memory for every micro-batch."""
    m = range(problem.microbatches)
    return Schedule.parse(
        problem, [[f"{s}F{j}" for j in m] + [f"{s}BW{j}" for j in m] for s in range(2)], method="gpipe"
    )


def one_by_one(problem: Problem) -> Schedule:
    """One micro-batch at a time: longer, and needs memory for one."""
    return Schedule.parse(
        problem,
        [[f"{s}{kind}{j}" for j in range(problem.microbatches) for kind in ("F", "BW")] for s in range(2)],
        method="naive",
    )
