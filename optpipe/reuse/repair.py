"""`repair`: a schedule that was made for other figures becomes one of this problem, in its old order.

Times may drift as they like: programs are re-timed. Where ops need more memory than there is now, they wait for what
makes room, and what needs them waits with them. Rules make shorter schedules for less memory (`by_rules`), but do not
suit all problems.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

import numpy as np

from optpipe.errors import OptPipeError
from optpipe.evaluate.compiled import CompiledSchedule
from optpipe.evaluate.graph import ISSUED
from optpipe.model.arrays import Ints, Table
from optpipe.model.ops import OPTIMIZER, Kind
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, KIND, MICROBATCH, PART, STAGE
from optpipe.schedule import Schedule, check


def repair(problem: Problem, schedule: Schedule) -> Schedule | None:
    """Turns a schedule into a valid one of this problem.

    Parameters
    ----------
    schedule
        Of any problem with the same stages, placement and number of micro-batches.

    Returns
    -------
    None if the order does not suffice.
    """
    try:
        possible = _only_possible_ops(problem, schedule)
        if not check(problem, possible):
            return possible
        replayed = _in_order(possible, _Replay(possible.compiled).run())
        return None if check(problem, replayed) else replayed
    except (OptPipeError, LookupError):  # it is of other stages, or ops wait for each other or for memory
        return None


def _only_possible_ops(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule without the offloads, recomputes, updates and pairs that the problem does not have; in place of a
    level that a stage does not have, by its last one. Raises ScheduleError if the stages are others."""
    costs, level_of = problem.costs, schedule.compiled.index.level

    def possible(table: Table) -> Table:
        kind, stage, part = table[:, KIND], table[:, STAGE], table[:, PART]
        offloaded, dropped, again = np.isin(kind, [Kind.O, Kind.R]), kind == Kind.D, kind == Kind.C
        level = np.minimum(level_of[stage, table[:, MICROBATCH]], costs.levels.count[stage] - 1)
        can_offload = costs.can_offload[stage]
        if costs.can_recompute.any():
            can_offload = np.where(level >= 0, costs.levels.can_offload[level, stage], can_offload)
        leaves = can_offload | (dropped & costs.can_evict[stage]) | ~(offloaded | dropped)
        kept = leaves & np.where(again, level >= 0, part < costs.parts[stage])
        kept &= costs.can_update[stage] | ~np.isin(kind, list(OPTIMIZER))
        table = table[kept]
        table[again[kept], PART] = level[kept & again]
        if problem.overlap_factor is None:
            table[:, JOINED] = 0
        return table

    links = {link: order for link, order in schedule.links.items() if link in problem.shared_links}
    reduced = Schedule(problem, schedule.programs, links, schedule.method).with_tables(possible)
    _ = reduced.compiled.rows  # raises if the stages are others
    return reduced


class _Replay:
    """Runs all ops once more in the order of their starts, as far as memory lets them.

    All programs and links keep the one order in which ops are let through, so they cannot deadlock. Rows are those of
    the compiled schedule; of a pair the first row stands for both.
    """

    def __init__(self, compiled: CompiledSchedule) -> None:
        self._leads = np.flatnonzero(~compiled.rows.second)
        timeline, effects, costs = compiled.timeline, compiled.effects, compiled.problem.costs
        self._soonest: list[float] = timeline.start.tolist()
        self._duration: list[float] = (timeline.end - timeline.start).tolist()
        self._device: list[int] = compiled.rows.device.tolist()
        self._is_forward: list[bool] = compiled.rows.of_kinds(Kind.F).tolist()
        # Bytes on the device and in host memory: what each row takes and frees, and what each device has left.
        self._takes: list[list[int]] = np.column_stack([effects.takes, effects.takes_on_host]).tolist()
        self._frees: list[list[int]] = np.column_stack([effects.frees, effects.frees_on_host]).tolist()
        self._left: list[list[int]] = np.column_stack([costs.activation_budget, costs.host_memory]).tolist()
        self._ready: list[tuple[float, int]] = []
        # Rows that lack memory, by device, what restores activations apart from forwards: the soonest first.
        self._short: list[list[tuple[float, int]]] = [[] for _ in range(2 * len(self._left))]
        self._read_needs(compiled)

    def _read_needs(self, compiled: CompiledSchedule) -> None:
        """What each row needs, but for the order of programs and streams: that is what changes."""
        waits, delays = compiled.waits
        needs = [column for column in range(waits.shape[1] - 1) if column % 4 != ISSUED]
        needed, delay_ms = waits[self._leads][:, needs], delays[self._leads][:, needs]
        self._dependants: dict[int, list[tuple[int, float]]] = defaultdict(list)
        self._missing = [0] * len(self._soonest)
        for lead, column in np.argwhere(needed >= 0).tolist():
            row = int(self._leads[lead])
            self._dependants[needed[lead, column]].append((row, float(delay_ms[lead, column])))
            self._missing[row] += 1

    def run(self) -> Ints:
        """The order in which ops are let through. Raises LookupError if all that is left waits for memory."""
        order = []
        self._ready = [(self._soonest[row], row) for row in self._leads.tolist() if not self._missing[row]]
        heapq.heapify(self._ready)
        while self._ready:
            now, row = heapq.heappop(self._ready)
            if self._fits(row):
                order.append(row)
                self._let_through(row, now)
            else:
                queue = self._short[2 * self._device[row] + self._is_forward[row]]
                heapq.heappush(queue, (self._soonest[row], row))
            if not self._ready:
                self._retry_all(now)
        if len(order) < len(self._leads):
            raise LookupError("none of the ops that are left fits")
        return np.array(order)

    def _fits(self, row: int) -> bool:
        return all(take <= left for take, left in zip(self._takes[row], self._left[self._device[row]], strict=True))

    def _let_through(self, row: int, now: float) -> None:
        device = self._device[row]
        for where in range(2):
            self._left[device][where] += self._frees[row][where] - self._takes[row][where]
        for dependant, delay_ms in self._dependants[row]:
            self._missing[dependant] -= 1
            self._soonest[dependant] = max(self._soonest[dependant], now + self._duration[row] + delay_ms)
            if not self._missing[dependant]:
                heapq.heappush(self._ready, (self._soonest[dependant], dependant))
        for queue in self._short[2 * device : 2 * device + 2]:
            if queue:  # the first in line tries again after each op
                soonest, short = heapq.heappop(queue)
                heapq.heappush(self._ready, (max(soonest, now), short))

    def _retry_all(self, now: float) -> None:
        """Nothing is ready: let all that fits try again, not only those first in line."""
        for queue in self._short:
            self._ready += [(max(now, soonest), row) for soonest, row in queue if self._fits(row)]
            queue[:] = [(soonest, row) for soonest, row in queue if not self._fits(row)]
        heapq.heapify(self._ready)


def _in_order(schedule: Schedule, leads: Ints) -> Schedule:
    """The schedule with its ops in this order; of pairs the first is given."""
    timeline = schedule.timeline
    paired = timeline.table[leads, JOINED] == 1
    rows = np.repeat(leads, 1 + paired)
    rows[np.cumsum(1 + paired)[paired] - 1] += 1
    return Schedule.in_order(schedule.problem, timeline.table[rows], timeline.device[rows], schedule.method)
