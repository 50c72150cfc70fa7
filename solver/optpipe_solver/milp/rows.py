"""A mixed-integer linear program as plain arrays, for any solver: variables, rows, and the rows that order times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import numpy as np

from optpipe.model.arrays import Floats, Ints


class Literal(NamedTuple):
    """A binary variable or, with `positive` False, its negation; `var` -1 is the constant."""

    var: int
    positive: bool = True

    def __invert__(self) -> Literal:
        return Literal(self.var, not self.positive)


NOTHING = 1e-9  # rounding may leave so much of a row that just holds
TRUE, FALSE = Literal(-1), Literal(-1, False)
Span = tuple[float, Literal]  # the length of a transfer, and whether it counts
Term = tuple[int, Literal]  # a size, and whether it counts


class Precedence(NamedTuple):
    """`later >= earlier + gap + span`, required if all of `when` hold."""

    later: int
    earlier: int
    gap: float
    span: Span
    when: tuple[Literal, ...]


class Rows:
    """The variables and rows of a program: `matrix @ x >= at_least`, and bounds of x. Every row is a lower bound.

    `big_m` relaxes every row that literals switch off. Without it each row has the smallest one that suffices.
    """

    def __init__(self, big_m: float | None = None) -> None:
        self._big_m = big_m
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.binary: list[bool] = []
        self.at_least: list[float] = []
        self.precedences: list[Precedence] = []
        self._is_precedence: list[bool] = []  # by row
        self._begins: list[int] = [0]
        self._index: list[int] = []
        self._value: list[float] = []

    def new_variable(self, lower: float, upper: float) -> int:
        """A new continuous variable's number."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.binary.append(False)
        return len(self.lower) - 1

    def new_literal(self) -> Literal:
        """A new binary variable."""
        var = self.new_variable(0.0, 1.0)
        self.binary[var] = True
        return Literal(var)

    def add(
        self,
        times: Iterable[tuple[float, int]],
        literals: Iterable[tuple[float, Literal]],
        at_least: float,
        is_precedence: bool = False,
    ) -> None:
        """Adds the row: sum of coefficients × variables and literals `>= at_least`. Adds none if it always holds."""
        row, at_least = _linear_form(times, literals, at_least)
        if not row and at_least <= NOTHING:
            return
        self._index += row.keys()
        self._value += row.values()
        self._begins.append(len(self._index))
        self.at_least.append(at_least)
        self._is_precedence.append(is_precedence)

    def add_clause(self, *literals: Literal) -> None:
        """Adds: at least one of the literals holds."""
        if TRUE not in literals:
            self.add((), ((1.0, literal) for literal in literals), 1.0)

    def add_follows(
        self, later: int, earlier: int, gap: float = 0.0, span: Span = (0.0, TRUE), when: tuple[Literal, ...] = ()
    ) -> None:
        """Adds the row of a `Precedence`, with the smallest big-M that the variables' bounds allow, or the one for all.
        Adds none if its literals cannot hold, or if it always holds."""
        if FALSE in when or any(~literal in when for literal in when):
            return
        self.precedences.append(Precedence(later, earlier, gap, span, when))
        when, (length, counts) = tuple(literal for literal in when if literal != TRUE), span
        big = self.upper[earlier] + gap + length - self.lower[later] if self._big_m is None else self._big_m
        if big > 0 or not when:
            literals = [(-length, counts), *((-big, literal) for literal in when)]
            self.add([(1.0, later), (-1.0, earlier)], literals, gap - big * len(when), is_precedence=True)

    def add_capacity(self, sizes: Iterable[Term], limit: int) -> None:
        """Adds: the sizes of the literals that hold add up to `limit` at most. Sizes may be negative."""
        row, at_least = _linear_form((), ((-size, literal) for size, literal in sizes), -limit)
        terms = [(abs(int(size)), Literal(var, size < 0)) for var, size in row.items()]
        room = int(-at_least) + sum(size for size, literal in terms if not literal.positive)
        if room < 0:
            self.add((), (), 1.0)  # nothing fits
            return
        for size, literal in terms:
            if size > room:
                self.add_clause(~literal)
        terms = [(size, literal) for size, literal in terms if size <= room]
        if sum(size for size, _ in terms) > room:
            unit = gcd(*(size for size, _ in terms))
            self.add((), [(-float(size // unit), literal) for size, literal in terms], -float(room // unit))

    def reduced(self, objective: int) -> tuple[Rows, Ints]:
        """The same program for one variable's minimum in fewer rows and variables, and (variables,) the numbers that
        these have here.

        Of the precedences without literals only the longest paths between variables of other rows are left, those that
        do not follow from others, and the bounds that they mean.
        """
        times = np.flatnonzero(~np.array(self.binary))
        place = {var: k for k, var in enumerate(times.tolist())}
        fixed, decided = list[Precedence](), list[Precedence]()
        for p in self.precedences:
            (fixed if all(literal.var < 0 for literal in (p.span[1], *p.when)) else decided).append(p)
        arcs = [(place[p.later], place[p.earlier], p.gap + p.span[0] * (p.span[1] == TRUE)) for p in fixed]
        lag = longest_paths(len(times), arcs)
        if self._big_m is not None or lag is None:
            return self, np.arange(len(self.lower))
        lower, upper = np.array(self.lower), np.array(self.upper)
        lower[times] = np.maximum(lower[times], (lower[times][:, None] + lag).max(axis=0))
        upper[times] = np.maximum(np.minimum(upper[times], (upper[times] - lag).min(axis=1)), lower[times])
        others = [row for row, follows in zip(self.each(), self._is_precedence, strict=True) if not follows]
        decided = [p for p in decided if lag[place[p.earlier], place[p.later]] < p.gap + p.span[0]]
        decided = [p for p in decided if lower[p.later] - upper[p.earlier] < p.gap + p.span[0]]
        used = {objective, -1, *(var for index, _, _ in others for var in index)}
        used |= {var for p in decided for var in (p.later, p.earlier, p.span[1].var, *(each.var for each in p.when))}
        kept = sorted(used - {-1})
        rows, number = Rows(), {var: k for k, var in enumerate(kept)} | {-1: -1}
        rows.lower, rows.upper, rows.binary = lower[kept].tolist(), upper[kept].tolist(), [self.binary[x] for x in kept]
        for index, value, at_least in others:
            rows.add([(c, number[var]) for var, c in zip(index, value, strict=True)], (), at_least)
        for later, earlier, gap, (length, counts), when in decided:
            span = length, counts._replace(var=number[counts.var])
            literals = tuple(literal._replace(var=number[literal.var]) for literal in when)
            rows.add_follows(number[later], number[earlier], gap, span, literals)
        left = np.array([var for var in kept if var in place])
        lag = lag[np.ix_(*2 * [[place[var] for var in left.tolist()]])]
        for x, direct in enumerate(lag):
            for y in np.flatnonzero((direct[:, None] + lag).max(axis=0) < direct).tolist():
                rows.add_follows(number[left[y]], number[left[x]], float(direct[y]))
        return rows, np.array(kept)

    @property
    def length(self) -> int:
        """How many rows it has, or variables where these are more."""
        return max(len(self.lower), len(self.at_least))

    @property
    def size(self) -> str:
        """Its size in words."""
        return f"{len(self.lower)} variables, {len(self.at_least)} rows"

    def matrix(self) -> tuple[Ints, Ints, Floats]:
        """The rows compressed: where each begins (rows + 1,), column numbers and values (entries,)."""
        return np.array(self._begins), np.array(self._index, dtype=np.int64), np.array(self._value)

    def each(self) -> Iterator[tuple[list[int], list[float], float]]:
        """Row by row the column numbers, their coefficients, and what the sum has to reach."""
        for (a, b), at_least in zip(pairwise(self._begins), self.at_least, strict=True):
            yield self._index[a:b], self._value[a:b], at_least

    @staticmethod
    def holds(literal: Literal, x: Floats) -> bool:
        return literal.positive == (literal.var < 0 or bool(x[literal.var] > 0.5))

    def earliest(self, x: Floats) -> Floats:
        """The least values of the other variables that keep every precedence that the binaries of `x` require: exact
        times, free of the solver's tolerance. They are reached from `lower`, round after round, as in Bellman and
        Ford's method."""
        active = [p for p in self.precedences if all(self.holds(literal, x) for literal in p.when)]
        later, earlier = (np.array([p[k] for p in active], dtype=np.int64) for k in (0, 1))
        gap = np.array([p.gap + (p.span[0] if self.holds(p.span[1], x) else 0.0) for p in active])
        times = np.where(self.binary, x > 0.5, self.lower)
        for _ in range(len(times)):
            before = times.copy()
            np.maximum.at(times, later, times[earlier] + gap)
            if np.array_equal(before, times):
                break
        return times


def longest_paths(nodes: int, arcs: Iterable[tuple[int, int, float]]) -> Floats | None:
    """(nodes, nodes) the longest path from the first to the second, -inf without any; of arcs to a node, from one, and
    their lengths. None if there is a cycle."""
    lag: Floats = np.full((nodes, nodes), -np.inf)
    followers, waits = [set[int]() for _ in range(nodes)], [0] * nodes
    for y, x, length in arcs:
        lag[x, y] = max(lag[x, y], length)
        waits[y] += y not in followers[x]
        followers[x].add(y)
    order = [x for x, n in enumerate(waits) if n == 0]
    for x in order:
        for y in followers[x]:
            waits[y] -= 1
            if waits[y] == 0:
                order.append(y)
    for x in reversed(order):
        direct = lag[x].copy()
        for y in followers[x]:
            np.maximum(lag[x], direct[y] + lag[y], out=lag[x])
    return lag if len(order) == nodes else None


def _linear_form(
    times: Iterable[tuple[float, int]], literals: Iterable[tuple[float, Literal]], at_least: float
) -> tuple[dict[int, float], float]:
    """A sum that reaches `at_least` as one of variables alone: coefficients by variable, and what they must reach."""
    row: dict[int, float] = {}
    for coefficient, var in times:
        row[var] = row.get(var, 0.0) + coefficient
    for coefficient, (var, positive) in literals:
        if not positive:
            at_least, coefficient = at_least - (coefficient if var >= 0 else 0.0), -coefficient
        elif var < 0:
            at_least -= coefficient
        if var >= 0:
            row[var] = row.get(var, 0.0) + coefficient
    return {var: coefficient for var, coefficient in row.items() if coefficient}, at_least
