"""Optimizers on the host (Chronos-Offload): ops G, U and P.

- `feature`: the handlers, the stages that a schedule does not update by these ops, and the profile;
- `host_optimizer`: one stage's optimizer; `host_parameter`: a parameter on the device and on the host.
"""

from optpipe_runtime.features.host_updates.feature import HostUpdates
from optpipe_runtime.features.host_updates.host_optimizer import Factory, HostOptimizer

__all__ = ["Factory", "HostOptimizer", "HostUpdates"]
