"""A small problem in two variants of memory, with two schedules that can be told apart, for tests of what stores and carries schedules."""

from __future__ import annotations

from collections.abc import Iterator

from optpipe.problem import Problem
from optpipe.schedule import Schedule


def chain(
    memory: int = 2, m: int = 2, scale: float = 1.0, forward: float = 1.0, offload: float | None = 1.0, link: str | None = None
) -> Problem:
    """Two devices, one stage each, activations of 1000 bytes and memory for `memory` of them."""
    leave = {} if offload is None else {"offload_ms": offload * scale, "reload_ms": offload * scale, "offload_bytes": 1000}
    stage = {
        "forward_ms": forward * scale,
        "backward_input_ms": scale,
        "backward_weight_ms": scale,
        "activation_bytes": 1000,
        "weight_grad_bytes": 500,
        **leave,
    }
    return Problem.from_dict(
        {
            "microbatches": m,
            "p2p_ms": 0.1 * scale,
            "devices": [{"memory_bytes": memory * 1000, "link": link}] * 2,
            "stages": [{**stage, "device": d} for d in range(2)],
        }
    )


def gpipe(problem: Problem) -> Schedule:
    """All forwards, then all backwards: needs memory for every micro-batch."""
    m = range(problem.microbatches)
    return Schedule.parse(problem, [[f"{s}F{j}" for j in m] + [f"{s}BW{j}" for j in m] for s in range(2)], method="gpipe")


def one_by_one(problem: Problem) -> Schedule:
    """One micro-batch at a time: longer, and needs memory for one."""
    return Schedule.parse(
        problem, [[f"{s}{kind}{j}" for j in range(problem.microbatches) for kind in ("F", "BW")] for s in range(2)], method="naive"
    )


def step_by_step(problem: Problem) -> Iterator[Schedule]:
    """From one by one to gpipe, each shorter than the one before: the last `together` micro-batches go together."""
    m = problem.microbatches
    for together in range(1, m + 1):
        alone, group = range(m - together), range(m - together, m)
        programs = [
            [f"{s}{kind}{j}" for j in alone for kind in ("F", "BW")] + [f"{s}F{j}" for j in group] + [f"{s}BW{j}" for j in group]
            for s in range(2)
        ]
        yield Schedule.parse(problem, programs, method=f"{together} together")
