"""A trace in, the causes of what is lost and the cures out. No torch is needed, and no solver but in a process."""

from optpipe.diagnose.batches import Change, UserFacts, batch_of
from optpipe.diagnose.losses import explain
from optpipe.diagnose.report import Diagnosis, diagnose
from optpipe.diagnose.runs import Runs, collect_runs

__all__ = ["Change", "Diagnosis", "Runs", "UserFacts", "batch_of", "collect_runs", "diagnose", "explain"]
