"""The variables of OptPipe's program, its units of bytes, and which order of compute ops is fixed before any search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, pairwise, product
from math import gcd
from typing import Literal as OneOf

import numpy as np

from optpipe.evaluate.effects import Effects
from optpipe.evaluate.objective import TOLERANCE
from optpipe.model.arrays import Floats
from optpipe.model.ops import Kind, Op
from optpipe.model.problem import Problem
from optpipe_solver.milp.rows import FALSE, TRUE, Literal, Rows, Span

COMPUTE = (Kind.F, Kind.B, Kind.W)  # the compute ops of the model
MicrobatchOrder = OneOf["none", "entry", "stages"]
Arc = tuple[Op, Op, float]  # the second op starts that many ms after the first has ended, or later
Activation = tuple[int, int]  # stage and micro-batch
MIB = 2**20
LEAK = 1e-7  # of a row's coefficients: more than tolerances of the row and of its binaries let through
Orders = dict[tuple[Activation, Activation], Literal]  # by two activations: whether the first comes before the second


@dataclass(frozen=True)
class Switches:
    """The practical steps of section 4.1, each of which can be left out, so that what it is worth can be measured.

    The default is all on, as the solver uses them; `PLAIN` is the program of Appendix C as it stands. None changes the
    optimum but `order`, where activations can leave (see `model`).
    """

    order: MicrobatchOrder = "stages"
    """Eq. 1: micro-batches in any order, or in the order of their numbers where they enter the pipeline (which loses
    nothing), or in that order in all stages."""
    one_per_pair: bool = True
    """Eq. 1, second line: one variable a pair, the other order being its negation; else two whose sum is one."""
    determined: bool = True
    """Figure 3: no variable where an order follows from others, or where nothing else fits into the horizon."""
    triangles: OneOf["none", "compute", "all"] = "compute"
    """Section 4.1.2: no cycle of three; of compute ops, or of all that have an order."""
    warm_start: bool = True
    """Section 4.1.3: start from a schedule, and cut off longer ones."""
    tight: bool = True
    """Each row's big-M as small as the variables' bounds allow, instead of one constant for all."""
    workload: bool = True
    """Not of the paper: an op waits for all work of its device that precedes it, and no schedule beats the trivial
    bound."""


ALL = Switches()
PLAIN = Switches(
    "none", one_per_pair=False, determined=False, triangles="none", warm_start=False, tight=False, workload=False
)


def equal_microbatches(problem: Problem) -> list[tuple[tuple[int, ...], list[int]]]:
    """All micro-batches, those together that are equal, and the route that they take."""
    return [(problem.route(batches[0]), batches) for batches in problem.costs.classes]


def compute_ops(problem: Problem) -> list[Op]:
    """F, B and W of every stage that every micro-batch passes."""
    classes = equal_microbatches(problem)
    return [Op(kind, s, j) for kind in COMPUTE for route, batches in classes for s in route for j in batches]


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
        leaving = costs.offload[costs.can_offload]
        of_compute = (table[list(COMPUTE)].ravel() for table in (effects.takes, effects.frees))
        return max(1, gcd(*(int(size) for sizes in (leaving.ravel(), *of_compute) for size in np.unique(sizes))))

    def round(self, size: int) -> int:
        return size // self.unit if self.down else -(-size // self.unit)

    def takes_and_leaves(self, op: Op) -> tuple[int, int]:
        """What an F, B or W takes at its start, and Δ, what it leaves more than it found; it may be negative."""
        effects, held, before = self._effects, 0, 0
        for kind in COMPUTE:
            before, during = held, held + int(effects.takes[kind, op.stage, op.microbatch])
            held = during - int(effects.frees[kind, op.stage, op.microbatch])
            if kind == op.kind:
                break
        return self.round(during) - self.round(before), self.round(held) - self.round(before)

    def offloaded(self, a: Activation) -> int:
        """Γ: what the activation holds less while it is away."""
        held = int(self._effects.takes[Kind.F, *a] - self._effects.frees[Kind.F, *a])
        return self.round(held) - self.round(held - int(self.problem.costs.offload[a]))


def between_stages(problem: Problem) -> Iterator[Arc]:
    """Eq. 5 and 6: a forward waits for the stage before, an input gradient for the stage after, and for the message
    between two devices."""
    there, back = problem.costs.message_ms.tolist()
    for route, batches in equal_microbatches(problem):
        for j, (s, after) in product(batches, pairwise(route)):
            yield Op(Kind.F, s, j), Op(Kind.F, after, j), there[after][j]
            yield Op(Kind.B, after, j), Op(Kind.B, s, j), back[s][j]


def within_stage(problem: Problem) -> Iterator[Arc]:
    """Eq. 8: F, then B, then W."""
    for route, batches in equal_microbatches(problem):
        for s, j in product(route, batches):
            yield Op(Kind.F, s, j), Op(Kind.B, s, j), 0.0
            yield Op(Kind.B, s, j), Op(Kind.W, s, j), 0.0


def fixed_order(problem: Problem, order: MicrobatchOrder) -> Iterator[Arc]:
    """Eq. 1, first line. Equal micro-batches of a route: numbering them as they enter its first stage costs nothing.
    With "stages" every stage keeps that order in F, in B and in W. Different ones keep it only where the problem fixes
    it."""
    if problem.fixed_order:
        for r, route in enumerate(problem.all_routes):
            entering = np.flatnonzero(problem.costs.route == r).tolist()
            yield from ((Op(Kind.F, route[0], a), Op(Kind.F, route[0], b), 0.0) for a, b in pairwise(entering))
    for route, batches in equal_microbatches(problem):
        everywhere = [(kind, s) for kind in COMPUTE for s in route]
        for kind, s in {"none": [], "entry": everywhere[:1], "stages": everywhere}[order]:
            yield from ((Op(kind, s, a), Op(kind, s, b), 0.0) for a, b in pairwise(batches))


class LongestPaths:
    """Longest paths between compute ops, which fix variables and keep every big-M small. Times are `scale` × ms."""

    def __init__(
        self, problem: Problem, horizon: float, scale: float, order: MicrobatchOrder, determined: bool
    ) -> None:
        self.ops = compute_ops(problem)
        self.number = {op: x for x, op in enumerate(self.ops)}
        self.time: Floats = np.array([problem.costs.ms[op.kind, op.stage, op.microbatch] for op in self.ops]) * scale
        self.device = np.array([problem.costs.device[op.stage] for op in self.ops])
        self.horizon, self.scale = horizon, scale
        # Precedences, as `Arc` with the ops' numbers: data dependencies (Eq. 5, 6, 8), the fixed order of micro-batches
        # (Eq. 1), and what `horizon` leaves no other choice for.
        arcs = chain(between_stages(problem), within_stage(problem), fixed_order(problem, order))
        self.arcs = [(self.number[a], self.number[b], ms * scale) for a, b, ms in arcs]
        # (n, n) the least time from x's start to y's start, -inf where x need not precede y.
        self.lag: Floats = np.full((len(self.ops), len(self.ops)), -np.inf)
        for x, y, delay in self.arcs:
            self.lag[x, y] = max(self.lag[x, y], self.time[x] + delay)
        self._close_transitively()
        # (n, n) whether the model fixes that x precedes y: all that follows or, if not `determined`, what one equation
        # fixes: the arcs, and all pairs of a stage and kind that Eq. 1 orders, not neighbours only.
        if determined:
            self._add_forced_arcs()
            self.fixed = self.lag > -np.inf
        else:
            of_one_kind = np.array([[x[:2] == y[:2] for y in self.ops] for x in self.ops])
            self.fixed = of_one_kind & (self.lag > -np.inf)
            for x, y, _ in self.arcs:
                self.fixed[x, y] = True

    def precedes(self, x: int, y: int) -> bool:
        """Whether the model fixes that x precedes y."""
        return bool(self.fixed[x, y])

    @property
    def possible(self) -> bool:
        """Whether anything may fit into the horizon."""
        no_cycle = bool((self.lag.diagonal() <= 0.0).all())
        return no_cycle and float((self.head + self.tail).max()) <= self.horizon * (1 + TOLERANCE)

    @property
    def head(self) -> Floats:
        """(n,) the earliest start of each op."""
        head: Floats = np.maximum(0.0, self.lag.max(axis=0))
        return head

    @property
    def tail(self) -> Floats:
        """(n,) the least time from each op's start to the end of all that follows it."""
        tail: Floats = np.maximum(self.time, (self.lag + self.time).max(axis=1))
        return tail

    def _add_forced_arcs(self) -> None:
        """Adds pairs of ops of a device that no schedule within the horizon runs the other way round, until there are
        no more."""
        while self.possible:
            related = self.lag > -np.inf
            y_before_x = (self.head + self.time)[:, None] + self.tail[None, :]  # by y, x: the least length
            too_late = (y_before_x > self.horizon * (1 + TOLERANCE)).T
            forced = too_late & (self.device[:, None] == self.device) & ~related & ~related.T
            np.fill_diagonal(forced, False)
            pairs = np.argwhere(forced & ~forced.T).tolist()
            if not pairs:
                return
            for x, y in pairs:
                self.arcs.append((x, y, 0.0))
                self.lag[x, y] = max(self.lag[x, y], self.time[x])
            self._close_transitively()

    def _close_transitively(self) -> None:
        for k in range(len(self.ops)):
            np.maximum(self.lag, self.lag[:, k, None] + self.lag[None, k, :], out=self.lag)


class Variables:
    """The variables of a model, and the rows that they are part of. Times are `paths.scale` × ms.

    Compute ops have numbers (`paths.number`). Activations are those that can leave. docs/milp.md has a table of the
    variables; their letters here are the paper's, but for A and X.
    """

    def __init__(self, problem: Problem, paths: LongestPaths, switches: Switches, rows: Rows) -> None:
        self.problem, self.costs, self.paths, self.rows = problem, problem.costs, paths, rows
        self.order, self._one_per_pair = switches.order, switches.one_per_pair
        earliest, latest = paths.head + paths.time, paths.horizon - paths.tail + paths.time
        # E, by op.
        self.end = [rows.new_variable(low, max(low, high)) for low, high in zip(earliest, latest, strict=True)]
        # C.
        self.length = rows.new_variable(0.0, paths.horizon)
        stages = stages_that_may_offload(problem)
        self.activations: list[Activation] = [
            (op.stage, op.microbatch) for op in paths.ops if op.kind == Kind.F and op.stage in stages
        ]
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
            self.offloaded[a] = self.rows.new_literal()
            F, B = self.number(Kind.F, a), self.number(Kind.B, a)
            low, high = self.rows.lower[self.end[F]], self.paths.horizon
            if self.keeps_place(a):
                high = max(low, self.rows.upper[self.end[B]] - self.paths.time[B])
            for moments in (self.offload_start, self.reload_start, self.reload_allocation):
                moments[a] = self.rows.new_variable(low, high)

    def _create_link_orders(self) -> None:
        """Each way of a link has an order of its own if it is full duplex."""
        link = self.costs.link[self.costs.device]
        for a, b in combinations(self.activations, 2):
            if link[a[0]] != link[b[0]]:
                continue
            for order in (self.offload_before, self.reload_before):
                if self.keep_order(a, b) or self.is_over_before(a, b):
                    order[a, b], order[b, a] = TRUE, FALSE
                elif self.is_over_before(b, a):
                    order[a, b], order[b, a] = FALSE, TRUE
                else:
                    order[a, b], order[b, a] = self.new_order()
        for a, b in self.offload_before if self.problem.transfer_mode == "half_duplex" else ():
            if not (self.keep_order(a, b) or self.is_over_before(a, b) or self.is_over_before(b, a)):
                self.offload_before_reload[a, b] = self.rows.new_literal()

    def create_away_literals(self, ops: list[int], leaving: list[Activation], takes: list[int]) -> None:
        """`drop_before` and `return_before` of a device's activations and ops, but for ops that do not run between F
        and B. `takes`: by op the memory that it takes."""
        for a, y in product(leaving, ops):
            F, B = self.number(Kind.F, a), self.number(Kind.B, a)
            before_forward = y == F or self.paths.precedes(y, F)
            after_backward = y == B or self.paths.precedes(B, y)
            if not before_forward and not after_backward:
                self.return_before[a, y] = self.rows.new_literal()
                if takes[y]:
                    self.drop_before[a, y] = self.rows.new_literal()

    # --- for rows

    def number(self, kind: Kind, a: Activation) -> int:
        """The number of an activation's F, B or W."""
        return self.paths.number[Op(kind, *a)]

    def transfer_span(self, kind: Kind, a: Activation) -> Span:
        """The length of the whole activation's transfer, all parts together, and whether it takes place."""
        return float(self.costs.ms[kind, *a] * self.costs.parts[a[0]] * self.paths.scale), self.offloaded[a]

    # --- fixed orders of transfers

    def keep_order(self, a: Activation, b: Activation) -> bool:
        """Whether two activations of one stage, a before b, leave in that order and come back in it. They may as well
        where the stage keeps its order in F and in B, as exchanging transfers of equal activations costs nothing."""
        return self.order == "stages" and a[0] == b[0] and a[1] < b[1] and self._are_equal(a[1], b[1])

    def _are_equal(self, i: int, j: int) -> bool:
        return bool(self.costs.class_of[i] == self.costs.class_of[j])

    def is_over_before(self, a: Activation, b: Activation) -> bool:
        """Whether all of a is over before b begins."""
        return self.paths.precedes(self.number(Kind.B, a), self.number(Kind.F, b))

    def keeps_place(self, a: Activation) -> bool:
        """Whether all transfers on a's link are of activations that keep their order: then that of what stays keeps its
        place, too."""
        link = self.costs.link[self.costs.device]
        others = [b for b in self.activations if link[b[0]] == link[a[0]] and b != a]
        return all(self.keep_order(a, b) or self.keep_order(b, a) for b in others)


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
