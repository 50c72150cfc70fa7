"""A problem and a schedule on a grid of integers, for CP-SAT: times in ticks, sizes in grains.

Both units follow from the data. What is not whole is rounded to the safe side: up for schedules, down for bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain
from math import ceil, floor, gcd

import numpy as np

from optpipe.evaluate.effects import Effects, Holding
from optpipe.evaluate.objective import Objective
from optpipe.model.arrays import NONE, Flags, Table
from optpipe.model.costs import FORWARDS, GRADIENTS
from optpipe.model.ops import COMPUTE, Kind, Op
from optpipe.model.problem import Problem
from optpipe.model.program import MICROBATCH, PART, STAGE
from optpipe.model.rules import EVICTED
from optpipe.schedule import Schedule
from optpipe_solver.exact import common_step_ms, exact, serial_ms, with_times
from optpipe_solver.heuristics import generate
from optpipe_solver.incumbents import Incumbents
from optpipe_solver.methods import HEURISTICS
from optpipe_solver.schedule_facts import (
    allocation_times,
    deliveries,
    has_only_known_ops,
    needs_fused,
    split_backwards,
    tails,
)

# Ticks that the busiest device's work on one micro-batch may last before times are rounded. With more, windows gain
# less.
FINEST = 2000
# Ticks that everything, one after the other, may last: what CP-SAT adds up stays far below 2^63.
LONGEST = 2**40
# Grains of the roomiest device before sizes are rounded.
FULL = 100_000
BACKWARDS = ((Kind.B, Kind.W), (Kind.BW,))
# The part of what is evicted, a part of the level `EVICTED`: of E, D and L on its device, of A and V on the peer.
AT_PEER = -1


def moves(part: int) -> tuple[Kind, Kind, Kind]:
    """What takes a part away, frees it and brings it back."""
    return (Kind.E, Kind.D, Kind.L) if part == AT_PEER else (Kind.O, Kind.D, Kind.R)


@dataclass(frozen=True)
class Grid:
    """A problem on a grid.

    Durations and needs of memory are rounded up, capacities down, so what fits on the grid fits. With `down` durations
    and needs are rounded down: every program of the problem fits on the grid and has no longer makespan there, so a
    bound on the grid's makespan is one on the problem's. (Not on the span: a device whose work comes sooner starts
    sooner, too.)
    """

    problem: Problem
    tick: Fraction  # in ms
    exact: bool  # whether no duration was rounded
    down: bool = False

    @classmethod
    def for_problem(cls, problem: Problem, finest: int = FINEST) -> Grid:
        """A grid on which every duration is whole, if the busiest device's work on one micro-batch then takes `finest`
        ticks at most; else a coarser one on which it takes that many."""
        unit = common_step_ms(problem)
        if not unit:
            return cls(problem, Fraction(1), exact=False)  # nothing takes any time
        busiest_ms = problem.costs.work_ms.max()  # a sum of times is a multiple of their unit, too
        busiest = round(Fraction(busiest_ms) / unit) * unit
        coarsest = max(busiest / finest, exact(serial_ms(problem)) / LONGEST)
        lasting = problem.costs.ms[[Kind.F, Kind.B, Kind.W]].all() and all(
            np.all(level.recompute_ms) for stage in problem.stages for level in stage.all_levels
        )
        return cls(problem, max(unit, coarsest), exact=bool(unit >= coarsest and lasting))

    @cached_property
    def relaxed(self) -> Grid:
        """The same grid for bounds."""
        return self if self.lossless else replace(self, down=True)

    @property
    def lossless(self) -> bool:
        """Whether nothing was rounded."""
        return self.exact and self.grain == max(self._common, 1)

    @cached_property
    def rounded(self) -> Problem:
        """The problem with ticks for milliseconds: what is simulated in it falls on whole ticks.

        Rounded up, compute takes a tick at least: starts give no order of ops that take no time.
        """

        def ticks(ms: Fraction, computes: bool) -> float:
            return float(floor(ms / self.tick) if self.down else max(ceil(ms / self.tick), int(computes)))

        return with_times(self.problem, ticks)

    @cached_property
    def _ticks(self) -> list[list[list[float]]]:
        """By kind, stage and micro-batch; of O and R those of a part."""
        ticks: list[list[list[float]]] = self.rounded.costs.ms.tolist()
        return ticks

    @cached_property
    def _level_ticks(self) -> dict[Kind, list[list[list[float]]]]:
        """By kind, then by level, stage and micro-batch."""
        levels = self.rounded.costs.levels
        ticks = {Kind.C: levels.recompute_ms, Kind.O: levels.offload_ms, Kind.R: levels.reload_ms}
        return {kind: ms.tolist() for kind, ms in ticks.items()}

    def duration(self, op: Op) -> int:
        """Ticks of an F, B, W, C, O, R, E or L."""
        level = op.part if op.kind == Kind.C else self.level_of_part(op.stage, op.part)
        ticks = self._ticks[op.kind] if level < 0 else self._level_ticks[op.kind][level]
        return round(ticks[op.stage][op.microbatch])

    def level_of_part(self, stage: int, part: int) -> int:
        """The level of whose checkpoint this is a part, `NONE` for a part of the activation, `EVICTED` for what is
        evicted: the parts of checkpoints are numbered after those of the activation, level after level."""
        return EVICTED if part == AT_PEER else part // self.problem.stages[stage].offload_parts - 1

    @cached_property
    def serial(self) -> int:
        """Ticks of everything that could be done, one after the other: no simulated schedule is longer."""
        return round(serial_ms(self.rounded))

    @cached_property
    def needs_fused(self) -> Flags:
        """(S,) as the function: the stages on which BW can do what B and W cannot."""
        return needs_fused(self.problem)

    def forward_delay(self, stage: int, microbatch: int) -> int:
        """Ticks of the message that a stage's forward waits for."""
        return int(self.rounded.costs.message_ms[FORWARDS, stage, microbatch])

    def gradient_delay(self, stage: int, microbatch: int) -> int:
        """Ticks of the message that a stage's backward waits for."""
        return int(self.rounded.costs.message_ms[GRADIENTS, stage, microbatch])

    def ms(self, ticks: int) -> float:
        return float(ticks * self.tick)

    def starts_ms(self, starts: dict[Op, int]) -> dict[Op, float]:
        return {op: self.ms(at) for op, at in starts.items()}

    @cached_property
    def grain(self) -> int:
        """Bytes in which memory is counted: as many as divide every level, or a small part of the roomiest device."""
        return max(self._common, self._roomiest // FULL, 1)

    @cached_property
    def _common(self) -> int:
        examples = self.problem.costs.representatives
        holdings = (
            each.bytes
            for s, stage in enumerate(self.problem.stages)
            for j in examples.tolist()
            for kinds in BACKWARDS
            for level in range(NONE, len(stage.all_levels))
            for each in self._effects.holdings(s, j, Kind.F, Kind.C, *kinds, level=level)
        )
        parts = (each[:, examples].ravel().tolist() for each in (self._effects.parts, *self._effects.parts_by_level))
        return gcd(*holdings, *chain(*parts), *self.problem.costs.evict[:, examples].ravel().tolist())

    @cached_property
    def _roomiest(self) -> int:
        return int(self.problem.costs.activation_budget.max())

    @cached_property
    def _effects(self) -> Effects:
        return Effects(self.problem)

    @cached_property
    def _parts(self) -> list[list[dict[int, int]]]:
        """By stage, then by class of micro-batches, as `parts`."""
        return [
            [self._parts_of(s, j) for j in self.problem.costs.representatives.tolist()]
            for s in range(len(self.problem.stages))
        ]

    def _parts_of(self, s: int, j: int) -> dict[int, int]:
        stage, effects, n = self.problem.stages[s], self._effects, self.problem.stages[s].offload_parts
        leaving = {0: effects.parts} if stage.can_offload else {}
        for k, level in enumerate(stage.all_levels):
            if level.can_offload:
                leaving[(1 + k) * n] = effects.parts_by_level[k]
        each = {first: nbytes[s, j, :n].tolist() for first, nbytes in leaving.items()}
        each |= {AT_PEER: [int(self.problem.costs.evict[s, j])]} if stage.can_evict else {}
        return {first + p: self._grains(size) for first, sizes in each.items() for p, size in enumerate(sizes)}

    def parts(self, stage: int, microbatch: int) -> dict[int, int]:
        """The grains of each part of an activation that can leave, or of its checkpoints, or of what can be evicted
        (`level_of_part`)."""
        return self._parts[stage][int(self.problem.costs.class_of[microbatch])]

    def holdings(self, stage: int, microbatch: int, *kinds: Kind, level: int = NONE) -> list[Holding]:
        """As `Effects.holdings`, in grains.

        What is held after F is the sum of the parts and of what stays, each rounded on its own, so that parts can come
        off it. All else is rounded on its own, too; what is more is no lower than that.
        """
        activation = self._sum_of_parts(stage, microbatch, NONE)
        after = dict([self._sum_of_parts(stage, microbatch, max(level, NONE)), activation])

        def grains(size: int) -> int:
            least = max((rounded for held, rounded in after.items() if held < size), default=0)
            return after.get(size, max(self._grains(size), least))

        holdings = self._effects.holdings(stage, microbatch, *kinds, level=level)
        return [each._replace(bytes=grains(each.bytes)) for each in holdings]

    def _sum_of_parts(self, stage: int, microbatch: int, level: int) -> tuple[int, int]:
        """The bytes after F, and their grains, each part rounded on its own; of an activation, rounded up, no fewer
        than those of any of its checkpoints. What may be evicted can come off the grains of an activation, too."""
        effects = self._effects
        (takes, frees), nbytes = (
            ((effects.takes, effects.frees), effects.parts)
            if level < 0
            else (effects.by_level[level], effects.parts_by_level[level])
        )
        held = int(takes[Kind.F, stage, microbatch] - frees[Kind.F, stage, microbatch])
        moving = {p: x for p, x in self.parts(stage, microbatch).items() if self.level_of_part(stage, p) == level}
        leaving = int(nbytes[stage, microbatch].sum()) if moving else 0
        if level == EVICTED:
            leaving = int(self.problem.costs.evict[stage, microbatch])
        rounded = sum(moving.values()) + self._grains(held - leaving)
        if level == NONE and self.problem.stages[stage].can_evict:
            evicted = self._sum_of_parts(stage, microbatch, EVICTED)[1]
            rounded = min(rounded, evicted) if self.down else max(rounded, evicted)
        if level == NONE and not self.down:
            levels = range(len(self.problem.stages[stage].all_levels))
            rounded = max(rounded, *(self._sum_of_parts(stage, microbatch, k)[1] for k in levels), rounded)
        return held, rounded

    def _grains(self, size: int) -> int:
        """More than any device has room for need not be counted further."""
        grains = size // self.grain if self.down else -(-size // self.grain)
        return min(grains, self._roomiest // self.grain + 1)

    def capacity(self, device: int) -> int:
        return self.problem.devices[device].activation_budget_bytes // self.grain

    @cached_property
    def host_capacities(self) -> list[int | None]:
        """By device, of its node, in grains; None where all that could be offloaded fits at once."""
        costs = self.problem.costs
        grains = zip(costs.host_is_scarce.tolist(), (costs.host_memory // self.grain).tolist(), strict=True)
        return [capacity if is_scarce else None for is_scarce, capacity in grains]

    @cached_property
    def links(self) -> list[tuple[tuple[Kind, ...], list[int]]]:
        """The transfers that run one at a time: their kinds, and the stages that they are of. To the host, to peers."""
        link = self.problem.costs.link
        users: list[list[int]] = [[] for _ in range(int(link.max()) + 1)]
        for s, stage in enumerate(self.problem.stages):
            if stage.can_offload or stage.can_offload_checkpoints:
                users[int(link[stage.device])].append(s)
        together: list[tuple[Kind, ...]] = (
            [(Kind.O, Kind.R)] if self.problem.transfer_mode == "half_duplex" else [(Kind.O,), (Kind.R,)]
        )
        evicting: dict[int, list[int]] = {}
        for s in np.flatnonzero(self.problem.costs.can_evict).tolist():
            evicting.setdefault(self.problem.stages[s].device, []).append(s)
        ways = [(together, stages) for stages in users if stages]
        ways += [([(Kind.E, Kind.L)], stages) for stages in evicting.values()]
        return [(kinds, stages) for each, stages in ways for kinds in each]


@dataclass(frozen=True)
class GridSchedule:
    """A schedule on the grid: ticks by op, in the order of the programs. A BW is its B and, right after it, its W."""

    start: dict[Op, int]  # of all but BW; parts are numbered as in the grid (`Grid.level_of_part`)
    allocation: dict[Op, int]  # when O, R and L allocate: at their start or, inside a compute op, before that op
    tail: dict[Op, int]  # from an op's start to the schedule's end, if all that must follow it follows at once
    fused: frozenset[tuple[int, int]]  # stage and micro-batch of each BW
    pinned: tuple[int, ...]  # by device the most grains of host memory
    delivery: tuple[int, ...]  # by device how long its compute counts after its end (`deliveries`); zeros for makespans
    end: int  # when everything has ended and is delivered: the makespan but for the span

    @property
    def length(self) -> int:
        """The makespan or the span."""
        return self.end - max(self.delivery)


def is_expressible(schedule: Schedule) -> bool:
    """Whether the models have every op of the schedule: no optimizers, no pairs, and BW only where it needs less memory
    than B and W."""
    rows = schedule.compiled.rows
    dispensable = rows.of_kinds(Kind.BW) & ~needs_fused(schedule.problem)[rows.stage]
    return has_only_known_ops(schedule) and not dispensable.any() and not len(rows.first)


def evicts(schedule: Schedule, table: Table) -> Flags:
    """Which rows of a program's table (n, 5) are of an activation that is evicted."""
    evicted: Flags = schedule.compiled.index.rows_of(Kind.E)[table[:, STAGE], table[:, MICROBATCH]] >= 0
    return evicted


def split_dispensable(schedule: Schedule) -> Schedule:
    """The same schedule with B and W, one after the other, for every BW that needs no less memory than they do."""
    return split_backwards(schedule, keep=needs_fused(schedule.problem))


def place_on_grid(grid: Grid, schedule: Schedule, objective: Objective = "makespan") -> GridSchedule:
    """Times a schedule that `is_expressible` on the grid. Raises what `simulate` raises."""
    schedule = replace(schedule, problem=grid.rounded)
    timeline = schedule.timeline
    table = timeline.table.copy()
    rows, costs = timeline.rows, grid.problem.costs
    moved = rows.of_kinds(Kind.O, Kind.D, Kind.R)
    parts = np.where(
        moved, (1 + schedule.compiled.index.level[rows.stage, rows.microbatch]) * costs.parts[rows.stage], 0
    )
    table[:, PART] += parts
    table[evicts(schedule, table) & ~rows.of_kinds(*COMPUTE), PART] = AT_PEER
    ops = [Op(Kind(kind), stage, microbatch, part) for kind, stage, microbatch, part, _ in table.tolist()]
    delivery = deliveries(schedule, objective)
    left_of = tails(schedule, delivery)
    end = round(float((timeline.end + delivery[timeline.device] * timeline.rows.of_kinds(*COMPUTE)).max()))
    start: dict[Op, int] = {}
    tail: dict[Op, int] = {}
    for op, begin, left in zip(ops, map(round, timeline.start.tolist()), map(round, left_of.tolist()), strict=True):
        done = 0
        for half in (op._replace(kind=Kind.B), op._replace(kind=Kind.W)) if op.kind == Kind.BW else (op,):
            start[half], tail[half] = begin + done, left - done
            done = grid.duration(half) if half.kind == Kind.B else 0
    moments, transfer = map(round, allocation_times(timeline).tolist()), timeline.rows.transfer.tolist()
    allocation = {op: min(at, end) for op, at, moving in zip(ops, moments, transfer, strict=True) if moving}
    fused = frozenset((op.stage, op.microbatch) for op in ops if op.kind == Kind.BW)
    pinned = tuple(-(-peak.bytes // grid.grain) for peak in schedule.compiled.certificate.host)
    return GridSchedule(start, allocation, tail, fused, pinned, tuple(map(round, delivery.tolist())), end)


def ensure_start(incumbents: Incumbents) -> Schedule | None:
    """The best schedule that models on a grid can express. Runs heuristics if there is none.

    The keeper keeps the best that `is_expressible`, which need not be the best of all.
    """
    if incumbents.best is not None:
        incumbents.offer(split_dispensable(incumbents.best))
    problem = incumbents.problem
    unpaired = problem.model_copy(update={"overlap_factor": None})  # the models have no pairs
    for name in reversed(HEURISTICS):
        if incumbents.best_of(is_expressible) is None:
            schedule = generate(name, unpaired, incumbents.objective)
            incumbents.offer(split_dispensable(replace(schedule, problem=problem)))
    return incumbents.best_of(is_expressible)
