"""Evictions (ops E, L, A, V): activations that wait for their backward on another rank's device (Kim et al., "BPipe:
Memory-Balanced Pipeline Parallelism for Training Large Language Models").

- `feature`: the handlers, what a schedule and a step must fulfil, and the profile; `peers`: the transfers.
"""

from optpipe_runtime.features.evictions.feature import Evictions, require_peers

__all__ = ["Evictions", "require_peers"]
