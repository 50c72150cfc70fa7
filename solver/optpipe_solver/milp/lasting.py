"""A problem in which every compute op lasts, so that times tell the order of ops, and their order what memory holds."""

from __future__ import annotations

import numpy as np

from optpipe.model.problem import Problem
from optpipe.model.records import each_microbatch
from optpipe_solver.milp.precedences import COMPUTE

LEAST_MS = 1e-5  # more than what `lift` takes for one moment
LEAST = 1e-8  # of everything, one after the other: more than what solvers take for one moment


class Lasting:
    """The problem with a short time for each F, B and W that takes none.

    Its programs are the problem's. On no path are there more such ops than in all, so no program takes more than
    `slack_ms` longer than on the problem, and a bound less that is one of the problem.

    Attributes
    ----------
    problem
        The problem that is solved; the given one if all ops last.
    slack_ms
        All the added time.
    """

    def __init__(self, given: Problem) -> None:
        passes = np.zeros(given.costs.activation.shape, np.int64)  # (S, m) whether a micro-batch passes a stage
        for j in range(given.microbatches):
            passes[list(given.route(j)), j] = 1
        ms = given.costs.ms[list(COMPUTE)]
        least = max(LEAST_MS, LEAST * float((ms.sum(axis=0) * passes).sum()))
        fields = ("forward_ms", "backward_input_ms", "backward_weight_ms")
        stages = [
            stage.model_copy(update={f: each_microbatch(lambda x: max(x, least), getattr(stage, f)) for f in fields})
            for stage in given.stages
        ]
        count = int(((ms < least) * passes).sum())
        self.problem = given.model_copy(update={"stages": tuple(stages)}) if count else given
        self.slack_ms = least * count
