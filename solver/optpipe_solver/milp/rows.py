"""A mixed-integer linear program as plain arrays, whatever solver reads it: variables, rows, and the rows that order times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from optpipe.graph import Floats, Ints


class Literal(NamedTuple):
    """A binary variable or, with `positive` False, its negation; `var` -1 is the constant."""

    var: int
    positive: bool = True

    def __invert__(self) -> Literal:
        return Literal(self.var, not self.positive)


TRUE, FALSE = Literal(-1), Literal(-1, False)


class Precedence(NamedTuple):
    """`later >= earlier + gap + span.length`, required where all of `when` hold. `span` is a transfer: its length counts if it is made."""

    later: int
    earlier: int
    gap: float = 0.0
    span: tuple[float, Literal] = (0.0, TRUE)
    when: tuple[Literal, ...] = ()


class Rows:
    """Grows a program: minimize `cost` subject to `matrix @ x >= at_least` and bounds. Every row is a lower bound on a linear form."""

    def __init__(self) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.binary: list[bool] = []
        self.at_least: list[float] = []
        self.precedences: list[Precedence] = []
        self._begins: list[int] = [0]
        self._index: list[int] = []
        self._value: list[float] = []

    def variable(self, lower: float, upper: float) -> int:
        """A new continuous variable's number."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.binary.append(False)
        return len(self.lower) - 1

    def literal(self) -> Literal:
        """A new binary variable."""
        var = self.variable(0.0, 1.0)
        self.binary[var] = True
        return Literal(var)

    def add(self, times: Iterable[tuple[float, int]], literals: Iterable[tuple[float, Literal]], at_least: float) -> None:
        """The row sum of coefficients × variables and literals `>= at_least`."""
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
        self._index += row.keys()
        self._value += row.values()
        self._begins.append(len(self._index))
        self.at_least.append(at_least)

    def clause(self, *literals: Literal) -> None:
        """At least one of them holds."""
        if TRUE not in literals:
            self.add((), ((1.0, literal) for literal in literals if literal != FALSE), 1.0)

    def precede(self, precedence: Precedence) -> None:
        """The row of a precedence, with the smallest big-M that the variables' bounds allow; none where it cannot hold, or always does."""
        if FALSE in precedence.when:
            return
        when = tuple(literal for literal in precedence.when if literal != TRUE)
        later, earlier, gap, (length, made) = precedence.later, precedence.earlier, precedence.gap, precedence.span
        big = self.upper[earlier] + gap + length - self.lower[later]
        self.precedences.append(precedence)
        if big > 0 or not when:
            literals = [(-length, made), *((-big, literal) for literal in when)]
            self.add([(1.0, later), (-1.0, earlier)], literals, gap - big * len(when))

    def matrix(self) -> tuple[Ints, Ints, Floats]:
        """The rows compressed: where each begins (rows + 1,), column numbers and values (entries,)."""
        return np.array(self._begins), np.array(self._index, dtype=np.int64), np.array(self._value)

    def earliest(self, x: Floats) -> Floats:
        """The least values of the continuous variables that keep every precedence which the binaries of `x` require: exact times, free of
        the solver's tolerance. Least and greatest values are reached from `lower`, round after round, as in Bellman and Ford's method."""
        truth = x > 0.5

        def holds(literal: Literal) -> bool:
            return literal.positive == (True if literal.var < 0 else bool(truth[literal.var]))

        active = [p for p in self.precedences if all(map(holds, p.when))]
        later, earlier = np.array([p.later for p in active]), np.array([p.earlier for p in active])
        gap = np.array([p.gap + (p.span[0] if holds(p.span[1]) else 0.0) for p in active])
        times = np.where(self.binary, truth, self.lower)
        for _ in range(len(times)):
            before = times.copy()
            np.maximum.at(times, later, times[earlier] + gap)
            if np.array_equal(before, times):
                break
        return times
