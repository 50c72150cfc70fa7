"""Chronos-Offload (Lin et al. 2025, section 5.1): the optimizer of deep chunks runs on the host, beside Chronos-Pipe.

Chunk v's weights have their gradients first and are used last, so its gradients leave, are applied and come back as
parameters while the other chunks drain this iteration's pipeline and fill the next one's.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from optpipe.errors import InputError
from optpipe.model.ops import BACKWARD, OPTIMIZER, Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import Program
from optpipe.schedule import Schedule
from optpipe_solver.systems.chronos import chronos
from optpipe_solver.systems.order import in_order
from optpipe_solver.systems.system import System


def chronos_offload(problem: Problem, chunks: int = 1) -> Schedule:
    """Chronos-Pipe with the optimizers of the `chunks` deepest chunks on the host: parameters come in first, in the
    order of the stages, gradients go out behind a stage's last backward, and the update follows.

    It takes no longer than Chronos-Pipe where Eq. 5 and 7 hold. For v = 2 and stages alike the exact limits are wider:
    parameters may take p forwards of a chunk, gradients and update p of its backwards; what they take beyond that is
    what the iteration is longer by. What is saved, two thirds of these chunks' model state, is no activation: the
    certificate does not change.
    """
    devices = len({stage.device for stage in problem.stages})
    v = len(problem.stages) // devices
    if not 1 <= chunks < v:
        raise InputError(f"chunks = {chunks}: expected 1 to {v - 1}, the shallowest chunk of a device is updated there")
    deep = range((v - chunks) * devices, len(problem.stages))
    for s in deep:
        if not problem.stages[s].can_update:
            raise InputError(
                f"stages[{s}].update_ms is missing: chronos-offload updates stages {deep[0]} to {deep[-1]} on the host"
            )
    plain = chronos(problem)
    last = problem.microbatches - 1
    lists: list[list[Op]] = [[] for _ in problem.devices]
    for s in deep:
        lists[problem.stages[s].device].append(Op(Kind.P, s, 0))
    for ops, program in zip(lists, plain.programs, strict=True):
        for op in program.ops():
            ops.append(op)
            if op.stage in deep and op.microbatch == last and op.kind in BACKWARD:
                ops += [Op(Kind.G, op.stage, 0), Op(Kind.U, op.stage, 0)]
    return replace(in_order(problem, lists), links=_shared(plain, deep))


def _shared(plain: Schedule, deep: range) -> dict[str, Program]:
    """The order on links that devices share: parameters as they are first needed, gradients as they are there."""
    rows = zip(plain.timeline.table.tolist(), plain.timeline.end.tolist(), strict=True)
    ended = {s: end for (kind, s, j, *_), end in rows if kind in BACKWARD and j == plain.problem.microbatches - 1}
    leaving = sorted(deep, key=lambda s: (ended[s], -s))
    order = [*(Op(Kind.P, s, 0) for s in deep), *(Op(Kind.G, s, 0) for s in leaving)]
    links = {
        link: Program.of(op for op in order if plain.problem.stages[op.stage].device in sharers)
        for link, sharers in plain.problem.shared_links.items()
    }
    return {link: program for link, program in links.items() if len(program)}


def idle_before_shallow(p: int, backward_ms: float) -> float:
    """Eq. 4: how long a device with two chunks is idle (ms) between the last backward of chunk 2 and the backwards of
    chunk 1, in the cool-down; `backward_ms` is a micro-batch's backward through all 2p chunks."""
    return (p - ceil((2 * p - 3) / 6) - 1) * backward_ms / (2 * p)


def idle_before_deep(p: int, forward_ms: float) -> float:
    """Eq. 6: likewise before the forwards of chunk 2, in the warm-up."""
    return (p - ceil((p - 3) / 6) - 1) * forward_ms / (2 * p)


def fits_in_bubbles(problem: Problem) -> bool:
    """Eq. 5 and 7 for two chunks a device: whether gradients out and update, and parameters in, of every chunk that has
    them fit into what Chronos-Pipe leaves idle. Sufficient, not necessary: they run beside compute, and other devices'
    drain and fill last longer."""
    p = len(problem.stages) // 2
    ms = problem.costs.ms
    step, upload = ms[[Kind.G, Kind.U]].sum(axis=0).max(), ms[Kind.P].max()
    backward, forward = float(ms[Kind.BW].sum()), float(ms[Kind.F].sum())
    return bool(step <= idle_before_shallow(p, backward) + 1e-9 and upload <= idle_before_deep(p, forward) + 1e-9)


def overlap(schedule: Schedule) -> float:
    """The share of the host optimizers' time by which the iteration is not longer: 1 where G, U and P hide behind
    compute, 0 where it grows by all of them, the P and the G and U of the devices where these take longest."""
    problem = schedule.problem
    spent = [0.0, 0.0]
    without = []
    for program in schedule.programs:
        ops = [op for op in program.ops() if op.kind in OPTIMIZER]
        inward = sum(float(problem.costs.ms[op.kind, op.stage]) for op in ops if op.kind == Kind.P)
        outward = sum(float(problem.costs.ms[op.kind, op.stage]) for op in ops if op.kind != Kind.P)
        spent = [max(spent[0], inward), max(spent[1], outward)]
        without.append([op for op in program.ops() if op.kind not in OPTIMIZER])
    grown = schedule.makespan_ms - in_order(problem, without).makespan_ms
    return max(0.0, 1.0 - grown / sum(spent)) if sum(spent) else 1.0


SYSTEMS = (
    System(
        "chronos-offload",
        "Lin et al. 2025, section 5.1",
        chronos_offload,
        least=2,
        most=None,
        chunks=2,
        parameters=("chunks",),
    ),
)
