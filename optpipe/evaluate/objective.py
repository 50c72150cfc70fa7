"""How long a schedule is, when one is better, and when a bound proves it: the one place for lengths and tolerance.

Lengths are sums of floats, and another order of summation gives another last digit. `TOLERANCE` is how much of a
length may be such rounding.
"""

from __future__ import annotations

from typing import Literal, Protocol

Objective = Literal["makespan", "span"]

TOLERANCE = 1e-9  # relative, and in ms
NO_SCHEDULE_MS = float("inf")  # the length of a schedule that is not there


class Timed(Protocol):
    """Anything with a makespan and a span, such as a schedule or a timeline."""

    @property
    def makespan_ms(self) -> float: ...

    @property
    def span_ms(self) -> float: ...


def length_ms(schedule: Timed | None, objective: Objective) -> float:
    """The length that counts, in ms: the makespan, or the span (OptPipe, Eq. 3). Infinite without a schedule."""
    if schedule is None:
        return NO_SCHEDULE_MS
    return schedule.makespan_ms if objective == "makespan" else schedule.span_ms


def shorter(length: float, than: float) -> bool:
    """Whether a length is shorter than another by more than rounding."""
    return length < than * (1 - TOLERANCE)


def reaches(length: float, bound: float) -> bool:
    """Whether a schedule of this length is optimal, given that no schedule is shorter than `bound`."""
    return length <= bound * (1 + TOLERANCE) + TOLERANCE


def raises(bound: float, above: float) -> bool:
    """Whether a lower bound is higher than another by more than rounding."""
    return bound > above * (1 + TOLERANCE)


def gap(length: float | None, bound: float | None) -> float | None:
    """How much shorter a schedule could at most be, as a share of this length; 0 is proven, None is not known."""
    if length is None or bound is None:
        return None
    return 0.0 if reaches(length, bound) else 1.0 - bound / length
