"""How large a problem is for the MILP, and how large it may be."""

from __future__ import annotations

from optpipe.model.problem import Problem

# Compute ops that are solved whole, unless the user sets another limit or has a licence of Gurobi. In a minute on one
# core HiGHS still improves a good start for 4x8 (96), but not for 6x8 or 4x12 (144).
MOST_OPS = 100


def count_ops(problem: Problem) -> int:
    """How many compute ops the model has to order."""
    return 3 * sum(len(problem.route(j)) for j in range(problem.microbatches))
