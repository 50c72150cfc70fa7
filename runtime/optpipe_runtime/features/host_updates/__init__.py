"""Optimizers on the host (Chronos-Offload): ops G, U and P.

- `host_optimizer`: one stage's optimizer; `updates`: the feature, its handlers, and the stages that a schedule does not
  update by these ops.
"""

from optpipe_runtime.features.host_updates.host_optimizer import HostOptimizer
from optpipe_runtime.features.host_updates.updates import HostUpdates

__all__ = ["HostOptimizer", "HostUpdates"]
