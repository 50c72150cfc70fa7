"""Chronos-Offload (Lin et al. 2025, section 5.1): the optimizer of deep chunks runs on the host, beside Chronos-Pipe.

The weights of chunk v get their gradients first and are used last. So its gradients leave, are applied and come back as
parameters while the other chunks drain this iteration's pipeline and fill the next one's.
"""

from __future__ import annotations

from dataclasses import replace

from optpipe.errors import InputError
from optpipe.model.ops import BACKWARD, Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import Program
from optpipe.schedule import Schedule
from optpipe_solver.systems.chronos import chronos
from optpipe_solver.systems.order import count_chunks, count_devices, in_order
from optpipe_solver.systems.system import System


def chronos_offload(problem: Problem, chunks: int = 1) -> Schedule:
    """Chronos-Pipe with the optimizers of the `chunks` deepest chunks on the host.

    Parameters come in first, in the order of the stages; gradients go out after a stage's last backward, and the
    update follows. The iteration is no longer than Chronos-Pipe's where Eq. 5 and 7 hold. For v = 2 and stages alike
    the exact limits are wider: parameters may take p forwards of a chunk, gradients and update p of its backwards. What
    they take beyond that makes the iteration longer. What is saved, two thirds of these chunks' model state, is no
    activation, so the certificate does not change.
    """
    devices, v = count_devices(problem), count_chunks(problem)
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
    """Order the links that devices share: parameters as they are first needed, gradients as they become ready."""
    rows = zip(plain.timeline.table.tolist(), plain.timeline.end.tolist(), strict=True)
    ended = {s: end for (kind, s, j, *_), end in rows if kind in BACKWARD and j == plain.problem.microbatches - 1}
    leaving = sorted(deep, key=lambda s: (ended[s], -s))
    order = [*(Op(Kind.P, s, 0) for s in deep), *(Op(Kind.G, s, 0) for s in leaving)]
    links = {
        link: Program.from_items(op for op in order if plain.problem.stages[op.stage].device in sharers)
        for link, sharers in plain.problem.shared_links.items()
    }
    return {link: program for link, program in links.items() if len(program)}


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
