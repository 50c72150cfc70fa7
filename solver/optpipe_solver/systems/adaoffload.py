"""AdaOffload as it is printed (OptPipe, Algorithm 1), for one stage a device.

The heuristic `adaoffload` takes its idea, searches its tolerance, and asks memory what fits. This is the algorithm line
by line, for comparison.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from optpipe.model.costs import FORWARDS, GRADIENTS
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import Program
from optpipe.schedule import Schedule
from optpipe_solver.systems.order import warmed_up
from optpipe_solver.systems.system import published

AHEAD = 2  # compute ops before its backward at which a reload starts: those of PipeOffload's slot


@published("algorithm-1", "OptPipe, Algorithm 1 as printed")
def algorithm_1(problem: Problem, tolerance: int = 0) -> Schedule:
    """Algorithm 1 with a tolerance T of `tolerance` ms.

    Steps 1 and 2: a stage fills with forwards until the next one would delay its first backward by T or more
    (`fills`). Step 3, PipeOffload's rules: then one backward, its weight gradient right after it, and one forward take
    turns; every activation leaves after its forward and returns before its backward, but for those whose backward
    follows at once. A forward waits until the activation before it has left (line 18), which is all that keeps memory
    low: nothing asks for the limit.

    Printed errors: line 18 reads F of the last micro-batch on the stage before, for F of the same one; line 19 uses the
    completion of F that line 20 computes.
    """
    lists = []
    for s, fill in enumerate(fills(problem, tolerance)):
        forwards = [Op(Kind.F, s, j) for j in range(problem.microbatches)]
        backwards = [[Op(kind, s, j) for kind in (Kind.B, Kind.W)] for j in range(problem.microbatches)]
        lists.append(_with_transfers(problem, s, warmed_up(forwards, backwards, fill - 1)))
    devices = [problem.stages_on(d) for d in range(len(problem.devices))]
    return Schedule(problem, tuple(Program.from_items(op for s in stages for op in lists[s]) for stages in devices))


def fills(problem: Problem, tolerance_ms: float) -> list[int]:
    """Count the forwards of each stage before its first backward (steps 1 and 2, lines 6 to 22)."""
    ms, messages = problem.costs.ms, problem.costs.message_ms
    forward = ms[Kind.F].tolist()
    offload = (ms[Kind.O] * problem.costs.parts[:, None]).tolist()
    stages = len(problem.stages)
    # EstStart(B_{s,0}): micro-batch 0 goes to the last stage and comes back.
    there, back = (ms[Kind.F, :, 0] + messages[FORWARDS, :, 0]).sum(), ms[Kind.B, 1:, 0] + messages[GRADIENTS, :-1, 0]
    starts = [float(there + back[s:].sum()) for s in range(stages)]
    counts: list[int] = []
    arrived = [0.0] * problem.microbatches  # when F of the stage before has ended, and its message has come
    for s in range(stages):
        done: list[float] = []
        left = 0.0  # when the last activation has left
        for j, at in enumerate(arrived):
            if done and max(done[-1], left + offload[s][j]) >= starts[s] + tolerance_ms:
                break
            done.append(max(done[-1] if done else 0.0, left, at) + forward[s][j])
            left = done[-1] + offload[s][j]
        counts.append(len(done))
        if s + 1 < stages:  # no stage fills further than the one before
            arrived = (np.array(done) + messages[FORWARDS, s + 1, : len(done)]).tolist()
    return counts


def _with_transfers(problem: Problem, s: int, compute: list[Op]) -> list[Op]:
    """The stage's ops with O, D and R of the activations that leave."""
    place = {op: i for i, op in enumerate(compute)}
    before: dict[int, list[Op]] = defaultdict(list)
    for j in range(problem.microbatches if problem.stages[s].can_offload else 0):
        forward, backward = place[Op(Kind.F, s, j)], place[Op(Kind.B, s, j)]
        if backward - forward <= AHEAD:
            continue
        back = backward - AHEAD
        drop = next((i for i in range(forward + 1, back) if compute[i].kind == Kind.F), back)
        for kind, at in ((Kind.O, forward + 1), (Kind.D, drop), (Kind.R, back)):
            before[at] += [Op(kind, s, j, part) for part in range(problem.stages[s].offload_parts)]
    ops: list[Op] = []
    for i, op in enumerate(compute):
        ops += [*sorted(before[i], key=lambda x: (Kind.O, Kind.D, Kind.R).index(x.kind)), op]
    return ops
