"""A schedule for every step: its micro-batches' documents, costs, replicas and order. No torch is needed."""

from optpipe.steps.assign import Assignment, assign
from optpipe.steps.cost_model import CostModel, StepRules
from optpipe.steps.memory import StepMemoryError
from optpipe.steps.pack import Packing, pack
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
