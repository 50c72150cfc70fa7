"""`repair`: a schedule that was made for other figures becomes one of this problem, with few changes of its order.

Times may drift as they like: programs are re-timed. Where an op of a program exceeds the memory that there is now,
activations that are held meanwhile leave, or are computed again, those first that keep compute waiting least. What
still does not fit is moved behind what makes room (`_replayed`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from optpipe.errors import OptPipeError, ScheduleError
from optpipe.evaluate.compiled import CompiledSchedule
from optpipe.evaluate.effects import Effects
from optpipe.evaluate.graph import ISSUED
from optpipe.evaluate.objective import Objective, length_ms
from optpipe.model.arrays import Ints
from optpipe.model.ops import BACKWARD, HOST_LINK, OPTIMIZER, Kind
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, KIND, PART, STAGE, Program, of_kinds
from optpipe.schedule import Schedule, check

EARLY = 1.5  # a reload starts this many reload times before its backward, if memory allows


def repair(problem: Problem, schedule: Schedule, objective: Objective = "makespan") -> Schedule | None:
    """Turns a schedule into a valid one of this problem.

    Parameters
    ----------
    schedule
        Of any problem with the same stages, placement and number of micro-batches.

    Returns
    -------
    The shortest valid schedule found; None if a few changes do not suffice.
    """
    try:
        possible = _only_what_the_problem_has(problem, schedule)
        if not check(problem, possible):
            return possible
    except (OptPipeError, LookupError):  # it is not of such stages and micro-batches
        return None
    found = []
    for change in (_replayed, lambda schedule: _replayed(_relieved(schedule))):
        try:
            changed = change(possible)
            if not check(problem, changed):
                found.append(changed)
        except (OptPipeError, LookupError):  # ops wait for each other, or for memory
            continue
    return min(found, key=lambda schedule: length_ms(schedule, objective), default=None)


def _only_what_the_problem_has(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule without the offloads, recomputes, updates and pairs that the problem does not have. Raises
    ScheduleError if the stages are others."""
    costs = problem.costs

    def possible(program: Program) -> Program:
        kind, stage, part = program.table[:, KIND], program.table[:, STAGE], program.table[:, PART]
        offloaded, dropped = np.isin(kind, [Kind.O, Kind.R]), kind == Kind.D
        leaves = costs.can_offload[stage] | (dropped & costs.can_evict[stage]) | ~(offloaded | dropped)
        known = leaves & (part < costs.parts[stage]) & ((kind != Kind.C) | costs.can_recompute[stage])
        known &= costs.can_update[stage] | ~np.isin(kind, list(OPTIMIZER))
        table = program.table[known].copy()
        if problem.overlap_factor is None:
            table[:, JOINED] = 0
        return Program(table)

    links = {link: possible(order) for link, order in schedule.links.items() if link in problem.shared_links}
    programs = tuple(possible(program) for program in schedule.programs)
    found = Schedule(problem, programs, {link: order for link, order in links.items() if len(order)}, schedule.method)
    _ = found.compiled.rows  # raises if the stages are others
    return found


def _replayed(schedule: Schedule) -> Schedule:
    """Runs all ops once more in the order of their starts. What does not fit waits for memory, and what needs it waits
    with it.

    All programs and links keep the one order in which ops are let through, so they cannot deadlock. Raises LookupError
    if all that is left waits for memory.
    """
    problem, compiled, timeline = schedule.problem, schedule.compiled, schedule.timeline
    rows = compiled.rows
    leads = np.flatnonzero(~rows.second)  # ops, and of pairs the first
    waits, delays = compiled.waits
    # The order of programs and streams is what changes.
    needed = [column for column in range(waits.shape[1] - 1) if column % 4 != ISSUED]
    behind: list[list[tuple[int, float]]] = [[] for _ in range(len(rows))]
    missing = [0] * len(rows)
    others, hops = waits[leads][:, needed], delays[leads][:, needed]
    for lead, column in np.argwhere(others >= 0).tolist():
        behind[others[lead, column]].append((int(leads[lead]), float(hops[lead, column])))
        missing[leads[lead]] += 1
    soonest, lasts, device = timeline.start.tolist(), (timeline.end - timeline.start).tolist(), rows.device.tolist()
    is_forward = rows.of_kinds(Kind.F).tolist()
    memory = _Memory(compiled)
    ready = [(soonest[row], row) for row in leads.tolist() if not missing[row]]
    heapq.heapify(ready)
    # What lacks memory, by device: what restores activations, and forwards.
    short: list[list[tuple[float, int]]] = [[] for _ in range(2 * len(problem.devices))]
    order = []
    while ready:
        now, row = heapq.heappop(ready)
        d = device[row]
        if not memory.take(d, row):
            heapq.heappush(short[2 * d + is_forward[row]], (soonest[row], row))
        else:
            order.append(row)
            for other, hop in behind[row]:
                missing[other] -= 1
                soonest[other] = max(soonest[other], now + lasts[row] + hop)
                if not missing[other]:
                    heapq.heappush(ready, (soonest[other], other))
            for queue in short[2 * d : 2 * d + 2]:
                if queue:  # the first in line tries again after each op
                    heapq.heappush(ready, (max(queue[0][0], now), heapq.heappop(queue)[1]))
        if not ready:
            for queue in short:
                ready += [(max(now, at), row) for at, row in queue if memory.fits(device[row], row)]
                queue[:] = [(at, row) for at, row in queue if not memory.fits(device[row], row)]
            heapq.heapify(ready)
    if len(order) < len(leads):
        raise LookupError("none of the ops that are left fits")
    return _in_order(schedule, np.array(order))


class _Memory:
    """What devices and their hosts have left, and what each row takes and frees."""

    def __init__(self, compiled: CompiledSchedule) -> None:
        effects, costs = compiled.effects, compiled.problem.costs
        self._takes: list[list[int]] = np.column_stack([effects.takes, effects.takes_on_host]).tolist()
        self._frees: list[list[int]] = np.column_stack([effects.frees, effects.frees_on_host]).tolist()
        self._left: list[int] = costs.activation_budget.tolist()
        self._host_left: list[int] = costs.host_memory.tolist()

    def fits(self, d: int, row: int) -> bool:
        takes, on_host = self._takes[row]
        return takes <= self._left[d] and on_host <= self._host_left[d]

    def take(self, d: int, row: int) -> bool:
        """Runs a row if it fits. Says whether it did."""
        if not self.fits(d, row):
            return False
        self._left[d] += self._frees[row][0] - self._takes[row][0]
        self._host_left[d] += self._frees[row][1] - self._takes[row][1]
        return True


def _in_order(schedule: Schedule, leads: Ints) -> Schedule:
    """The schedule with its ops in this order; of pairs the first is given."""
    problem, timeline = schedule.problem, schedule.timeline
    paired = timeline.table[leads, JOINED] == 1
    rows = np.repeat(leads, 1 + paired)
    rows[np.cumsum(1 + paired)[paired] - 1] += 1
    table, device = timeline.table[rows], timeline.device[rows]
    links = {
        link: Program(table[of_kinds(table, *HOST_LINK) & np.isin(device, sharers)])
        for link, sharers in problem.shared_links.items()
    }
    programs = tuple(Program(table[device == d]) for d in range(len(problem.devices)))
    return replace(schedule, programs=programs, links={link: order for link, order in links.items() if len(order)})


# What may come before a row, the row itself, and what may come after it, in this order.
DROP, RESTORE, ROW, OFFLOAD = range(4)
# A new row: at which row of the old program, as which of the above, and its columns.
New = tuple[int, int, tuple[int, int, int, int, int]]


def _relieved(schedule: Schedule) -> Schedule:
    """The schedule with more offloads and recomputes where a program holds too much, as far as they suffice."""
    problem, timeline = schedule.problem, schedule.timeline
    programs, moments = [], []
    for d, own in enumerate(slice(a, b) for a, b in pairwise(timeline.rows.begins(len(problem.devices)).tolist())):
        start, end = timeline.start[own].tolist(), timeline.end[own].tolist()
        new = _Relief(schedule.compiled, d, own, start, end).new_rows()
        rows = sorted([*((i, ROW, row) for i, row in enumerate(map(tuple, timeline.table[own].tolist()))), *new])
        programs.append(Program(np.array([row for *_, row in rows], dtype=np.int32).reshape(-1, 5)))
        now = 0.0
        for n, (i, what, row) in enumerate(rows):
            if row[KIND] in HOST_LINK:
                now = max(now, end[i] if what == OFFLOAD else start[i])
                moments.append((now, d, n, row))
    links = {}
    for link, sharers in problem.shared_links.items():
        order = [row for _, d, _, row in sorted(moments) if d in sharers]
        if order:
            links[link] = Program(np.array(order, dtype=np.int32))
    return replace(schedule, programs=tuple(programs), links=links)


@dataclass(slots=True)
class _Stay:
    """An activation that stays from its forward to its backward, by rows, and its parts, the next to leave last."""

    stage: int
    microbatch: int
    forward: int
    backward: int
    parts: list[int]


class _Relief:
    """One device's program by rows, and what is held during each: `own` are its rows in the schedule."""

    def __init__(self, compiled: CompiledSchedule, d: int, own: slice, start: list[float], end: list[float]) -> None:
        problem, rows = compiled.problem, compiled.rows
        self.problem, self.table, self.start, self.end = problem, rows.table[own], start, end
        self.ms: list[list[float]] = problem.costs.ms.tolist()
        self.limit, self.host_limit = problem.devices[d].activation_budget_bytes, int(problem.costs.host_memory[d])
        self.during, self.hosted = compiled.held.during[own].copy(), compiled.held.on_host[own].copy()
        self.leads = ~rows.second[own]
        self.lead = (np.arange(len(self.table)) - rows.second[own]).tolist()  # a pair's first row
        self.last = (np.arange(len(self.table)) + (self.table[:, JOINED] == 1)).tolist()
        self.effects = Effects(problem)
        self.size = self.effects.parts

    def new_rows(self) -> list[New]:
        """The offloads and recomputes that bring each row below the limit, as far as there are any."""
        new: list[New] = []
        coming = sorted(self._stays(), key=lambda stay: -stay.forward)
        held: list[_Stay] = []
        for i in np.flatnonzero((self.during > self.limit) & self.leads).tolist():
            while coming and coming[-1].forward < i:
                held.append(coming.pop())
            held = [stay for stay in held if stay.backward > i]
            while self.during[i] > self.limit and held:
                ways = [
                    (*self._waits(i, stay, recompute), n, recompute)
                    for n, stay in enumerate(held)
                    for recompute in self._means(stay)
                ]
                if not ways:
                    break
                *_, n, recompute = min(ways)
                new += self._recomputed(held[n]) if recompute else self._offloaded(i, held[n])
                if not held[n].parts:
                    del held[n]
        return new

    def _stays(self) -> Iterator[_Stay]:
        at = {(kind, s, j): i for i, (kind, s, j) in reversed(list(enumerate(self.table[:, :PART].tolist())))}
        for (kind, s, j), i in at.items():
            if kind == Kind.F and not any((away, s, j) in at for away in (Kind.O, Kind.C, Kind.E)):
                backward = next((self.lead[at[b, s, j]] for b in BACKWARD if (b, s, j) in at), None)
                if backward is None:
                    raise ScheduleError(f"stage {s}, micro-batch {j} has no backward")
                yield _Stay(s, j, i, backward, list(range(len(self.size[s])))[::-1])

    def _means(self, stay: _Stay) -> Iterator[bool]:
        """The ways in which an activation can go: by offload (False), by recompute (True)."""
        stage, whole = self.problem.stages[stay.stage], len(stay.parts) == len(self.size[stay.stage])
        if stage.can_offload and stay.parts:
            size = self.size[stay.stage][stay.parts[-1]]
            if int(self.hosted[stay.forward : stay.backward + 1].max()) + size <= self.host_limit:
                yield False
        if stage.can_recompute and whole:
            yield True

    def _waits(self, i: int, stay: _Stay, recompute: bool) -> tuple[float, float]:
        """About how long compute stands still, or computes again, if the activation is away during a row. Then, to
        decide between equals: the later it is needed, the better."""
        needed = self.start[stay.backward]
        if recompute:
            return self.ms[Kind.C][stay.stage], -needed
        out = self.end[stay.forward] + self.ms[Kind.O][stay.stage] - self.start[i]
        back = self.ms[Kind.R][stay.stage] - (needed - self.end[i])
        return max(0.0, out) + max(0.0, back), -needed

    def _offloaded(self, i: int, stay: _Stay) -> list[New]:
        """The next part leaves after the forward, is gone before row i and, if memory allows, back so early that the
        reload ends in time."""
        s, j, p = stay.stage, stay.microbatch, stay.parts.pop()
        size, soon = self.size[s][p], self.start[stay.backward] - EARLY * self.ms[Kind.R][s]
        back = stay.backward
        while (
            (before := self.lead[back - 1]) > i
            and self.start[before] >= soon
            and (self.during[before:back] <= self.limit).all()
        ):
            back = before
        self.during[i:back] -= size
        self.hosted[stay.forward : stay.backward + 1] += size
        ops = ((self.last[stay.forward], OFFLOAD, Kind.O), (i, DROP, Kind.D), (back, RESTORE, Kind.R))
        return [(row, what, (int(kind), s, j, p, 0)) for row, what, kind in ops]

    def _recomputed(self, stay: _Stay) -> list[New]:
        """Only the checkpoint stays, until right before the backward."""
        stay.parts.clear()
        _, frees = self.effects.recomputed
        freed = frees[Kind.F, stay.stage] - self.effects.frees[Kind.F, stay.stage]
        self.during[self.last[stay.forward] + 1 : stay.backward] -= freed
        return [(stay.backward, RESTORE, (int(Kind.C), stay.stage, stay.microbatch, 0, 0))]
