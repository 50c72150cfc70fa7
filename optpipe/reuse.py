"""A schedule of another problem becomes one of this problem (OptPipe, section 4.2).

`adapt` takes the shorter of two ways. `by_rules` follows and changes the rules of a list scheduler: they say nothing of
single micro-batches and little of memory, so they hold for other problems where an order does not. `repair` keeps the
order: times may drift, since programs are timed again; ops that need more memory than there is now wait for what makes
room, and what needs them waits with them. It suits problems that rules do not. `resized` is a problem on other devices.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from math import inf

import numpy as np

from optpipe.dispatch.descents import LOOPS, SearchProgress, descents, rules_of_schedule
from optpipe.dispatch.simulate import Simulator
from optpipe.errors import InputError, OptPipeError
from optpipe.evaluate.compiled import CompiledSchedule
from optpipe.evaluate.graph import ISSUED
from optpipe.evaluate.jit import waits_for_compiler
from optpipe.evaluate.objective import NO_SCHEDULE_MS, Objective, length_ms
from optpipe.model.arrays import Ints, Table
from optpipe.model.ops import OPTIMIZER, Kind
from optpipe.model.placement import MOST_CHUNKS, SHAPES, Placement
from optpipe.model.problem import Problem
from optpipe.model.program import JOINED, KIND, MICROBATCH, PART, STAGE, of_kinds
from optpipe.model.rules import Rules
from optpipe.schedule import Schedule, check

log = logging.getLogger("optpipe.reuse")

METHOD = "dispatch"
MOST_REPAIRED = 12_000  # ops of a schedule that is repaired: up to a second
MOST_SIMULATED = 400_000  # ops: about 60 ms of compiled search, however many devices there are
EACH = 20  # what it costs to change rules, in ops
PER_DEVICE = 1 / 16  # by so much an op costs more for each device, all of which are looked at when one is over
EXPRESSED = set(Kind) - OPTIMIZER  # by rules


def adapt(problem: Problem, schedule: Schedule, objective: Objective = "makespan") -> Schedule | None:
    """Turns a schedule into a valid one of this problem, which may have other times, sizes and memory, and another
    number of micro-batches or of devices.

    The rules that it seems to follow are followed and changed, unless these loops are yet to be compiled on this
    machine; where stages and micro-batches are the same, its order is kept, too. How long that takes grows with
    `most_ops`, and is counted in ops, not in time.

    Returns the shortest valid schedule of these, or None. A schedule with pairs or optimizers on the host follows
    no rules: there is none for other numbers of micro-batches or devices.
    """
    listed = ordered = None
    if not waits_for_compiler(LOOPS):  # the caller's limit would be over before; a solver's process compiles them
        with suppress(OptPipeError):  # it is of other stages
            listed = by_rules(problem, schedule, objective)
            listed = None if listed is None or check(problem, listed) else listed
    if (len(schedule.problem.stages), schedule.problem.microbatches) == (len(problem.stages), problem.microbatches):
        if (ops := most_ops(problem, schedule)) <= MOST_REPAIRED:
            ordered = repair(problem, schedule)
        elif listed is None:
            log.warning("a schedule was not repaired: of %d ops, more than %d would take too long", ops, MOST_REPAIRED)
    return min(filter(None, (listed, ordered)), key=lambda each: length_ms(each, objective), default=None)


def most_ops(problem: Problem, schedule: Schedule) -> int:
    """About how many ops the schedule has, or will have when it is adapted to the problem."""
    ops = sum(map(len, schedule.programs))
    before, after = (len(each.stages) * each.microbatches for each in (schedule.problem, problem))
    return max(ops, ops * after // before)


class RulesSearch:
    """A search that can go on, from the rules that a schedule of another problem seems to follow.

    Its stages lie alike on its devices, of which there may be more or fewer; with None the search begins with rules
    that share memory among stages. `ms` is the length of the shortest schedule found; `NO_SCHEDULE_MS` where rules lead
    to none or do not express all: they have no pairs and no updates on the host.
    """

    def __init__(self, problem: Problem, schedule: Schedule | None, objective: Objective) -> None:
        programs = () if schedule is None else schedule.programs
        by_rules_only = all(
            of_kinds(each.table, *EXPRESSED).all() and not each.table[:, JOINED].any() for each in programs
        )
        self.ms = NO_SCHEDULE_MS
        self._method = METHOD if schedule is None else schedule.method
        self._best: Rules | None = None
        self._simulator, self._simulated = Simulator(problem), 0
        self._costs = round((self._simulator.ops + EACH) * (1 + PER_DEVICE * len(problem.devices)))  # of a try, in ops
        self._steps: Iterator[SearchProgress] = iter(())
        if by_rules_only and problem.costs.ms.any():
            self._steps = descents(self._simulator, objective, 0, rules_of_schedule(self._simulator, schedule))

    def go_on(self, most: int, until: float = inf) -> Schedule | None:
        """Search until so many ops are simulated in all, of which one counts for more the more devices there are.

        It ends at a moment of `time.monotonic` in any case. Returns the shortest schedule found, if any. Whether it is
        valid, its reader checks.
        """
        while self._simulated <= most and time.monotonic() < until and (step := next(self._steps, None)):
            if step.ms < self.ms:
                self._best, self.ms = step.rules, step.ms
            self._simulated += step.tried * self._costs
        return self._simulator.schedule(self._best, self._method) if self._best else None


def by_rules(
    problem: Problem, schedule: Schedule | None, objective: Objective, most: int = MOST_SIMULATED
) -> Schedule | None:
    """The shortest schedule of a `RulesSearch` that simulates so many ops."""
    return RulesSearch(problem, schedule, objective).go_on(most)


def resized(problem: Problem, devices: int) -> Problem | None:
    """Returns the pipeline on so many devices: the first and the last one stay, in between some are there once more or
    are left out, each with its stages.

    None where stages do not pass the devices in looped or V-shaped chunks, where devices share links or evict, and
    where that would be more devices or stages than a problem may have.
    """
    p, order = len(problem.devices), [stage.device for stage in problem.stages]
    chunks = len(order) // p
    apart = not problem.shared_links and all(device.peer is None for device in problem.devices)
    in_order = [list(route) for route in problem.all_routes] == [list(range(len(order)))]
    if devices < 1 or not 1 <= chunks <= MOST_CHUNKS or not in_order or not apart:
        return None
    shapes = [shape for shape in SHAPES if order == Placement(chunks=chunks, shape=shape).along(range(p))]
    if not shapes:
        return None
    like = np.rint(np.linspace(0, p - 1, devices)).astype(int).tolist()
    on = Placement(chunks=chunks, shape=shapes[0]).along(range(devices))
    stages = [problem.stages[c * p + k] for c in range(chunks) for k in like]
    try:
        return problem.replace(
            devices=tuple(problem.devices[d] for d in like),
            stages=tuple(stage.model_copy(update={"device": d}) for stage, d in zip(stages, on, strict=True)),
            routes=None,
            layers=None,
        )
    except InputError:
        return None


def repair(problem: Problem, schedule: Schedule) -> Schedule | None:
    """Turns a schedule into a valid one of this problem, which has the same stages, placement and number of
    micro-batches, in its old order. Returns None if the order does not suffice."""
    try:
        possible = _only_possible_ops(problem, schedule)
        if not check(problem, possible):
            return possible
        leads = _Replay(possible.compiled).run()
        timeline = possible.timeline
        paired = timeline.table[leads, JOINED] == 1
        rows = np.repeat(leads, 1 + paired)
        rows[np.cumsum(1 + paired)[paired] - 1] += 1
        replayed = Schedule.in_order(problem, timeline.table[rows], timeline.device[rows], possible.method)
        return None if check(problem, replayed) else replayed
    except (OptPipeError, LookupError):  # it is of other stages, or ops wait for each other or for memory
        return None


def _only_possible_ops(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule without what the problem does not have; by its last level in place of one that a stage does not
    have. Raises ScheduleError if the stages are others."""
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
        # What each row needs, but for the order of programs and streams: that is what changes.
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
            if not self._ready:  # all that fits tries again, not only those first in line
                for queue in self._short:
                    self._ready += [(max(now, soonest), row) for soonest, row in queue if self._fits(row)]
                    queue[:] = [(soonest, row) for soonest, row in queue if not self._fits(row)]
                heapq.heapify(self._ready)
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
