"""A small problem, and two schedules of it that differ in length and memory, for tests of what stores or sends them."""

from optpipe.model.problem import Problem
from optpipe.schedule import Schedule
from support.problems import pipeline, stage


def chain(
    memory: int = 2,
    m: int = 2,
    scale: float = 1.0,
    forward: float = 1.0,
    offload: float | None = 1.0,
    link: str | None = None,
) -> Problem:
    """Two devices with one stage each, activations of 1000 bytes and memory for `memory` of them.

    All times are multiplied by `scale`; `offload` is how long a transfer takes, None if the stages cannot offload.
    """
    leave = {} if offload is None else {"offload": (offload * scale, offload * scale, 1000)}
    costs = stage((forward * scale, scale, scale), (1000, 500), **leave)
    return pipeline(2, m, memory * 1000, costs, p2p_ms=0.1 * scale, device={"link": link})


def gpipe(problem: Problem) -> Schedule:
    """All forwards, then all backwards: needs memory for every micro-batch."""
    return ordered(problem, [(kind, j) for kind in ("F", "BW") for j in range(problem.microbatches)], "gpipe")


def one_by_one(problem: Problem) -> Schedule:
    """One micro-batch at a time: longer, and needs memory for one."""
    return ordered(problem, [(kind, j) for j in range(problem.microbatches) for kind in ("F", "BW")], "naive")


def ordered(problem: Problem, order: list[tuple[str, int]], method: str) -> Schedule:
    """Both stages in the same order."""
    return Schedule.parse(problem, [[f"{s}{kind}{j}" for kind, j in order] for s in range(2)], method=method)
