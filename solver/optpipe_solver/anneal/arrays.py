"""What annealing works with, in arrays: the ops of a schedule, and where a search is."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from optpipe.evaluate.compiled import CompiledSchedule
from optpipe.evaluate.graph import ACROSS, OWN
from optpipe.model.arrays import NONE, Flags, Floats, Ints, Table
from optpipe.model.ops import COMPUTE, INWARD, KINDS, TRANSFERS, Kind
from optpipe.schedule import Schedule


class Ops(NamedTuple):
    """The ops of a schedule, and what does not change when they change places."""

    begins: Ints  # (D + 1,) where each device's ops begin in an order, and the number of all ops
    device: Ints  # (n,)
    stream: Ints  # (n,) of its device: 0 where it computes, then those of its host link, one or one a direction
    group: Ints  # (n,) of one kind, stage and part
    members: Ints  # (groups, most) the ops of each group, then NONE
    ms: Floats  # (n,)
    needs: Ints  # (n, k) the ops that must have ended, or NONE
    delay_ms: Floats  # (n,) how long ago the first of these
    takes: Ints  # (n,) bytes, at its start
    frees: Ints  # (n,) bytes, at its end
    memory: Ints  # (D,) bytes
    drops: Flags  # (n,)
    alike: Flags  # (groups,) whether the ops of a group are equal: they keep their order
    again: Ints  # (n,) the op without which a forward frees nothing, since it computes that again, or NONE
    choices: Ints  # (T, 3) offload, drop and reload of what can stay or leave, or what recomputes it behind two NONE
    choices_begin: Ints  # (D + 1,) where those of each device begin, one device after the other
    first: Ints  # (n,) the order at the start


class Room(NamedTuple):
    """Where a search is; of rejected orders only `tried_ms` and `tried` say something."""

    start_ms: Floats  # (n,)
    after_ms: Floats  # (n, streams) when each stream of its device is free behind an op in its program
    tried_ms: Floats  # (n,) starts by the order that is tried
    tried_after_ms: Floats  # (n, streams)
    tried: Ints  # (n,) the try that has timed each op last
    waiting: Ints  # (n,) the device that waits for each op, or NONE
    blocked: Ints  # (D,) the op that each device waits for, or NONE
    after: Ints  # (D,) the next place on each device
    free_ms: Floats  # (D, streams)
    stack: Ints  # (D,) devices that may go on
    places: Ints  # (groups, most) of each group's ops
    counts: Ints  # (groups,)
    present: Flags  # (n,) whether an op is in the order
    ends: Ints  # (D,) where the order of each device ends; what is left of its places is NONE
    passing: Ints  # (n,) the try in which each op was last looked at
    passed: Ints  # (groups,) ops of each group before a place
    number: Ints  # (n,) of each op within its group
    before: Ints  # (n,) the order of a device before a move
    waits: Ints  # (n,) places of ops that the last one to end waits for, each because of one before it in its program
    blocking: Ints  # (n,) the places of those


def ops_of(schedule: Schedule) -> tuple[Ops, Table]:
    """Read a schedule without pairs in which each device has a host link of its own."""
    problem = schedule.problem
    table, present = _with_all_choices(schedule)
    compiled_schedule = Schedule.in_order(problem, table).compiled
    rows, index, effects = compiled_schedule.rows, compiled_schedule.index, compiled_schedule.effects
    needs, delay_ms = _needs_of(compiled_schedule)
    stream = np.where(rows.of_kinds(*TRANSFERS), 1, 0)
    if problem.transfer_mode == "full_duplex":
        stream[rows.of_kinds(*INWARD)] = 2
    part = np.where(rows.of_kinds(Kind.C), 0, rows.part)
    _, group = np.unique(np.column_stack([rows.kind, rows.stage, part]), axis=0, return_inverse=True)
    group = group.reshape(-1)
    counts = np.bincount(group)
    entering = rows.of_kinds(Kind.F) & np.isin(rows.stage, [route[0] for route in problem.all_routes])
    keep_order = entering & problem.fixed_order
    if problem.costs.are_equal:
        keep_order = rows.of_kinds(*(COMPUTE - {Kind.C}))
    alike = np.zeros(len(counts), np.bool_)
    alike[group] = keep_order
    members = np.full((len(counts), counts.max()), NONE)
    for each, count in enumerate(counts.tolist()):
        members[each, :count] = np.flatnonzero(group == each)
    devices = np.arange(len(problem.devices) + 1)
    begins = np.searchsorted(rows.device, devices)
    first = np.full(len(rows), NONE)
    for begin, end in pairwise(begins.tolist()):
        standing = begin + np.flatnonzero(present[begin:end])
        first[begin : begin + len(standing)] = standing
    leaving = np.flatnonzero(rows.of_kinds(Kind.O))
    choices = np.column_stack([leaving, *(index.of_same_activation(kind, leaving) for kind in (Kind.D, Kind.R))])
    stays = (index.rows_of(Kind.O) == NONE)[rows.stage, rows.microbatch]
    computed = np.flatnonzero(rows.of_kinds(Kind.C) & stays)
    choices = np.concatenate([choices, np.column_stack([np.full((len(computed), 2), NONE), computed])])
    choices = choices[np.argsort(choices[:, 2])]
    recomputes = index.rows_of(Kind.C)[rows.stage, rows.microbatch]
    ops = Ops(
        begins=begins,
        device=rows.device,
        stream=stream,
        group=group,
        members=members,
        ms=compiled_schedule.durations_ms,
        needs=needs,
        delay_ms=delay_ms,
        takes=effects.takes,
        frees=effects.frees,
        memory=problem.costs.activation_budget,
        drops=rows.of_kinds(Kind.D),
        alike=alike,
        again=np.where(rows.of_kinds(Kind.F), recomputes, NONE),
        choices=choices,
        choices_begin=np.searchsorted(rows.device[choices[:, 2]], devices),
        first=first,
    )
    return ops, table


def _with_all_choices(schedule: Schedule) -> tuple[Table, Flags]:
    """The rows of the programs (n, 5), with the transfers of all parts that can leave, or else the recomputation by the
    first level, and which of them the schedule has."""
    costs, rows, index = schedule.problem.costs, schedule.compiled.rows, schedule.compiled.index
    forward, backward = index.rows_of(Kind.F), index.rows_of(Kind.B, Kind.BW)
    kept = ((index.level == NONE) & (forward != NONE))[..., None]  # whole, until the backward
    part = np.arange(int(costs.parts.max()))
    leaves = kept & (costs.can_offload[:, None, None] & (part < costs.parts[:, None, None]))
    leaves &= index.parts(Kind.O) == NONE
    again = kept & (costs.can_recompute & ~costs.can_offload)[:, None, None]
    tables, places = [rows.table], [np.arange(len(rows)) + 0.0]
    for kind, added, at in (
        *((Kind.O, leaves, forward + 0.25), (Kind.D, leaves, forward + 0.5)),
        *((Kind.R, leaves, backward - 0.5), (Kind.C, again, backward - 0.5)),
    ):
        stage, microbatch, part = np.nonzero(added)
        tables.append(np.column_stack([np.full(len(part), kind), stage, microbatch, part, np.zeros_like(part)]))
        places.append(at[stage, microbatch])
    order = np.argsort(np.concatenate(places), kind="stable")
    return np.concatenate(tables).astype(rows.table.dtype)[order], (np.arange(len(order)) < len(rows))[order]


def _needs_of(schedule: CompiledSchedule) -> tuple[Ints, Floats]:
    """(n, k) the ops that each op needs, in whatever order they are, and (n,) how many ms ago the first must have
    ended."""
    rows, index, (waits, delays) = schedule.rows, schedule.index, schedule.waits
    across = waits[:, ACROSS] != NONE  # a backward that waits for another one need not wait for its forward
    columns = [np.where(across, waits[:, ACROSS], waits[:, OWN])]
    for kind in (each for each in (Kind.R, Kind.C) if rows.of_kinds(each).any()):
        restored = rows.of_kinds(*(other for other, info in KINDS.items() if kind in info.restored))
        by_part = index.parts(kind) if kind is Kind.R else index.rows_of(kind)[..., None]
        columns += [np.where(restored, each, NONE) for each in by_part[rows.stage, rows.microbatch].T]
    return np.column_stack(columns), np.where(across, delays[:, ACROSS], 0.0)


def new_room(ops: Ops) -> Room:
    """Return room for a search."""
    n, devices, groups, streams = len(ops.ms), len(ops.memory), len(ops.members), int(ops.stream.max()) + 1
    of_ops = {
        name: np.full(n, NONE) for name in ("tried", "waiting", "number", "passing", "before", "waits", "blocking")
    }
    of_devices = {name: np.full(devices, NONE) for name in ("blocked", "after", "stack")}
    of_groups = {name: np.full(groups, 0) for name in ("counts", "passed")}
    return Room(
        present=np.zeros(n, np.bool_),
        ends=np.zeros(devices, np.int64),
        start_ms=np.zeros(n),
        after_ms=np.zeros((n, streams)),
        tried_ms=np.zeros(n),
        tried_after_ms=np.zeros((n, streams)),
        free_ms=np.zeros((devices, streams)),
        places=ops.members.copy(),
        **of_ops,
        **of_devices,
        **of_groups,
    )
