"""The periodic pattern (modulo scheduling): K micro-batches repeat with period T, solved by CP-SAT for a fixed T.

Each op x of the pattern has a start s_x in its micro-batch's own time, 0 at the first forward; its copy n periods later
runs at s_x + n·T. Each device has a frame of its own, which begins with its first forward: s_x = frame + r_x + q_x·T
with 0 ≤ r_x < T. Since that forward is not interrupted, no compute op reaches over the frame's edge, and compute is an
ordinary sequence in [0, T). Memory at r is then a sum over the events e that change it: Σ_e δ_e·(−q_e + [r_e ≤ r]),
counted where something is allocated. Drops, and the points where reloads allocate, are part of that sequence: by the
program's rule for memory none lies inside a compute op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, product
from math import inf

from ortools.sat.python import cp_model

from optpipe.model.ops import COMPUTE, Kind, Op
from optpipe_solver.budget import Budget
from optpipe_solver.cpsat.grid import Grid

F, B, W, C, O, R, D = Kind.F, Kind.B, Kind.W, Kind.C, Kind.O, Kind.R, Kind.D


@dataclass(frozen=True)
class Pattern:
    """Micro-batches 0 … K-1 of a periodic schedule. Micro-batch k + n·K runs n periods later than k.

    Attributes
    ----------
    period
        In ticks.
    microbatches
        K.
    starts
        Ticks of every op.
    latency
        Ticks from the first start to the last end.
    """

    period: int
    microbatches: int
    starts: Mapping[Op, int]
    latency: int


@dataclass(frozen=True)
class Outcome:
    """What a search for a pattern ended with.

    Attributes
    ----------
    pattern
        The pattern found, None if none was.
    proven
        Whether its latency is the least or, without a pattern, whether there is none.
    """

    pattern: Pattern | None
    proven: bool


def least_period(grid: Grid, K: int) -> int:
    """The busiest device's work on K micro-batches: no pattern has a shorter period."""
    return max(1, K * max(grid.work))


def sequential_period(grid: Grid, K: int) -> int:
    """The time of K micro-batches one after the other with all their transfers: what does not fit into this period fits
    into none."""
    moved = sum(grid.duration(kind, s) * len(grid.parts[s]) for s in grid.problem.all_routes[0] for kind in (O, R))
    return K * (_chain(grid) + moved)


def _chain(grid: Grid) -> int:
    """The time of one micro-batch, all of its compute one after the other."""
    stages = grid.problem.stages
    kinds = [
        (s, kind) for s, stage in enumerate(stages) for kind in ((F, B, W, C) if stage.can_recompute else (F, B, W))
    ]
    return sum(grid.duration(kind, s) for s, kind in kinds) + 2 * len(stages) * grid.p2p


class PatternModel:
    """The model for one K and T: variables in the paper's letters, and one method for each constraint family.

    Attributes
    ----------
    start
        By op: when each F, B, W, C, O and R starts, in its micro-batch's time.
    point
        By op: when D and R change memory.
    offloaded
        By stage, micro-batch and part: whether the part is offloaded.
    recomputed
        By stage and micro-batch: whether the activation is recomputed.
    r, q
        By op of a device's sequence: where in its frame, and in which period, it starts.
    """

    def __init__(self, grid: Grid, K: int, T: int) -> None:
        self.grid, self.K, self.T = grid, K, T
        self.model = cp_model.CpModel()
        self.route = grid.problem.all_routes[0]
        self.horizon = 3 * _chain(grid) + 6 * T
        self.start: dict[Op, cp_model.IntVar] = {}
        self.point: dict[Op, cp_model.IntVar] = {}
        self.offloaded: dict[tuple[int, int, int], cp_model.IntVar] = {}
        self.recomputed: dict[tuple[int, int], cp_model.IntVar] = {}
        self.r: dict[Op, cp_model.IntVar] = {}
        self.q: dict[Op, cp_model.IntVar] = {}
        for k in range(K):
            for s in self.route:
                self._add_ops(s, k)
            self._add_messages(k)
        for d in range(len(grid.problem.devices)):
            self._add_frame(d)
            self._add_one_at_a_time(d)
            self._add_memory_capacity(d)
        for kinds, users in grid.links:
            self._add_link(kinds, users)
        self._add_symmetry_breaking()

    # --- ops and their order in a micro-batch

    def _add_ops(self, s: int, k: int) -> None:
        """F, B, W, per part O, D, R, of which all run or none, and C where no part leaves."""
        model, grid = self.model, self.grid
        for kind in (F, B, W):
            self.start[Op(kind, s, k)] = model.new_int_var(0, self.horizon, f"{s}{kind.name}{k}")
        f, b, w = (self.start[Op(kind, s, k)] for kind in (F, B, W))
        model.add(w >= b + grid.duration(B, s))
        model.add(b >= f + grid.duration(F, s))
        for p in range(len(grid.parts[s])):
            leaves = self.offloaded[s, k, p] = model.new_bool_var(f"{s}leaves{k}.{p}")
            for kind in (O, R):
                self.start[Op(kind, s, k, p)] = model.new_int_var(0, self.horizon, f"{s}{kind.name}{k}.{p}")
            for kind in (D, R):
                self.point[Op(kind, s, k, p)] = model.new_int_var(0, self.horizon, f"{s}{kind.name}point{k}.{p}")
            o, r = self.start[Op(O, s, k, p)], self.start[Op(R, s, k, p)]
            drop, reload = self.point[Op(D, s, k, p)], self.point[Op(R, s, k, p)]
            model.add(o >= f + grid.duration(F, s)).only_enforce_if(leaves)
            model.add(drop >= o + grid.duration(O, s)).only_enforce_if(leaves)
            model.add(reload >= drop)
            model.add(r >= reload)
            model.add(b >= r + grid.duration(R, s)).only_enforce_if(leaves)
        if grid.problem.stages[s].can_recompute:
            again = self.recomputed[s, k] = model.new_bool_var(f"{s}again{k}")
            c = self.start[Op(C, s, k)] = model.new_int_var(0, self.horizon, f"{s}C{k}")
            model.add(c >= f + grid.duration(F, s)).only_enforce_if(again)
            model.add(b >= c + grid.duration(C, s)).only_enforce_if(again)
            for p in range(len(grid.parts[s])):
                model.add_implication(self.offloaded[s, k, p], ~again)

    def _add_messages(self, k: int) -> None:
        """Forwards down the route, input gradients up."""
        for s, t in pairwise(self.route):
            delay = self.grid.delay(s, t)
            self.model.add(self.start[Op(F, t, k)] >= self.start[Op(F, s, k)] + self.grid.duration(F, s) + delay)
            self.model.add(self.start[Op(B, s, k)] >= self.start[Op(B, t, k)] + self.grid.duration(B, t) + delay)

    # --- the sequence of each device

    def _add_frame(self, d: int) -> None:
        """s_x = frame + r_x + q_x·T for the device's compute ops and points."""
        own = self._sequence(d)
        if not own:
            return
        frame = self.start[own[0]]
        most = self._most_periods
        for x in own:
            at = self.point[x] if x in self.point else self.start[x]
            self.r[x] = self.model.new_int_var(0, self.T - self._duration(x), f"r{x}")
            self.q[x] = self.model.new_int_var(-most, most, f"q{x}")
            self.model.add(at == frame + self.r[x] + self.T * self.q[x])
        self.model.add(self.r[own[0]] == 0)
        self.model.add(self.q[own[0]] == 0)

    @property
    def _most_periods(self) -> int:
        """No two copies within the horizon are more periods apart."""
        return self.horizon // self.T + 1

    def _sequence(self, d: int) -> list[Op]:
        """A device's compute ops and points; its first forward comes first."""
        stages = [s for s in self.route if self.grid.problem.stages[s].device == d]
        return [
            *(Op(kind, s, k) for kind in (F, B, W) for s in stages for k in range(self.K)),
            *(Op(C, *again) for again in self.recomputed if again[0] in stages),
            *(Op(kind, *leaving) for leaving in self.offloaded if leaving[0] in stages for kind in (D, R)),
        ]

    def _add_one_at_a_time(self, d: int) -> None:
        """Compute ops one after the other, no point inside one; `before[x, y]` says who comes first in the frame."""
        model, own = self.model, self._sequence(d)
        self.before: dict[tuple[Op, Op], cp_model.LiteralT] = {}
        for x, y in combinations(own, 2):
            first = model.new_bool_var(f"{x}<{y}")
            self.before[x, y], self.before[y, x] = first, ~first
            there = [self._presence(z) for z in (x, y)]
            model.add(self.r[x] + self._duration(x) <= self.r[y]).only_enforce_if(first, *there)
            model.add(self.r[y] + self._duration(y) <= self.r[x]).only_enforce_if(~first, *there)
        compute = [x for x in own if x.kind in COMPUTE]
        model.add_no_overlap(
            [
                model.new_optional_fixed_size_interval_var(self.r[x], self._duration(x), self._presence(x), f"{x}")
                for x in compute
            ]
        )

    def _duration(self, x: Op) -> int:
        return self.grid.duration(x.kind, x.stage) if x.kind in COMPUTE else 0

    def _presence(self, x: Op) -> cp_model.LiteralT:
        """Whether x takes place: a literal, or True."""
        if x.kind == C:
            return self.recomputed[x.stage, x.microbatch]
        return True if x.kind in COMPUTE else self.offloaded[x.stage, x.microbatch, x.part]

    def _add_memory_capacity(self, d: int) -> None:
        """At every op that allocates, the copies alive fit."""
        own = self._sequence(d)
        capacity = self.grid.capacity(d)
        changes = [
            (x, self._periods(x, there), start, change, there)
            for x in own
            for start, change, there in self._changes(x)
            if change
        ]
        for at in own:
            if not any(change > 0 for _, change, _ in self._changes(at)):
                continue
            level: list[cp_model.LinearExprT] = []
            for x, turns, at_start, change, there in changes:
                level.append(-change * turns)
                if x == at:
                    level.append(change if at_start else 0)
                else:
                    level.append(change * self._happened_before(x, at, there))
            self.model.add(sum(level) <= capacity).only_enforce_if(self._presence(at))

    def _changes(self, x: Op) -> list[tuple[bool, int, cp_model.LiteralT]]:
        """What x does to memory: whether at its start rather than at its end, by how many grains, and if it does."""
        if x.kind in (D, R):
            size = self.grid.parts[x.stage][x.part]
            return [(True, -size if x.kind == D else size, self._presence(x))]
        recomputed = self.recomputed.get((x.stage, x.microbatch))
        if x.kind == C:
            again = self._level_changes[x.stage, True]
            return [(start, again[C, start], recomputed) for start in (True, False)]
        changes: list[tuple[bool, int, cp_model.LiteralT]] = []
        for start in (True, False):
            stays = self._level_changes[x.stage, False][x.kind, start]
            changes.append((start, stays, True))
            if recomputed is not None:
                changes.append((start, self._level_changes[x.stage, True][x.kind, start] - stays, recomputed))
        return changes

    @cached_property
    def _level_changes(self) -> dict[tuple[int, bool], Counter[tuple[Kind, bool]]]:
        """By stage and whether it is recomputed: the grains that each op, at its start (True) or end, adds to what the
        activation holds."""
        found = {}
        for s, recomputed in product(self.route, (False, True)):
            changes = found[s, recomputed] = Counter[tuple[Kind, bool]]()
            held = 0
            kinds = (F, C, B, W) if recomputed else (F, B, W)
            for kind, ended, grains in self.grid.levels(s, *kinds, recomputed=recomputed):
                changes[kind, not ended] = grains - held
                held = grains
        return found

    def _periods(self, x: Op, there: cp_model.LiteralT) -> cp_model.LinearExprT:
        """q_x, or 0 where x does not do it."""
        if there is True:
            return self.q[x]
        periods = self.q[x]
        if self._presence(x) is True:  # x takes place all the same
            periods = self.model.new_int_var(-self._most_periods, self._most_periods, f"{x}turns")
            self.model.add(periods == self.q[x]).only_enforce_if(there)
        self.model.add(periods == 0).only_enforce_if(~there)
        return periods

    def _happened_before(self, x: Op, at: Op, there: cp_model.LiteralT) -> cp_model.LinearExprT:
        """1 where x does it, and before `at` in the frame."""
        if there is True:
            return self.before[x, at]
        both = self.model.new_bool_var(f"{x}there<{at}")
        self.model.add_bool_and(there, self.before[x, at]).only_enforce_if(both)
        self.model.add_bool_or(both, ~there, ~self.before[x, at])
        return both

    # --- links

    def _add_link(self, kinds: tuple[Kind, ...], users: list[int]) -> None:
        """Transfers one at a time: for some whole n, y starts between x's end and the start of x's next copy, less y's
        length."""
        model, T = self.model, self.T
        transfers = [Op(kind, *leaving) for leaving in self.offloaded if leaving[0] in users for kind in kinds]
        busy = [self.grid.duration(x.kind, x.stage) * self._offloaded(x) for x in transfers]
        model.add(sum(busy) <= T)
        for x, y in combinations(transfers, 2):
            n = model.new_int_var(-self._most_periods, self._most_periods, f"{x}~{y}")
            gap = self.start[y] - self.start[x] + T * n
            both = list({literal.index: literal for literal in (self._offloaded(x), self._offloaded(y))}.values())
            model.add(gap >= self.grid.duration(x.kind, x.stage)).only_enforce_if(*both)
            model.add(gap <= T - self.grid.duration(y.kind, y.stage)).only_enforce_if(*both)

    def _offloaded(self, x: Op) -> cp_model.IntVar:
        return self.offloaded[x.stage, x.microbatch, x.part]

    def _add_symmetry_breaking(self) -> None:
        """Equal parts leave in order; micro-batches enter in order, and within one period."""
        model, first = self.model, self.route[0]
        model.add(self.start[Op(F, first, 0)] == 0)
        for j, k in pairwise(range(self.K)):
            model.add(self.start[Op(F, first, j)] + self.grid.duration(F, first) <= self.start[Op(F, first, k)])
        if self.K > 1:
            model.add(self.start[Op(F, first, self.K - 1)] <= self.T)
        for s, k, p in self.offloaded:
            parts = self.grid.parts[s]
            if p and parts[p] == parts[p - 1]:
                model.add_implication(self.offloaded[s, k, p], self.offloaded[s, k, p - 1])
                for kind in (O, R):
                    model.add(self.start[Op(kind, s, k, p)] >= self.start[Op(kind, s, k, p - 1)])

    # --- the answer

    def solve(self, budget: Budget, seed: int, seconds: float = inf, below: int | None = None) -> Outcome:
        """The pattern of least latency, shorter than `below`, for so many seconds of the budget at most."""
        model = self.model
        latency = model.new_int_var(0, self.horizon if below is None else below - 1, "latency")
        for s in self.route:
            for k in range(self.K):
                model.add(latency >= self.start[Op(W, s, k)] + self.grid.duration(W, s))
        model.minimize(latency)
        solver = cp_model.CpSolver()
        budget.allot(solver, seconds)
        budget.handled(len(self.start))
        solver.parameters.random_seed = seed
        status = solver.solve(model)
        budget.ran(solver)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Outcome(None, status == cp_model.INFEASIBLE)
        starts = {x: solver.value(at) for x, at in self.start.items() if solver.value(self._presence(x))}
        return Outcome(Pattern(self.T, self.K, starts, solver.value(latency)), status == cp_model.OPTIMAL)
