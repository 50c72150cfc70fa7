"""A schedule for every step of a training whose micro-batches differ.

- `planned`: `PlannedSteps`, what users call: the ranks prepare a step while the one before runs;
- `planner`: what plans it, on one of them, by what its micro-batches will cost.
"""

from optpipe_runtime.steps.planned import PlannedSteps

__all__ = ["PlannedSteps"]
