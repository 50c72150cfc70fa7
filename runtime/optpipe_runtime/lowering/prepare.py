"""`prepare`: from a schedule to what one rank runs, after checks that it can run in this pipeline."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from functools import cache

import numpy as np

from optpipe.errors import ScheduleError
from optpipe.model.ops import HOST_LINK, OPTIMIZER, Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import KIND, of_kinds
from optpipe.schedule import Schedule, check
from optpipe_runtime.lowering.actions import Programs, lower_ops, programs_of
from optpipe_runtime.lowering.link_order import link_orders
from optpipe_runtime.lowering.plan import EvictionOrder, Plan, StageMicrobatch
from optpipe_runtime.ranks.layout import Layout

# The kinds of op that this executor has code for. Not `tuple(Kind)`: a kind that is new there has none yet.
RUNS = tuple(Kind[name] for name in ["F", "B", "W", "BW", "C", "O", "D", "R", "E", "L", "A", "V", "G", "U", "P"])


def prepare(
    schedule: Schedule, rank: int, layout: Layout, problem: Problem | None = None, host_updates: Set[int] = frozenset()
) -> Plan:
    """Checks a schedule for this pipeline and lowers it for one rank.

    A pure function: it may run in a thread beside the training.

    Parameters
    ----------
    schedule
        The schedule of all ranks, from anywhere.
    rank
        The rank to lower it for.
    layout
        The layout of this pipeline.
    problem
        What was measured here. The schedule must be valid and fit for this problem; by default for its own.
    host_updates
        The stages of this rank with an optimizer on the host.

    Returns
    -------
    Plan
        What the rank runs.

    Raises
    ------
    ScheduleError
        If the schedule cannot run here; one sentence says why.
    """
    require_valid(schedule, layout, problem)
    return lower(schedule, rank, layout, problem, host_updates)


def require_valid(schedule: Schedule, layout: Layout, problem: Problem | None = None) -> None:
    """Raises `ScheduleError` if the schedule is not valid or does not fit for `problem` in a pipeline of this layout.

    The answer is the same on every rank. So one rank checks a schedule and the others, which get it from that rank,
    only `lower` it.
    """
    _require_same_pipeline(Layout.of(schedule.problem), layout)
    _require_known(schedule)
    _require_peers(schedule, layout)
    _require_links(schedule, layout)
    if complaints := check(problem or schedule.problem, schedule):
        more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
        raise ScheduleError(f"the schedule does not fit this pipeline: {complaints[0]}{more}")


def lower(
    schedule: Schedule, rank: int, layout: Layout, problem: Problem | None = None, host_updates: Set[int] = frozenset()
) -> Plan:
    """The plan of a schedule that has passed `require_valid`; see `prepare`. Raises `ScheduleError` if it updates a
    stage that has no optimizer on the host."""
    checked_on = problem or schedule.problem
    compiled = schedule.on(checked_on).compiled
    programs = programs_of(compiled)
    ops = list(programs(rank))
    _require_host_optimizers(ops, rank, host_updates)
    return Plan(
        rank=rank,
        schedule=schedule,
        problem=checked_on,
        certificate=compiled.certificate,
        digest=_digest(schedule, checked_on),
        actions=lower_ops(programs, rank, layout),
        certified_bytes=tuple(compiled.held.after[compiled.rows.of_device(rank)].tolist()),
        forwards=lower_ops(cache(lambda d: _forwards(programs(d))), rank, layout),
        recomputed=frozenset((op.stage, op.microbatch) for op in ops if op.kind == Kind.C),
        split=frozenset((op.stage, op.microbatch) for op in ops if op.kind == Kind.B),
        leaving=frozenset((op.stage, op.microbatch) for op in ops if op.kind in (Kind.O, Kind.E)),
        completing=frozenset({op.stage: op for op in ops if op.kind in (Kind.W, Kind.BW)}.values()),
        closing=frozenset({op.stage: op for op in ops if op.kind == Kind.F}.values()),
        updated=frozenset(op.stage for op in ops if op.kind == Kind.U),
        evictions=_evictions(programs, rank, layout),
        link_orders=link_orders(schedule, rank, layout),
    )


def _forwards(program: Mapping[Op, int]) -> dict[Op, int]:
    return {op: place for op, place in program.items() if op.kind == Kind.F}


def _require_same_pipeline(theirs: Layout, own: Layout) -> None:
    if theirs.placement != own.placement:
        there, here = list(theirs.placement), list(own.placement)
        raise ScheduleError(
            f"the schedule places its stages on devices {there}, this pipeline on {here}: stages do not move"
        )
    if theirs.microbatches != own.microbatches:
        raise ScheduleError(
            f"the schedule is for {theirs.microbatches} micro-batches, this pipeline runs {own.microbatches}"
        )
    for j in range(own.microbatches):
        if theirs.route(j) != own.route(j):
            raise ScheduleError(
                f"the schedule sends micro-batch {j} over stages {list(theirs.route(j))}, this pipeline over "
                f"{list(own.route(j))}"
            )


def _require_known(schedule: Schedule) -> None:
    """Finds an op that this executor has no code for before anything runs. All ranks find the same one."""
    for d, program in enumerate(schedule.programs):
        if not set(np.unique(program.table[:, KIND]).tolist()) <= set(RUNS):
            op = next(op for op in program.ops() if op.kind not in RUNS)
            names = ", ".join(kind.name for kind in RUNS)
            raise ScheduleError(f"{op} in the program of device {d}: this executor runs {names}, not {op.kind.name}")


def _require_peers(schedule: Schedule, layout: Layout) -> None:
    """Ranks may evict only to the peers that this pipeline has."""
    theirs = Layout.of(schedule.problem)
    for d, program in enumerate(schedule.programs):
        if theirs.peer(d) != layout.peer(d) and Kind.E in program.table[:, KIND]:
            raise ScheduleError(
                f"the schedule evicts from device {d} to device {theirs.peer(d)}, in this pipeline the peer of "
                f"rank {d} is {layout.peer(d)}"
            )


def _require_links(schedule: Schedule, layout: Layout) -> None:
    """Ranks that share a link here must share it in the schedule, which then has the order of their transfers."""
    theirs = Layout.of(schedule.problem)
    for d, program in enumerate(schedule.programs):
        if not of_kinds(program.table, *HOST_LINK).any():
            continue
        there, here = (
            f"the link {name!r}" if name else "a link of its own" for name in (theirs.link(d), layout.link(d))
        )
        if there != here:
            raise ScheduleError(
                f"the schedule transfers over {there} from device {d}, in this pipeline rank {d} has {here}"
            )
        if layout.link(d) and theirs.full_duplex != layout.full_duplex:
            modes = {True: "full duplex", False: "half duplex"}
            raise ScheduleError(
                f"{there} is {modes[theirs.full_duplex]} in the schedule's problem, here {modes[layout.full_duplex]}"
            )


def _require_host_optimizers(ops: list[Op], rank: int, host_updates: Set[int]) -> None:
    for op in ops:
        if op.kind in OPTIMIZER and op.stage not in host_updates:
            raise ScheduleError(
                f"{op} in the program of device {rank}: stage {op.stage} has no optimizer on the host here, "
                "Pipeline's host_optimizers does not name it"
            )


def _digest(schedule: Schedule, problem: Problem) -> str:
    content = hashlib.sha256(problem.sha256.encode())
    for program in schedule.programs:
        content.update(len(program).to_bytes(8, "little") + program.table.astype("<i4").tobytes())
    for _, order in sorted(schedule.links.items()):
        content.update(len(order).to_bytes(8, "little") + order.table.astype("<i4").tobytes())
    return content.hexdigest()


def _evictions(programs: Programs, rank: int, layout: Layout) -> dict[int, EvictionOrder]:
    """The order of evictions of each rank that evicts to this one."""

    def activations(evictor: int, kind: Kind) -> tuple[StageMicrobatch, ...]:
        return tuple((op.stage, op.microbatch) for op in programs(evictor) if op.kind == kind)

    evictors = {layout.placement[op.stage] for op in programs(rank) if op.kind == Kind.A}
    return {d: EvictionOrder(activations(d, Kind.E), activations(d, Kind.L)) for d in evictors}
