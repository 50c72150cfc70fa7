"""A problem in which every compute op lasts, so that times tell the order of ops, and their order what memory holds."""

from __future__ import annotations

import numpy as np

from optpipe.model.ops import Kind
from optpipe.model.problem import Problem
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
        fields = {Kind.F: "forward_ms", Kind.B: "backward_input_ms", Kind.W: "backward_weight_ms"}
        passes = np.bincount(
            [s for j in range(given.microbatches) for s in given.route(j)], minlength=len(given.stages)
        )
        least = max(LEAST_MS, LEAST * float((given.costs.ms[list(COMPUTE)].sum(axis=0) * passes).sum()))
        stages, count = [], 0
        for s, stage in enumerate(given.stages):
            short = {field: least for field in fields.values() if getattr(stage, field) < least}
            stages.append(stage.model_copy(update=short) if short else stage)
            count += len(short) * int(passes[s])
        self.problem = given.model_copy(update={"stages": tuple(stages)}) if count else given
        self.slack_ms = least * count
