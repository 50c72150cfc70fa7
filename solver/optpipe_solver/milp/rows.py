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
        self, times: Iterable[tuple[float, int]], literals: Iterable[tuple[float, Literal]], at_least: float
    ) -> None:
        """Adds the row: sum of coefficients × variables and literals `>= at_least`. Adds none if it always holds."""
        row, at_least = _linear_form(times, literals, at_least)
        if not row and at_least <= NOTHING:
            return
        self._index += row.keys()
        self._value += row.values()
        self._begins.append(len(self._index))
        self.at_least.append(at_least)

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
            self.add([(1.0, later), (-1.0, earlier)], literals, gap - big * len(when))

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


def _linear_form(
    times: Iterable[tuple[float, int]], literals: Iterable[tuple[float, Literal]], at_least: float
) -> tuple[dict[int, float], float]:
    """A sum that reaches `at_least` as one of variables alone, a negation being 1 - variable: coefficients by variable,
    and what they have to reach."""
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
