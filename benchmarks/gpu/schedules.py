"""The schedules that the benchmark `gpu` runs: 1F1B with split backwards, with everything kept or half of every
activation offloaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, count

from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import Program
from optpipe.schedule import Schedule

LONGER = 0.01  # by how much offloading may lengthen the predicted makespan


def kept(problem: Problem, warm_up: Sequence[int]) -> Schedule:
    """Offloads nothing. Device d runs the forwards of `warm_up[d]` micro-batches, then alternates one forward and one
    backward."""
    return Schedule(problem, tuple(Program.from_items(ops) for ops in _compute(problem, warm_up)), method="all kept")


def halved(problem: Problem, warm_up: Sequence[int]) -> Schedule:
    """`kept` with the first half of the parts of every activation on the host for as long as it can be.

    An offload begins after its forward and is dropped some compute ops later; a reload begins as many ops before its
    backward. The number is the smallest with which the links keep up: the predicted makespan grows by at most 1 %, or
    by as little as possible with equally much offloaded. An activation whose backward follows its forward too soon
    stays."""
    compute, longest = _compute(problem, warm_up), (1 + LONGER) * kept(problem, warm_up).makespan_ms
    found: list[Schedule] = []
    for distance in count(1):
        schedule = Schedule(
            problem,
            tuple(Program.from_items(_with_transfers(problem, ops, distance)) for ops in compute),
            method="half offloaded",
        )
        if found and _offloads(schedule) < _offloads(found[0]):
            break
        found.append(schedule)
        if schedule.makespan_ms <= longest:
            break
    return min(found, key=lambda schedule: max(schedule.makespan_ms, longest))


def share_offloaded(schedule: Schedule) -> float:
    """The share of all activation bytes that is offloaded."""
    compiled = schedule.compiled
    taken = compiled.effects.takes[compiled.rows.of_kinds(Kind.F)].sum()
    return float(compiled.effects.takes_on_host.sum() / taken)


def alone(problem: Problem) -> Schedule:
    """One device and one micro-batch at a time. Each activation is offloaded and reloaded before its backward, so that
    nothing runs beside a copy."""
    ops: list[Op] = []
    for j in range(problem.microbatches):
        for s in range(len(problem.stages)):
            ops += [Op(Kind.F, s, j), *_parts(problem, s, j, Kind.O), *_parts(problem, s, j, Kind.D)]
        for s in reversed(range(len(problem.stages))):
            ops += [*_parts(problem, s, j, Kind.R), Op(Kind.B, s, j), Op(Kind.W, s, j)]
    return Schedule(problem, (Program.from_items(ops),), method="out and back")


def _compute(problem: Problem, warm_up: Sequence[int]) -> list[list[Op]]:
    """The compute ops of each device, in order."""
    lists = []
    for d, first in enumerate(warm_up):
        own, batch = problem.stages_on(d), range(problem.microbatches)
        forwards = [[Op(Kind.F, s, j) for s in own] for j in batch]
        backwards = [[Op(kind, s, j) for s in reversed(own) for kind in (Kind.B, Kind.W)] for j in batch]
        pairs = (chain(*forwards[first + j : first + j + 1], backward) for j, backward in enumerate(backwards))
        lists.append([*chain(*forwards[:first]), *chain(*pairs)])
    return lists


def _with_transfers(problem: Problem, compute: list[Op], distance: int) -> list[Op]:
    """Adds O after the forward, D `distance` compute ops later, and R as many before the backward, if there are that
    many in between."""
    place = {(op.kind, op.stage, op.microbatch): i for i, op in enumerate(compute)}
    behind: dict[int, list[Op]] = defaultdict(list)
    for wanted in (Kind.O, Kind.D, Kind.R):  # at one place they stand in this order
        for kind, s, j in place:
            forward, backward = place[Kind.F, s, j], place[Kind.B, s, j]
            drop, reload = forward + distance, backward - distance - 1
            if kind == Kind.F and drop <= reload:
                half = _parts(problem, s, j, wanted)[: (problem.stages[s].offload_parts + 1) // 2]
                behind[{Kind.O: forward, Kind.D: drop, Kind.R: reload}[wanted]] += half
    return [op for i, first in enumerate(compute) for op in (first, *behind[i])]


def _parts(problem: Problem, s: int, j: int, kind: Kind) -> list[Op]:
    stage = problem.stages[s]
    return [Op(kind, s, j, part) for part in range(stage.offload_parts)] if stage.can_offload else []


def _offloads(schedule: Schedule) -> int:
    return sum(op.kind == Kind.O for program in schedule.programs for op in program.ops())
