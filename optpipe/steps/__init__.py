"""A schedule for every step: its micro-batches' costs, their replicas, their order. No torch is needed."""

from optpipe.steps.assign import Assignment, assign, of_microbatches
from optpipe.steps.cost_model import CostModel
from optpipe.steps.memory import StepMemoryError
from optpipe.steps.scheduler import PlannedStep, StepScheduler

__all__ = ["Assignment", "CostModel", "PlannedStep", "StepMemoryError", "StepScheduler", "assign", "of_microbatches"]
