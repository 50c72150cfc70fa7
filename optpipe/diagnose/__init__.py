"""A trace in, the causes of what is lost and the cures out. No torch is needed, and no solver but in a process."""

from optpipe.diagnose.losses import Loss, Losses, explain
from optpipe.diagnose.runs import Runs, collect_runs
from optpipe.diagnose.slow import SlowDevice

__all__ = ["Loss", "Losses", "Runs", "SlowDevice", "collect_runs", "explain"]
