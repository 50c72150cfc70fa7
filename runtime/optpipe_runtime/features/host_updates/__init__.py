"""Optimizers on the host (Chronos-Offload): ops G, U and P.

- `host_optimizer`: one stage's optimizer; `feature`: the feature, its handlers, and the stages that a schedule does not
  update by these ops.
"""

from optpipe_runtime.features.host_updates.feature import HostUpdates
from optpipe_runtime.features.host_updates.host_optimizer import HostOptimizer

__all__ = ["HostOptimizer", "HostUpdates"]
