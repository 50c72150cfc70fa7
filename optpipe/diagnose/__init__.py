"""A trace in, the causes of what is lost and the cures out. No torch is needed, and no solver but in a process."""

from optpipe.diagnose.batches import Change, StepBatch, UserFacts, batch_of
from optpipe.diagnose.cures import Cure, Cures, find_cures
from optpipe.diagnose.losses import Loss, Losses, SlowDevice, explain
from optpipe.diagnose.report import Diagnosis, diagnose
from optpipe.diagnose.runs import Runs, collect_runs

__all__ = [
    "Change",
    "Cure",
    "Cures",
    "Diagnosis",
    "Loss",
    "Losses",
    "Runs",
    "SlowDevice",
    "StepBatch",
    "UserFacts",
    "batch_of",
    "collect_runs",
    "diagnose",
    "explain",
    "find_cures",
]
