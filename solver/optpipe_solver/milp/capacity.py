"""Rows of bytes: sums of sizes that fit or do not, to the byte, although solvers keep rows only within a tolerance.

Sizes of some 10 GB in one row leak some hundred bytes at a tolerance of 1e-8. Sizes are divided by their greatest
common divisor. Where that leaves them too large for the tolerance, the row is written digit by digit, with whole
carries, as on paper.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, gcd

from optpipe_solver.milp.rows import Carry, Literal, Rows, linear_form

LEAK = 1e-7  # of a row's coefficients: more than tolerances of the row and of its binaries let through
BASE = 2**12  # of the digits: the leak of a row of a thousand stays below 1

Term = tuple[int, Literal]  # a size, and whether it counts


def sizes_fit(rows: Rows, sizes: Iterable[Term], limit: int) -> None:
    """Adds: the sizes of the literals that hold add up to `limit` at most. Sizes may be negative."""
    terms, room = _with_positive_sizes(sizes, limit)
    if room < 0:
        rows.add((), (), 1.0)  # nothing fits
        return
    for size, literal in terms:
        if size > room:
            rows.add_clause(~literal)
    terms = [(size, literal) for size, literal in terms if size <= room]
    if sum(size for size, _ in terms) <= room:
        return
    unit = gcd(*(size for size, _ in terms))
    terms, room = [(size // unit, literal) for size, literal in terms], room // unit
    if LEAK * sum(size for size, _ in terms) < 1:
        rows.add((), [(-float(size), literal) for size, literal in terms], -float(room))
    else:
        _digits_fit(rows, terms, room)


def _with_positive_sizes(sizes: Iterable[Term], limit: int) -> tuple[list[Term], int]:
    """The same with positive sizes: of a negative one the literal's negation counts."""
    row, at_least = linear_form((), ((-size, literal) for size, literal in sizes), -limit)
    terms = [(abs(int(size)), Literal(var, size < 0)) for var, size in row.items()]
    return terms, int(-at_least) + sum(size for size, literal in terms if not literal.positive)


def _digits_fit(rows: Rows, terms: list[Term], room: int) -> None:
    """One row for each digit of the sizes. What its sum exceeds that digit of the room by is carried to the next."""
    carry: int | None = None
    while room >= BASE:
        digits = [(size % BASE, literal) for size, literal in terms if size % BASE]
        most = sum(digit for digit, _ in digits) + (rows.upper[carry] if carry is not None else 0)
        next_carry = rows.new_carry(
            Carry(tuple(digits), carry, room % BASE, BASE), max(0, ceil((most - room % BASE) / BASE))
        )
        _digit_fits(rows, digits, carry, room % BASE, next_carry)
        carry, room = next_carry, room // BASE
        terms = [(size // BASE, literal) for size, literal in terms if size >= BASE]
    _digit_fits(rows, terms, carry, room, None)


def _digit_fits(rows: Rows, terms: list[Term], carry: int | None, room: int, next_carry: int | None) -> None:
    carries = [(-1.0, carry)] if carry is not None else []
    carries += [(float(BASE), next_carry)] if next_carry is not None else []
    rows.add(carries, [(-float(size), literal) for size, literal in terms], -float(room))
