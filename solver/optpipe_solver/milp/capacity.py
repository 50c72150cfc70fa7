"""Rows of bytes: sums of sizes that fit or do not, to the byte, although solvers keep rows only within a tolerance.

Sizes of some 10 GB in one row leak some hundred bytes at a tolerance of 1e-8. What counts is which sets of literals
fit, not the figures: sizes are divided by their greatest common divisor, and the limit is rounded down to the next sum
that some of them have. Then the sums that do not fit are usually far above it. Where they are not, the row is written
digit by digit, with whole carries, as on paper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from math import gcd, prod

import numpy as np

from optpipe.model.arrays import Ints
from optpipe_solver.milp.rows import Carry, Literal, Rows, form

LEAK = 1e-7  # of a row's coefficients: more than tolerances of the row and of its binaries let through
MOST_SUMS = 5_000  # of half of the sizes
BASE = 2**12  # of the digits: the leak of a row of a thousand stays below 1


def add_capacity(rows: Rows, sizes: Iterable[tuple[int, Literal]], limit: int) -> None:
    """Adds: the sizes of the literals that hold add up to `limit` at most. Sizes may be negative."""
    terms, room = _positive(sizes, limit)
    if room < 0:
        rows.add((), (), 1.0)  # nothing fits
        return
    for size, literal in terms:
        if size > room:
            rows.clause(~literal)
    terms = [(size, literal) for size, literal in terms if size <= room]
    if sum(size for size, _ in terms) <= room:
        return
    unit = gcd(*(size for size, _ in terms))
    terms, room = [(size // unit, literal) for size, literal in terms], room // unit
    leak = LEAK * sum(size for size, _ in terms)
    if leak >= 1:
        near = _nearest_sums(tuple(sorted(Counter(size for size, _ in terms).items())), room)
        if near is None or near[1] - near[0] <= leak:
            _add_digits(rows, terms, room)
            return
        room = near[0]
    largest = max(size for size, _ in terms) if leak >= 1 else 1
    rows.add((), [(-size / largest, literal) for size, literal in terms], -room / largest)


def _positive(sizes: Iterable[tuple[int, Literal]], limit: int) -> tuple[list[tuple[int, Literal]], int]:
    """The same with positive sizes: of a negative one the literal's negation counts."""
    row, at_least = form((), ((-size, literal) for size, literal in sizes), -limit)
    terms = [(abs(int(size)), Literal(var, size < 0)) for var, size in row.items()]
    return terms, int(-at_least) + sum(size for size, literal in terms if not literal.positive)


@lru_cache(maxsize=4096)
def _nearest_sums(counts: tuple[tuple[int, int], ...], room: int) -> tuple[int, int] | None:
    """The largest sum of some sizes up to `room`, and the smallest above. None if there are too many to look at.

    `counts` has each size and how often it may be in the sum.
    """
    halves: list[list[tuple[int, int]]] = [[], []]
    for size, count in sorted(counts, key=lambda of_size: -of_size[1]):
        min(halves, key=lambda half: prod(n + 1 for _, n in half)).append((size, count))
    first, second = _sums(halves[0]), _sums(halves[1])
    if first is None or second is None:
        return None
    after = np.searchsorted(second, room - first, side="right")
    below = first[after > 0] + second[after[after > 0] - 1]
    above = first[after < len(second)] + second[after[after < len(second)]]
    return int(below.max()), int(above.min())


def _sums(counts: list[tuple[int, int]]) -> Ints | None:
    sums = np.zeros(1, dtype=np.int64)
    for size, count in counts:
        sums = np.unique(np.add.outer(sums, size * np.arange(count + 1)))
        if len(sums) > MOST_SUMS:
            return None
    return sums


def _add_digits(rows: Rows, terms: list[tuple[int, Literal]], room: int) -> None:
    """One row for each digit of the sizes. What its sum exceeds that digit of the room by is carried to the next."""
    carry: int | None = None
    while room >= BASE:
        digits = [(size % BASE, literal) for size, literal in terms if size % BASE]
        most = sum(size for size, _ in digits) + (rows.upper[carry] if carry is not None else 0)
        into = rows.carry(
            Carry(tuple(digits), carry, room % BASE, BASE), max(0.0, np.ceil((most - room % BASE) / BASE))
        )
        _add_digit(rows, digits, carry, room % BASE, into)
        carry, room = into, room // BASE
        terms = [(size // BASE, literal) for size, literal in terms if size >= BASE]
    _add_digit(rows, terms, carry, room, None)


def _add_digit(rows: Rows, terms: list[tuple[int, Literal]], carry: int | None, room: int, into: int | None) -> None:
    carries = [(-1.0, carry)] if carry is not None else []
    carries += [(float(BASE), into)] if into is not None else []
    rows.add(carries, [(-float(size), literal) for size, literal in terms], -float(room))
