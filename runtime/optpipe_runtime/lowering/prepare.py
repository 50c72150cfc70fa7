"""`prepare`: from a schedule to what one rank runs, after checks that it can run in this pipeline."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from functools import cache, lru_cache

import numpy as np

from optpipe.errors import ScheduleError
from optpipe.model.ops import HOST_LINK, Kind
from optpipe.model.problem import Problem
from optpipe.model.program import KIND, PART, STAGE, of_kinds
from optpipe.schedule import Schedule, check
from optpipe_runtime.lowering.actions import lower_ops, programs_of
from optpipe_runtime.lowering.plan import Plan, link_orders
from optpipe_runtime.ranks.layout import Layout

# Raises `ScheduleError` if a schedule cannot run in a pipeline of this layout; on every rank for the same reason.
Check = Callable[[Schedule, Layout], None]


def prepare(
    schedule: Schedule, rank: int, layout: Layout, problem: Problem | None = None, require: Check | None = None
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
    require
        What else this pipeline requires of it.

    Returns
    -------
    Plan
        What the rank runs.

    Raises
    ------
    ScheduleError
        If the schedule cannot run here; one sentence says why.
    """
    require_valid(schedule, layout, problem, require)
    return lower(schedule, rank, layout, problem)


def require_valid(
    schedule: Schedule, layout: Layout, problem: Problem | None = None, require: Check | None = None
) -> None:
    """Raises `ScheduleError` if the schedule is not valid or does not fit for `problem` in a pipeline of this layout.

    The answer is the same on every rank. So one rank checks a schedule and the others, which get it from that rank,
    only `lower` it.
    """
    _require_same_pipeline(Layout.from_problem(schedule.problem), layout)
    if require is not None:
        require(schedule, layout)
    _require_links(schedule, layout)
    if complaints := check(problem or schedule.problem, schedule):
        more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
        raise ScheduleError(f"the schedule does not fit this pipeline: {complaints[0]}{more}")


def require_kinds(schedule: Schedule, kinds: Sequence[Kind]) -> None:
    """Finds an op of another kind, for which there is no code, before anything runs."""
    for d, program in enumerate(schedule.programs):
        if not set(np.unique(program.table[:, KIND]).tolist()) <= set(kinds):
            op = next(op for op in program.ops() if op.kind not in kinds)
            names = ", ".join(kind.name for kind in kinds)
            raise ScheduleError(f"{op} in the program of device {d}: this executor runs {names}, not {op.kind.name}")


def require_levels(schedule: Schedule, levels: Collection[str]) -> None:
    """Finds a recompute by a level that this pipeline does not offer, before anything runs."""
    for d, program in enumerate(schedule.programs):
        rows = program.table[of_kinds(program.table, Kind.C)]
        for s, k in np.unique(rows[:, [STAGE, PART]], axis=0).tolist():
            for level in schedule.problem.stages[s].all_levels[k : k + 1]:
                if level.name not in levels:
                    raise ScheduleError(
                        f"device {d} recomputes stage {s} by level {level.name!r}: this pipeline was made with "
                        f"recompute = {tuple(levels)}"
                    )


def lower(schedule: Schedule, rank: int, layout: Layout, problem: Problem | None = None) -> Plan:
    """The plan of a schedule that has passed `require_valid`; see `prepare`."""
    checked_on = problem or schedule.problem
    compiled = schedule.on(checked_on).compiled
    programs = programs_of(compiled)
    ops = list(programs(rank))
    return Plan(
        rank=rank,
        schedule=schedule,
        problem=checked_on,
        certificate=compiled.certificate,
        digest=_digest(schedule, checked_on),
        actions=lower_ops(programs, rank, layout),
        certified_bytes=tuple(compiled.held.after[compiled.rows.of_device(rank)].tolist()),
        forwards=lower_ops(
            cache(lambda d: {op: place for op, place in programs(d).items() if op.kind == Kind.F}), rank, layout
        ),
        recomputed={
            (op.stage, op.microbatch): checked_on.stages[op.stage].all_levels[op.part].name
            for op in ops
            if op.kind == Kind.C
        },
        split=frozenset((op.stage, op.microbatch) for op in ops if op.kind == Kind.B),
        leaving=frozenset((op.stage, op.microbatch) for op in ops if op.kind in (Kind.O, Kind.E)),
        completing=frozenset({op.stage: op for op in ops if op.kind in (Kind.W, Kind.BW)}.values()),
        closing=frozenset({op.stage: op for op in ops if op.kind == Kind.F}.values()),
        link_orders=link_orders(schedule, rank, layout),
    )


def _require_same_pipeline(scheduled: Layout, layout: Layout) -> None:
    if scheduled.placement != layout.placement:
        theirs, ours = list(scheduled.placement), list(layout.placement)
        raise ScheduleError(
            f"the schedule places its stages on devices {theirs}, this pipeline on {ours}: stages do not move"
        )
    if scheduled.microbatches != layout.microbatches:
        raise ScheduleError(
            f"the schedule is for {scheduled.microbatches} micro-batches, this pipeline runs {layout.microbatches}"
        )
    for j in range(layout.microbatches):
        if scheduled.route(j) != layout.route(j):
            raise ScheduleError(
                f"the schedule sends micro-batch {j} over stages {list(scheduled.route(j))}, this pipeline over "
                f"{list(layout.route(j))}"
            )


def _require_links(schedule: Schedule, layout: Layout) -> None:
    """Ranks that share a link here must share it in the schedule, which then has the order of their transfers."""
    scheduled = Layout.from_problem(schedule.problem)
    for d, program in enumerate(schedule.programs):
        if not of_kinds(program.table, *HOST_LINK).any():
            continue
        theirs, ours = (
            f"the link {name!r}" if name else "a link of its own" for name in (scheduled.link(d), layout.link(d))
        )
        if theirs != ours:
            raise ScheduleError(
                f"the schedule transfers over {theirs} from device {d}, in this pipeline rank {d} has {ours}"
            )
        if layout.link(d) and scheduled.full_duplex != layout.full_duplex:
            there, here = ("full duplex" if each.full_duplex else "half duplex" for each in (scheduled, layout))
            raise ScheduleError(f"{theirs} is {there} in the schedule's problem, here {here}")


def _digest(schedule: Schedule, problem: Problem) -> str:
    content = hashlib.sha256(problem.sha256.encode())
    for program in schedule.programs:
        content.update(len(program).to_bytes(8, "little") + program.table.astype("<i4").tobytes())
    for _, order in sorted(schedule.links.items()):
        content.update(len(order).to_bytes(8, "little") + order.table.astype("<i4").tobytes())
    return content.hexdigest()


def one_at_a_time(problem: Problem) -> Schedule:
    """The schedule that needs the least memory: each micro-batch forward and back before the next."""
    programs: list[list[str]] = [[] for _ in problem.devices]
    for j in range(problem.microbatches):
        route = problem.route(j)
        for kind, stages in (("F", route), ("BW", tuple(reversed(route)))):
            for s in stages:
                programs[problem.stages[s].device].append(f"{s}{kind}{j}")
    return Schedule.parse(problem, programs, method="one at a time")


@lru_cache(maxsize=64)
def forwards_in_order(rank: int, layout: Layout) -> Plan:
    """For an evaluation: the micro-batches' forwards, one after the other, on each stage."""
    return lower(one_at_a_time(layout.unmeasured()), rank, layout)
