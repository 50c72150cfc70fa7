"""The variables of OptPipe's program, its units of bytes, and a start for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations, product
from math import gcd

import numpy as np

from optpipe.evaluate.effects import Effects
from optpipe.lift import TOLERANCE_MS
from optpipe.model.arrays import Ints
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe.options import Triangles
from optpipe.schedule import Schedule
from optpipe_solver.milp.paths import (
    COMPUTE,
    WHOLE,
    Activation,
    LongestPaths,
    MicrobatchOrder,
    compute_ops,
    equal_microbatches,
)
from optpipe_solver.milp.reading import Interval, Reading, Window
from optpipe_solver.milp.rows import FALSE, TRUE, Literal, Rows, Span

MIB = 2**20
LEAK = 1e-7  # of a row's coefficients: more than tolerances of the row and of its binaries let through
Orders = dict[tuple[Activation, Activation], Literal]  # by two activations: whether the first comes before the second


@dataclass(frozen=True)
class Switches:
    """The practical steps of section 4.1, each of which can be left out, so that what it is worth can be measured.

    The default is all on, as the solver uses them; `WITHOUT_STEPS` is the program of Appendix C, corrected. None
    changes the optimum but `order`, where activations can leave (see `model`).
    """

    order: MicrobatchOrder = "stages"
    """Eq. 1: micro-batches in any order, or in the order of their numbers where they enter the pipeline (which loses
    nothing), or in that order in all stages."""
    one_per_pair: bool = True
    """Eq. 1, second line: one variable a pair, the other order being its negation; else two whose sum is one."""
    determined: bool = True
    """Figure 3: no variable where an order follows from others, or where nothing else fits into the horizon."""
    triangles: Triangles = "compute"
    """Section 4.1.2: no cycle of three; of compute ops, or of all that have an order."""
    warm_start: bool = True
    """Section 4.1.3: start from a schedule, and cut off longer ones."""
    tight: bool = True
    """Each row's big-M as small as the variables' bounds allow, instead of one constant for all."""
    workload: bool = True
    """Not of the paper: an op waits for all work of its device that precedes it, and no schedule beats the trivial
    bound."""


ALL = Switches()
WITHOUT_STEPS = Switches(
    "none", one_per_pair=False, determined=False, triangles="none", warm_start=False, tight=False, workload=False
)


@dataclass(frozen=True)
class Units:
    """Bytes counted in units: the greatest common divisor of all sizes where rows in it hold exactly, in spite of
    solvers' tolerances; else MiB.

    What an activation holds from one op to the next is rounded on its own, up for schedules, with `down` down for
    bounds; limits are rounded down. So rounded up, what fits in units fits in bytes. Rounded down, what fits in bytes
    fits in units: sums of rounded sizes are no larger than the limit, and whole.
    """

    problem: Problem
    down: bool = False
    level: Mapping[tuple[int, int], int] = field(default_factory=dict)  # by which activations are recomputed

    @cached_property
    def unit(self) -> int:
        total = sum(int(self._effects.takes[op[:3]]) for op in compute_ops(self.problem))
        return self._common if total * LEAK < self._common else MIB

    @property
    def lossless(self) -> bool:
        """Whether no size is rounded."""
        return self._common % self.unit == 0

    @cached_property
    def _effects(self) -> Effects:
        return Effects(self.problem)

    @cached_property
    def _common(self) -> int:
        costs, effects = self.problem.costs, self._effects
        tables = chain((effects.takes, effects.frees), *effects.by_level if costs.can_recompute.any() else ())
        of_compute = (table[[*COMPUTE, Kind.C]] for table in tables)
        leaving = effects.parts, *(effects.parts_by_level if costs.can_recompute.any() else ())
        return max(1, gcd(*(int(size) for sizes in (*leaving, *of_compute) for size in np.unique(sizes))))

    def round(self, size: int) -> int:
        return size // self.unit if self.down else -(-size // self.unit)

    def takes_and_leaves(self, op: Op) -> tuple[int, int]:
        """What an F, B or W takes at its start, and Δ, what it leaves more than it found; it may be negative."""
        takes, frees = self._table(op.stage, op.microbatch)
        held = before = 0
        for kind in (Kind.F, Kind.C, Kind.B, Kind.W):
            before, during = held, held + int(takes[kind, op.stage, op.microbatch])
            held = during - int(frees[kind, op.stage, op.microbatch])
            if kind == op.kind:
                break
        return self.round(during) - self.round(before), self.round(held) - self.round(before)

    def offloaded(self, a: Activation) -> int:
        """Γ: what the activation holds less while it is away."""
        s, j, part = a
        takes, frees = self._table(s, j)
        level, held = self.level.get((s, j)), int(takes[Kind.F, s, j] - frees[Kind.F, s, j])
        parts = (self._effects.parts if level is None else self._effects.parts_by_level[level])[s, j]
        if part != WHOLE:
            return int(parts[part]) // self.unit
        return self.round(held) - self.round(held - int(parts.sum()))

    def _table(self, stage: int, microbatch: int) -> tuple[Ints, Ints]:
        level = self.level.get((stage, microbatch))
        return (self._effects.takes, self._effects.frees) if level is None else self._effects.by_level[level]


class Variables:
    """The variables of a model, and the rows that they are part of. Times are `paths.scale` × ms.

    Compute ops have numbers (`paths.number`). Activations are those that can leave. docs/milp.md has a table of the
    variables; their letters here are the paper's, but for A and X. With a `window` what that leaves as it is has no
    variable.
    """

    def __init__(
        self, problem: Problem, paths: LongestPaths, switches: Switches, rows: Rows, window: Window | None = None
    ) -> None:
        self._window = window
        self.problem, self.costs, self.paths, self.rows = problem, problem.costs, paths, rows
        self.order, self._one_per_pair = switches.order, switches.one_per_pair
        earliest, latest = paths.head + paths.time, paths.horizon - paths.tail + paths.time
        # E, by op.
        self.end = [rows.new_variable(low, max(low, high)) for low, high in zip(earliest, latest, strict=True)]
        # C.
        self.length = rows.new_variable(0.0, paths.horizon)
        stages = stages_that_may_offload(problem)
        self.level, moved = (window.reading.level, window.reading.offload) if window else ({}, {})
        self.activations: list[Activation] = [
            a
            for kind, s, j, _ in paths.ops
            for a in ((s, j, part) for part in (range(self.costs.parts[s]) if window else (WHOLE,)))
            if kind == Kind.F
            and (a in moved or (s in stages and a[:2] not in self.level and (window is None or window.touches(a))))
        ]
        self._on_link: dict[int, list[Activation]] = {}
        for a in self.activations:
            self._on_link.setdefault(int(self.costs.link[self.costs.device[a[0]]]), []).append(a)
        # P, by two ops of a device.
        self.op_before: dict[tuple[int, int], Literal] = {}
        # W.
        self.offloaded: dict[Activation, Literal] = {}
        # O, R, A.
        self.offload_start, self.reload_start, self.reload_allocation = (dict[Activation, int]() for _ in range(3))
        # K, L, H, by two activations of a link.
        self.offload_before, self.reload_before, self.offload_before_reload = (Orders() for _ in range(3))
        # M, N, by activation and op of its device; M only of ops that take memory.
        self.drop_before, self.return_before = (dict[tuple[Activation, int], Literal]() for _ in range(2))
        # X, by two activations of a device.
        self.away_at_reload = Orders()
        self._create_compute_orders()
        self._create_transfers()
        self._create_link_orders()

    # --- new variables

    def new_order(self) -> tuple[Literal, Literal]:
        """Eq. 1, second line: whether one precedes the other, and whether the other precedes the one: exactly one of
        both."""
        first = self.rows.new_literal()
        if self._one_per_pair:
            return first, ~first
        second = self.rows.new_literal()
        self.rows.add_clause(first, second)
        self.rows.add_clause(~first, ~second)
        return first, second

    def _stays(self, *activations: Activation, op: Op | None = None) -> Reading | None:
        """What decides of these activations, and of their places beside an op: the schedule, unless that is free."""
        window = self._window
        return window.reading if window and op not in window.free and not window.touches(*activations) else None

    def _literal(self, truth: bool | None) -> Literal:
        """What is known, or a new variable."""
        return self.rows.new_literal() if truth is None else TRUE if truth else FALSE

    def _create_compute_orders(self) -> None:
        """No variable where the order is fixed. As the k-th W of a stage can always be the W of its k-th B (what all Ws
        of a stage free is equal), Ws follow the order of their Bs where an order is fixed at all."""
        paths = self.paths
        for x, y in combinations(range(len(paths.ops)), 2):
            if paths.device[x] != paths.device[y]:
                continue
            first, second = paths.ops[x], paths.ops[y]
            if paths.precedes(x, y):
                order = TRUE, FALSE
            elif paths.precedes(y, x):
                order = FALSE, TRUE
            elif (
                self.order != "none"
                and first.kind == second.kind == Kind.W
                and first.stage == second.stage
                and self._are_equal(first.microbatch, second.microbatch)
            ):
                b, c = paths.number[first._replace(kind=Kind.B)], paths.number[second._replace(kind=Kind.B)]
                order = self.op_before[b, c], self.op_before[c, b]
            else:
                order = self.new_order()
            self.op_before[x, y], self.op_before[y, x] = order

    def _create_transfers(self) -> None:
        """The transfer of what stays has no length and must not be in the way: it may lie anywhere up to the horizon,
        or before B where its neighbours on the link are before theirs."""
        for a in self.activations:
            self.offloaded[a] = self._literal(self._stays(a) and True)
            F, B = self.number(Kind.F, a), self.number(Kind.B, a)
            low, high = self.rows.lower[self.end[F]], self.paths.horizon
            if self.keeps_place(a):
                high = max(low, self.rows.upper[self.end[B]] - self.paths.time[B])
            for moments in (self.offload_start, self.reload_start, self.reload_allocation):
                moments[a] = self.rows.new_variable(low, high)

    def _create_link_orders(self) -> None:
        """Each way of a link has an order of its own if it is full duplex."""
        for a, b in chain.from_iterable(combinations(each, 2) for each in self._on_link.values()):
            for order, kind in ((self.offload_before, Kind.O), (self.reload_before, Kind.R)):
                if self.keep_order(a, b) or self.is_over_before(a, b):
                    order[a, b], order[b, a] = TRUE, FALSE
                elif self.keep_order(b, a) or self.is_over_before(b, a):
                    order[a, b], order[b, a] = FALSE, TRUE
                elif stays := self._stays(a, b):
                    order[a, b] = self._literal(stays.moved[kind][a] < stays.moved[kind][b])
                    order[b, a] = self._literal(stays.moved[kind][b] < stays.moved[kind][a])
                else:
                    order[a, b], order[b, a] = self.new_order()
        for a, b in self.offload_before if self.problem.transfer_mode == "half_duplex" else ():
            if not (self.keep_order(a, b) or self.is_over_before(a, b) or self.is_over_before(b, a)):
                stays = self._stays(a, b)
                self.offload_before_reload[a, b] = self._literal(stays and stays.offload[a] < stays.reload[b])

    def create_away_literals(self, ops: list[int], leaving: list[Activation], takes: list[int]) -> None:
        """`drop_before` and `return_before` of a device's activations and ops, but for ops that do not run between F
        and B. `takes`: by op the memory that it takes."""
        for a, y in product(leaving, ops):
            F, B = self.number(Kind.F, a), self.number(Kind.B, a)
            before_forward = y == F or self.paths.precedes(y, F)
            after_backward = y == B or self.paths.precedes(B, y)
            if not before_forward and not after_backward:
                op = self.paths.ops[y]
                stays = self._stays(a, op=op)
                self.return_before[a, y] = self._literal(stays and stays.returns_before(a, op))
                if takes[y]:
                    self.drop_before[a, y] = self._literal(stays and stays.drops_before(a, op))

    def create_away_at_reload(self, c: Activation, b: Activation) -> Literal:
        """`away_at_reload`, unless it is fixed."""
        stays = self._stays(c, b)
        is_away = self.away_at_reload[c, b] = self._literal(stays and stays.is_away_at_reload(c, b))
        return is_away

    # --- for rows

    def number(self, kind: Kind, a: Activation) -> int:
        """The number of an activation's F, B or W; of its C for the B if it is recomputed."""
        if kind == Kind.B and a[:2] in self.level:
            return self.paths.number[Op(Kind.C, *a[:2], self.level[a[:2]])]
        return self.paths.number[Op(kind, *a[:2])]

    def transfer_span(self, kind: Kind, a: Activation) -> Span:
        """The length of an activation's transfer, all parts together or one, and whether it takes place."""
        level = self.level.get(a[:2])
        ms = self.costs.ms if level is None else self.costs.level_ms(level)
        return float(ms[kind, *a[:2]] * len(self.parts(a)) * self.paths.scale), self.offloaded[a]

    def parts(self, a: Activation) -> range:
        """The parts that move together."""
        return range(int(self.costs.parts[a[0]])) if a[2] == WHOLE else range(a[2], a[2] + 1)

    # --- fixed orders of transfers

    def keep_order(self, a: Activation, b: Activation) -> bool:
        """Whether two activations of one stage, a before b, leave in that order and come back in it. They may as well
        where the stage keeps its order in F and in B, as exchanging transfers of equal activations costs nothing."""
        return (
            a[0] == b[0]
            and a[2] == b[2]
            and self._are_equal(a[1], b[1])
            and self.level.get(a[:2]) == self.level.get(b[:2])
            and all(self.paths.precedes(self.number(kind, a), self.number(kind, b)) for kind in (Kind.F, Kind.B))
        )

    def _are_equal(self, i: int, j: int) -> bool:
        return bool(self.costs.class_of[i] == self.costs.class_of[j])

    def is_over_before(self, a: Activation, b: Activation) -> bool:
        """Whether all of a is over before b begins."""
        return self.paths.precedes(self.number(Kind.B, a), self.number(Kind.F, b))

    def keeps_place(self, a: Activation) -> bool:
        """Whether all transfers on a's link are of activations that keep their order: then that of what stays keeps its
        place, too."""
        on_link = self._on_link[int(self.costs.link[self.costs.device[a[0]]])]
        return all(a == b or self.keep_order(a, b) or self.keep_order(b, a) for b in on_link)


def stages_that_may_offload(problem: Problem) -> set[int]:
    """Stages whose activations may have to leave: they can, and their device cannot hold all that could be on it at
    once."""
    effects, wanted, classes = Effects(problem), [0] * len(problem.devices), equal_microbatches(problem)
    for route, batches in classes:
        for s in route:
            most = max((each.bytes for each in effects.holdings(s, batches[0], *COMPUTE)), default=0)
            wanted[problem.costs.device[s]] += len(batches) * most
    tight = [size > limit for size, limit in zip(wanted, problem.costs.activation_budget.tolist(), strict=True)]
    return {s for route, _ in classes for s in route if problem.costs.can_offload[s] and tight[problem.costs.device[s]]}


def assignment(v: Variables, schedule: Schedule) -> dict[int, float]:
    """The values of the binaries, by variable, in a schedule. They contradict each other if the model cannot express
    the schedule; the solver then drops them."""
    reading = Reading(schedule, v.order)
    offload, reload = dict(reading.offload), dict(reading.reload)
    _place_transfers_of_what_stays(v, reading, offload, reload)
    truths: list[tuple[Literal, bool]] = []
    compute = [reading.compute[op] for op in v.paths.ops]
    truths += ((is_before, compute[x] < compute[y]) for (x, y), is_before in v.op_before.items())
    truths += ((is_offloaded, a in reading.offload) for a, is_offloaded in v.offloaded.items())
    for orders, moved in ((v.offload_before, offload), (v.reload_before, reload)):
        for (a, b), literal in orders.items():
            if a < b and a in moved and b in moved:
                truths += [(literal, moved[a] <= moved[b]), (orders[b, a], moved[a] > moved[b])]
    for (a, b), is_before in v.offload_before_reload.items():
        if a in offload and b in reload:
            truths.append((is_before, offload[a] <= reload[b]))
    truths += ((drops, reading.drops_before(a, v.paths.ops[y])) for (a, y), drops in v.drop_before.items())
    truths += ((returns, reading.returns_before(a, v.paths.ops[y])) for (a, y), returns in v.return_before.items())
    truths += ((is_away, reading.is_away_at_reload(c, b)) for (c, b), is_away in v.away_at_reload.items())
    return {literal.var: float(literal.positive == truth) for literal, truth in truths if literal.var >= 0}


def _place_transfers_of_what_stays(
    v: Variables, reading: Reading, offload: dict[Activation, Interval], reload: dict[Activation, Interval]
) -> None:
    """The transfer of what stays takes no time and lies between two others, as early as those before it allow."""
    link = v.costs.link[v.costs.device]
    half_duplex = v.problem.transfer_mode == "half_duplex"
    for a in sorted(v.activations):
        if a in reading.offload or v.keeps_place(a):
            continue
        moment = reading.compute[Op(Kind.F, *a[:2])].end
        for moved, other_way in ((offload, reload), (reload, offload)):
            before = (moved[b] for b in v.activations if b in moved and v.keep_order(b, a))
            moment = max([moment, *(interval.end for interval in before)])
            on_stream = [*moved.items(), *(other_way.items() if half_duplex else ())]
            for start, end in sorted(x for b, x in on_stream if link[b[0]] == link[a[0]]):
                if abs(start - moment) < TOLERANCE_MS:
                    moment = start
                elif start < moment < end - TOLERANCE_MS:
                    moment = end
            moved[a] = Interval(moment, moment)
