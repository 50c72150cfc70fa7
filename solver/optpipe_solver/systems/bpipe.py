"""BPipe: 1F1B whose early stages keep some of their activations on the devices of late stages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from optpipe.errors import InputError
from optpipe.evaluate.timeline import DeadlockError, Timeline
from optpipe.model.ops import BACKWARD, COMPUTE, Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import of_kinds
from optpipe.model.records import each_microbatch
from optpipe.schedule import Schedule
from optpipe_solver.systems.classic import one_f_one_b
from optpipe_solver.systems.system import in_order, published


@published("bpipe", "Kim et al. 2023")
def bpipe(problem: Problem) -> Schedule:
    """BPipe (Kim et al. 2023): stage s evicts to the device of stage p - 1 - s, and no device holds more than ⌈(p+2)/2⌉
    activations.

    Compute is 1F1B's, and waits for no transfer where an eviction and a load together last no longer than a forward.
    The paper says which stages make a pair; its figure shows what leaves in one example. Here the activations that are
    needed last leave (Belady 1966), no more of them than the limit asks for. An eviction runs beside the op before the
    one that needs its memory, a load beside the op before its backward. The peer accepts the first evictions at the
    start, and each further one when the load that frees memory for it has ended. It accepts as many at a time as the
    limit leaves, so that it holds ⌈(p+2)/2⌉, too, where the paper's figure shows one less.

    Raises InputError if a stage that must evict has no `evict_ms`, or its device has another `peer`.
    """
    p = len(problem.stages)
    limit = (p + 3) // 2  # ⌈(p+2)/2⌉
    plain = [program.ops() for program in one_f_one_b(problem).programs]
    lists, pairs = list(plain), list[tuple[int, int]]()
    for s in range(p // 2):
        if min(problem.microbatches, p - s) <= limit:
            break
        home, peer = _devices(problem, s, p - 1 - s)
        lists[home] = _evicting(plain[home], limit)
        pairs.append((home, peer))
        # First accept all of them for the whole iteration, to see when each transfer runs.
        accepts = [op._replace(kind=Kind.A) for op in lists[home] if op.kind == Kind.E]
        lists[peer] = [*accepts, *plain[peer], *(op._replace(kind=Kind.V) for op in accepts)]
    if not pairs:
        return in_order(problem, lists)
    least_ms, timeline = in_order(problem, lists).makespan_ms, in_order(_lasting(problem), lists).timeline
    for home, peer in pairs:
        for most in range(1, limit + 1):
            if accepting := _accepting(plain[peer], timeline, home, peer, most):
                lists[peer] = accepting
                with suppress(DeadlockError):  # a room that is made too late
                    if in_order(problem, lists).makespan_ms <= least_ms:
                        break
    return in_order(problem, lists)


def _accepting(compute: Sequence[Op], timeline: Timeline, home: int, peer: int, most: int) -> list[Op] | None:
    """Add to a peer's compute ops the rooms for what is evicted, so that it holds so many activations at most; None if
    they are too few.

    A room is made as early as the others allow, and let go before the first op that starts after its load.
    """
    on_link = np.flatnonzero(timeline.rows.transfer & (timeline.device == home))
    on_peer = (timeline.device == peer) & of_kinds(timeline.table, *COMPUTE)
    starts, ends = timeline.start[on_peer], timeline.end[on_peer]
    lasts = {timeline.rows.op(row): timeline.end[row] - timeline.start[row] for row in on_link.tolist()}
    until = dict(zip(lasts, np.searchsorted(starts, timeline.end[on_link]).tolist(), strict=True))  # of loads
    held = np.zeros(2 * len(compute) + 1, np.int64)  # before each op and during it; at last after all
    for i, op in enumerate(compute):
        held[2 * i + 1 :] += op.kind == Kind.F
        held[2 * i + 2 :] -= op.kind in BACKWARD
    before: list[list[Op]] = [[] for _ in (*compute, None)]
    first, later = 0, list[Op]()  # loads of what is away
    for op in lasts:
        if op.kind == Kind.L:
            held[2 * until[op]] -= 1
            before[until[op]].append(op._replace(kind=Kind.V))
            later.remove(op)
            continue
        later.append(op._replace(kind=Kind.L))
        while True:
            # Loads come after this eviction, which waits for the op before its room.
            sooner = ends[first - 1] + lasts[op] if first else 0.0
            moved = {load: max(until[load], int(np.searchsorted(starts, sooner + lasts[load]))) for load in later}
            trial = held.copy()
            for load in later[:-1]:
                trial[2 * until[load] + 1 : 2 * moved[load] + 1] += 1
            trial[2 * first : 2 * moved[later[-1]] + 1] += 1
            if trial.max() <= most:
                break
            first += 1
            if first > len(compute):
                return None
        held = trial
        until |= moved
        before[first].append(op._replace(kind=Kind.A))
    return [op for marks, then in zip(before, [*compute, None], strict=True) for op in (*marks, then) if op]


def _lasting(problem: Problem) -> Problem:
    """Let every forward and backward last a while: of two ops at one time no clock says which waits for the other."""
    least = float(problem.costs.ms.max()) / 1e6 or 1.0
    names = ("forward_ms", "backward_input_ms")
    return problem.replace(
        stages=[
            stage.model_copy(
                update={name: each_microbatch(lambda ms: max(least, ms), getattr(stage, name)) for name in names}
            )
            for stage in problem.stages
        ]
    )


def _devices(problem: Problem, evictor: int, acceptor: int) -> tuple[int, int]:
    """Return the devices of two stages, which must be peers. Raises InputError if they are not."""
    home, peer = problem.stages[evictor].device, problem.stages[acceptor].device
    if problem.devices[home].peer != peer:
        other = problem.devices[home].peer
        field = f"devices[{home}].peer is missing" if other is None else f"devices[{home}].peer = {other}"
        raise InputError(f"{field}: bpipe evicts from stage {evictor} to stage {acceptor}, which is on device {peer}")
    if not problem.stages[evictor].can_evict:
        raise InputError(
            f"stages[{evictor}].evict_ms is missing: bpipe evicts activations of this stage to device {peer}"
        )
    return home, peer


def _evicting(ops: Sequence[Op], limit: int) -> list[Op]:
    """Add to a stage's compute ops the evictions, drops and loads that keep `limit` activations on its device."""
    begins = {op.microbatch: i for i, op in enumerate(ops) if op.kind == Kind.F}
    needed = {op.microbatch: i for i, op in enumerate(ops) if op.kind in BACKWARD}
    first_of_cool_down = ops[
        max(begins.values()) + 2
    ].microbatch  # rather stays: others leave while it would have to come back
    before: list[list[Op]] = [[] for _ in ops]
    here: list[int] = []  # micro-batches whose activation is on the device, the newest last
    away: set[int] = set()
    for i, (kind, stage, j, _) in enumerate(ops):
        if kind == Kind.F:
            here.append(j)
        coming = [op.microbatch for op in ops[i + 1 : i + 2] if op.microbatch in away]
        away.difference_update(coming)
        here = coming + here  # the oldest comes back first
        gone = []
        while len(here) > limit:
            free = [k for k in here if begins[k] < i - 1 and needed[k] > i + 1]
            gone.append(max(free, key=lambda k: (k != first_of_cool_down, k)))
            here.remove(gone[-1])
        away.update(gone)
        before[i] = [*(Op(Kind.D, stage, k) for k in gone), *(Op(Kind.L, stage, k) for k in coming)]
        before[max(0, i - 1)] += [Op(Kind.E, stage, k) for k in gone]
        if kind in BACKWARD:
            here.remove(j)
    return [op for transfers, then in zip(before, ops, strict=True) for op in (*transfers, then)]
