"""How sure it is that one candidate is faster than another, and what to measure to know it.

Both are predicted with the same parameters, so that what is uncertain of these counts only as far as the candidates
depend on them differently.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt
from typing import NamedTuple

from optpipe.transformer.calibrate import UNEXPLAINED, gradient, ratio_variances
from optpipe.transformer.gpu import Gpu
from optpipe_solver.planner.candidate import Candidate


class Difference(NamedTuple):
    """How much longer another candidate takes than the best one.

    Attributes
    ----------
    longer
        The logarithm of its predicted iteration over that of the best one; without a schedule, of its bound.
    spread
        The standard deviation of that logarithm.
    variance
        What of its variance comes from each parameter, and from what is unexplained of both: shares that add up to 1.
    """

    longer: float
    spread: float
    variance: dict[str, float]

    @property
    def is_open(self) -> bool:
        """Whether it is less than one standard deviation: the two are equal as far as is known."""
        return self.longer < self.spread

    @property
    def largest(self) -> str:
        """The parameter, or `UNEXPLAINED`, that most of the variance comes from."""
        return max(self.variance, key=lambda name: self.variance[name])


def difference(best: Candidate, other: Candidate) -> Difference:
    """Compare a candidate with the best one; derivatives are by differences."""
    gpu = best.estimate.gpu
    variances = ratio_variances(gpu, gradient(_iteration(other), gpu) - gradient(_iteration(best), gpu))
    total = sum(variances.values())
    return Difference(
        longer=log(other.least_ms / best.least_ms),
        spread=sqrt(total),
        variance={name: each / total for name, each in variances.items()} if total else {UNEXPLAINED: 1.0},
    )


def _iteration(candidate: Candidate) -> Callable[[Gpu], float]:
    """Predict the iteration for other parameters: waiting grows like the work of the busiest device."""
    estimate = candidate.estimate
    stretched = (candidate.least_ms - estimate.after_ms) / max(estimate.busy_ms)

    def predict(gpu: Gpu) -> float:
        other = estimate.on(gpu)
        return stretched * max(other.busy_ms) + other.after_ms

    return predict
