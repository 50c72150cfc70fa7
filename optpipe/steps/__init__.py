"""A schedule for every step: its micro-batches' documents, costs, replicas and order. No torch is needed."""

from optpipe.steps.assign import Assignment, Packing, StepMemoryError, assign, pack
from optpipe.steps.cost_model import CostModel, StepRules
from optpipe.steps.scheduler import PlannedStep, StepScheduler

__all__ = [
    "Assignment",
    "CostModel",
    "Packing",
    "PlannedStep",
    "StepMemoryError",
    "StepRules",
    "StepScheduler",
    "assign",
    "pack",
]
